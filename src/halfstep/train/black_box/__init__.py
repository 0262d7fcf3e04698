"""Steps that failed, kept in the run's folder with all that is needed to run them again, on any machine."""
