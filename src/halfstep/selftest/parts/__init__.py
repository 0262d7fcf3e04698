"""The parts of the self-test: each file has `WHAT`, one line for `--list`, and `check`."""
