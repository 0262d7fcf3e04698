"""What goes wrong slowly: meters that look at one step in fifty, and never make the device wait."""
