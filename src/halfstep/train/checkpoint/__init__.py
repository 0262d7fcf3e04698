"""The state of a run on disk: committed whole, verified before it is used, and never a pickle."""
