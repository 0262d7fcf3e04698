"""Why there is no speed-up: where the time of a step goes, and the one cause to mend first."""
