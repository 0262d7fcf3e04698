"""One recipe in several precisions, over the same seeds: speed, memory and accuracy in one table."""
