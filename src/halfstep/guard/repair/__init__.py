"""Remedies for failed steps, the smallest first, each of which can be undone."""
