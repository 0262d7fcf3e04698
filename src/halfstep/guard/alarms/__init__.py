"""What says that a run is in trouble: one alarm a file, from numbers that all processes have alike."""
