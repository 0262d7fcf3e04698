"""Check precision settings before a run: the source of each, and which of them conflict."""
