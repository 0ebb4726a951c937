"""The HTTP server behind ``vitrail serve``."""
