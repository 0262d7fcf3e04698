"""A step that is run again, or in another way, without a trace."""
