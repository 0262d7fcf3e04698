"""Building blocks that several tasks share."""
