"""How much memory a step takes, without taking it."""
