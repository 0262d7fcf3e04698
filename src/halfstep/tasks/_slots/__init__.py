"""What slots are judged by, and how they are shown."""
