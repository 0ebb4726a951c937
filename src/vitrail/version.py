"""The version, read by the build and by everything that records it."""

__version__ = "0.2.0"
