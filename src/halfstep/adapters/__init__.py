"""halfstep in the loops of other libraries."""
