"""The training loop: setup, steps, evaluation, checkpointing, resume, and the files that a run writes."""
