"""Numerics lint: what a step does to its numbers that a person would not have wanted, found from the numbers."""
