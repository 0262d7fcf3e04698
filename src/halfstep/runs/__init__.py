"""Start, load, export and replay runs: what the commands and the Python API call."""
