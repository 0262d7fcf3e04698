"""Predict the memory of a training step without running it."""
