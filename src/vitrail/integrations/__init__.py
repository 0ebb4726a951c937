"""Where vitrail meets other libraries: training loops, trackers of experiments, tools for data, measures of maps."""

import lazy_loader

# The public names are listed in __init__.pyi and imported at first use: no other library is needed before that.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
