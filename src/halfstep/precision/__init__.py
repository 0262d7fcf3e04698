"""Precisions: their names, what the hardware supports, how one is chosen, and fp32 islands."""
