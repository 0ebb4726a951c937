"""vitrail: see through any Vision Transformer.

>>> import vitrail
>>> model = vitrail.load()                       # doctest: +SKIP
>>> vitrail.explain(model, "photo.jpg").save("why.png")   # doctest: +SKIP
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitrail.errors import VitrailError as VitrailError
from vitrail.version import __version__ as __version__

if TYPE_CHECKING:
    from vitrail import data as data
    from vitrail import metrics as metrics
    from vitrail.api import evaluate as evaluate
    from vitrail.api import explain as explain
    from vitrail.explanation import Explanation as Explanation
    from vitrail.explanation import open_explanation as open
    from vitrail.methods.base import Method as Method
    from vitrail.methods.registry import list_methods as list_methods
    from vitrail.methods.registry import method as method
    from vitrail.metrics.base import list_metrics as list_metrics
    from vitrail.models.loading import load as load
    from vitrail.models.wrapping import wrap as wrap

# Public name → where it lives. Imported at first use: `import vitrail` and `vitrail --help` stay quick.
_PUBLIC = {
    "Explanation": "vitrail.explanation:Explanation",
    "Method": "vitrail.methods.base:Method",
    "evaluate": "vitrail.api:evaluate",
    "explain": "vitrail.api:explain",
    "list_methods": "vitrail.methods.registry:list_methods",
    "list_metrics": "vitrail.metrics.base:list_metrics",
    "load": "vitrail.models.loading:load",
    "method": "vitrail.methods.registry:method",
    "open": "vitrail.explanation:open_explanation",
    "wrap": "vitrail.models.wrapping:wrap",
}

_PACKAGES = ("data", "metrics")

__all__ = ["Explanation", "Method", "VitrailError", "__version__", "evaluate", "explain", "list_methods",
           "list_metrics", "load", "method", "open",
           "wrap"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"vitrail.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    module, _, attribute = _PUBLIC[name].partition(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC, *_PACKAGES])
