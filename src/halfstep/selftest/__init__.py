"""The self-test: what halfstep promises, checked on the device that is here, one part after another."""
