"""Profile a step: measure where its time goes and name the main cause of a missing speed-up."""
