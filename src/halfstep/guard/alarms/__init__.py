"""Alarms: each file detects one kind of failing run, from numbers that all ranks share."""
