"""Metrics and drawings of the slots task."""
