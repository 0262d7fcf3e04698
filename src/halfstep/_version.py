"""The version of halfstep."""

__version__ = "0.1.0"
