"""Recipes: one complete run as data, with its schema, its sources and its overrides."""
