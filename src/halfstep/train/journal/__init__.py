"""What a run says about itself, and who listens."""
