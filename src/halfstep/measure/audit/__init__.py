"""Audit: which format each part of a model is stored, computed and kept in, and what that does to its numbers."""
