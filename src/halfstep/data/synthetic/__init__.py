"""Draw data from a seed instead of downloading it."""
