"""Count what a step costs on many ranks, without them: memory, collectives, saves and restarts."""
