"""The fastest way to run that fits and keeps parity, found by measuring."""
