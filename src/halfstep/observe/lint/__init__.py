"""Numerics lint: find harmful numerics in a step from the values that it computes with."""
