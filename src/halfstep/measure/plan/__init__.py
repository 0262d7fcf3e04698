"""Find the fastest setting that fits in memory and keeps parity, by measuring."""
