"""Many steps: recipes, data, the loop, and what it writes."""
