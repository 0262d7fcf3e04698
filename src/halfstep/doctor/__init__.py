"""Settings before you run: where each comes from, and which contradict each other."""
