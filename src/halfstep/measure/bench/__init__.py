"""Train one recipe in several precisions with the same seeds; compare speed, memory and accuracy in one table."""
