"""A recipe: one complete run as data."""
