"""How good an explanation is: every metric, defined once."""

import lazy_loader

# The public names are listed in __init__.pyi and imported at first use: torchmetrics takes seconds.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
