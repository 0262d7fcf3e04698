"""Draw pictures from plain data."""
