"""What several tests need: a model that writes every kind of buffer, and digests of state."""
