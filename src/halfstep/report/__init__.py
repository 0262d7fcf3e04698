"""One page to look at: reports of runs, benches and plans, from plain data."""
