"""What runs in which format: names, hardware, the ladder, precisions as values, islands."""
