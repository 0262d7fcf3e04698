"""One update, all or nothing. Usable alone: no YAML, no files, no logging, no command line."""
