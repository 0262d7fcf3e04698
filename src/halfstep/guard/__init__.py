"""When a step goes wrong: what made it, what cures it, and whether to go on."""
