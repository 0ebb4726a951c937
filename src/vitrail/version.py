"""The version, read by the build and by everything that records it."""

__version__ = "0.1.0.dev0"
