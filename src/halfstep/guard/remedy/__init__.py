"""What can be done about it, smallest first, and undone again."""
