"""Read samples: their sources, their order, and the handling of bad ones."""
