"""Training loops as people write them, one family a file; `benchmarks/real_loops.py` runs them."""
