"""Faults that were put into small models on purpose, each with what a diagnosis has to say about it."""
