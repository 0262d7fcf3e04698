"""Meters for slow failures; they sample one step in fifty and never make the device wait."""
