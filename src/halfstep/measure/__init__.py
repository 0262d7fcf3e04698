"""How fast, how much, how true: choosing by measuring."""
