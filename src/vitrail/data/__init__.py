"""Data sets and images."""

import lazy_loader

# The public names are listed in __init__.pyi and imported at first use: one data set does not load all the others.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
