"""The training step as a transaction. Usable alone: no YAML, no files, no logging, no command line."""
