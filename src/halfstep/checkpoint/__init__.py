"""Checkpoints: the state of a run on disk, committed atomically, verified before use, and stored without pickle."""
