"""Rules that choose settings to fit a data set and a machine, one file per task. Imports no torch."""
