"""Record failed steps in the run's folder with everything needed to replay them on any machine."""
