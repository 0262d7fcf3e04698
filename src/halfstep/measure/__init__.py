"""Measurements of speed, memory, precision and accuracy, and the choices that follow from them."""
