"""Slot models: encode video frame by frame into slots, and decode the frames from them."""
