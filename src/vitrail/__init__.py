"""vitrail: see through any Vision Transformer.

>>> import vitrail
>>> model = vitrail.load()                       # doctest: +SKIP
>>> vitrail.explain(model, "photo.jpg").save("why.png")   # doctest: +SKIP
"""

import lazy_loader

# The public names are listed in __init__.pyi and imported at first use: `import vitrail` stays quick.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
