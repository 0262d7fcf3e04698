"""Samples: where they come from, in which order, and what happens to the bad ones."""
