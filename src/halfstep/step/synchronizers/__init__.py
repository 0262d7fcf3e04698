"""The same gradients on all ranks: replicated and sharded models."""
