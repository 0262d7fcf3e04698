"""Audit: report which format each part of a model is stored, computed and saved in, and the effect on its values."""
