"""Models that no kept library has."""
