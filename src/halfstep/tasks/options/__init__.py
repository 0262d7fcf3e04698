"""What recipes of our tasks may say. Imports no torch, so that a wrong recipe is refused at once."""
