"""The guard: find the cause of a failed step, apply a remedy, and decide whether the run can continue."""
