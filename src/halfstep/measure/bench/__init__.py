"""One recipe in several precisions: time, memory, and whether accuracy is the same."""
