"""The registry: names, aliases and compositions (``base.aggregation``) of methods."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import make_dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method, MethodInfo, TokenMethod
from vitrail.models.view import View

MODULES = (
    "attention",
    "gradients",
    "cams",
    "relevance",
    "markov",
    "decomposition",
    "vtranm",
    "tis",
    "vit_cx",
    "occlusion",
    "surrogate",
    "pami",
    "control",
)

# Other names that the papers and their rivals use.
ALIASES = {
    "ali_lrp": "conservative_lrp",
    "att_cat": "att_ixg.plus",
    "attcam": "attn_cam",
    "attcat": "att_ixg.plus",
    "attention_rollout": "rollout",
    "bth": "bt_h",
    "btt": "bt_t",
    "cat": "input_x_gradient.plus",
    "cgw1": "trans_att",
    "cgw2": "gen_att",
    "chefer1": "trans_att",
    "chefer2": "gen_att",
    "cp_lrp": "conservative_lrp",
    "generic_attention": "gen_att",
    "grad_sam": "gen_att.plus",
    "gradsam": "gen_att.plus",
    "tokentm": "vtranm",
    "transformer_attribution": "trans_att",
    "transformer_mm": "gen_att",
}

C = TypeVar("C", bound=Callable[..., Any])


_METHODS: dict[str, type[Method]] = {}


def method(
    name: str,
    *,
    family: str = "custom",
    class_specific: bool = True,
    level: Literal["token", "pixel"] = "token",
    needs: Literal["tokens", "features", "logits"] = "tokens",
    cost: tuple[float, float] = (1, 1),
    protocols: tuple[str, ...] = ("default",),
    paper: str = "",
    signed: bool | None = None,
) -> Callable[[C], C]:
    """Registers a method: a subclass of ``Method``, or a function ``(model, images, target, **params) → maps``.

    ``signed`` says whether maps tell for from against (two colours about zero); None = as the values are.
    A function gets the view, a batch (B, 3, H, W) and one class per image, and returns (B, rows, columns) token maps,
    or (B, H, W) for ``level="pixel"``. Its keyword parameters become the method's.
    """
    if not isinstance(name, str):
        raise VitrailError('a method needs a name: write @vitrail.method("my_name") above it, with brackets.')

    def register(thing: C) -> C:
        if name in _METHODS and _METHODS[name].__module__ != getattr(thing, "__module__", None):
            raise VitrailError(f"there is already a method {name!r}: choose another name.")
        if not name.isidentifier() or name != name.lower():
            raise VitrailError(f"a method name is lower-case letters, digits and underscores, but got {name!r}.")
        cls = (
            thing
            if isinstance(thing, type) and issubclass(thing, Method)
            else _from_function(name, cast(Callable[..., Tensor], thing), needs)
        )
        summary = (inspect.getdoc(thing) or "").split("\n")[0]
        cls.info = MethodInfo(
            name, family, class_specific, level, needs, cost, protocols, cls.parameters(), paper, summary, signed
        )
        _METHODS[name] = cls
        return thing

    return register


def list_methods(pattern: str = "*") -> dict[str, MethodInfo]:
    """Every method whose name fits the glob, compositions included."""
    names = [*_registered()]
    names += [f"{n}.{a}" for n, cls in _registered().items() for a in getattr(cls, "aggregations", ())]
    return {name: get_method(name).info for name in sorted(names) if fnmatchcase(name, pattern)}


def get_method(name: str) -> type[Method]:
    """The class of a method, by id, composition or alias; ``cat`` and ``tokentm.…`` resolve too."""
    if not isinstance(name, str):
        raise VitrailError(
            f"a method is one name, such as 'gen_att', but got {name!r}: for several, call once for each."
        )
    base, dot, aggregation = name.strip().lower().partition(".")
    if dot and not aggregation:
        raise VitrailError(f"{name!r} ends with a dot: expected an aggregation after it, as in {base}.plus.")
    if base in ALIASES:
        base, _, own = ALIASES[base].partition(".")
        aggregation = ".".join(filter(None, (own, aggregation)))
    if base not in _registered():
        close = difflib.get_close_matches(base, [*_registered(), *ALIASES], n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise VitrailError(f"there is no method {name!r}.{hint} `vitrail methods` lists them.")
    return compose(base, aggregation) if aggregation else _registered()[base]


@lru_cache(maxsize=256)
def compose(base: str, aggregation: str) -> type[Method]:
    """``base.aggregation`` as a class of its own."""
    from vitrail.methods.aggregation import AGGREGATORS

    cls = _registered()[base]
    if "." in aggregation:
        raise VitrailError(f"{base}.{aggregation} does not exist: one aggregation at a time.")
    if aggregation not in AGGREGATORS:
        raise VitrailError(f"there is no aggregation {aggregation!r}: expected {', '.join(AGGREGATORS)}.")
    if aggregation not in getattr(cls, "aggregations", ()):
        reason = getattr(cls, "no_aggregation", "") or "its layers give scores, not token-to-token maps"
        raise VitrailError(f"{base}.{aggregation} does not exist: {reason}.")
    return AGGREGATORS[aggregation].of(cls)


def build_method(name: str, model: View, /, **params: Any) -> Method:
    """A method ready to use on a model; unknown parameters are an error that lists the known ones."""
    cls = get_method(name)
    known = {**cls.parameters(), "shape": "map"}
    unknown = [key for key in params if key not in known]
    if unknown:
        told = ", ".join(f"{key}={value!r}" for key, value in cls.parameters().items()) or "none"
        raise VitrailError(f"{name} has no parameter {', '.join(unknown)}; it has: {told}.")
    return cls(model, **params)


def supported_methods(model: View) -> list[str]:
    """The names of the methods that can explain a model."""
    return [name for name in list_methods() if not get_method(name).unsupported(model)]


def _registered() -> dict[str, type[Method]]:
    for module in MODULES:
        import_module(f"vitrail.methods.{module}")
    return _METHODS


def _from_function(name: str, function: Callable[..., Tensor], needs: str) -> type[Method]:
    """A method class around a user's function; its keyword parameters become fields."""
    extra = list(inspect.signature(function).parameters.values())[3:]
    if any(p.default is p.empty for p in extra):
        raise VitrailError(f"every parameter of {name!r} after (model, images, target) needs a default value.")
    base = TokenMethod if needs == "tokens" else Method
    cls = make_dataclass(name, [(p.name, Any, p.default) for p in extra], bases=(base,), kw_only=True)

    def run(self: Method, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        if against is not None:
            raise VitrailError(f"{name} does not take against=.")
        with torch.enable_grad():
            return Attribution(function(self.model, images, target, **{p.name: getattr(self, p.name) for p in extra}))

    cls.run = run  # type: ignore[attr-defined]
    cls.__module__ = function.__module__
    return cls
