"""The fault matrix: each file is a row, which breaks something on purpose and counts how often it was held."""
