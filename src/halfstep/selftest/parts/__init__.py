"""The parts of the self-test: each file has `check`."""
