"""The web page and its HTTP interface: ``vitrail serve``."""
