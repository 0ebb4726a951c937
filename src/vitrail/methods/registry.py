"""The names of methods: built-in ones, aliases, compositions (``base.aggregation``), and functions of users."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from vitrail.calls import check_known, protocols_of, split_call
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method, MethodFactory, MethodInfo, lacks, refuse_unsupported
from vitrail.models.view import View
from vitrail.registry import Registry, first_line, matching

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
    "posterior",
    "shapley",
    "vit_shapley",
    "greedy",
    "control",
)

# Other names that the papers and peers use.
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

# What a comparison shows by default: the model's default first, good methods of several families, the control last.
RECOMMENDED = (
    "decompx.skipplus", "full_grad_plus.skipplus(rule=frozen)", "att_cat(rule=frozen)", "gen_att", "vtranm",
    "trans_att", "rollout", "random",
)  # fmt: skip
RECOMMENDED_ON_FEATURES = (
    "vit_cx", "grad_cam", "hires_cam", "layer_cam", "xgrad_cam", "occlusion", "integrated_gradients", "random",
)  # fmt: skip
RECOMMENDED_ON_LOGITS = (
    "occlusion", "integrated_gradients", "smooth_grad", "lime", "kernel_shap", "hsic", "rise", "random",
)  # fmt: skip

METHODS: Registry[MethodFactory] = Registry(
    "method", [f"vitrail.methods.{module}" for module in MODULES], ALIASES, "vitrail methods", "vitrail.methods"
)

C = TypeVar("C", bound=Callable[..., Any])


def method(
    name: str,
    *,
    family: str = "custom",
    class_specific: bool = True,
    level: Literal["token", "pixel"] = "token",
    needs: Literal["tokens", "features", "logits"] = "tokens",
    cost: tuple[float, float] = (1, 1),
    protocols: tuple[str, ...] | None = None,
    paper: str = "",
    signed: bool | None = None,
) -> Callable[[C], C]:
    """Registers a method: a subclass of ``Method``, or a function ``(model, images, target, **params) → maps``.

    ``signed`` says whether maps tell evidence for from evidence against (two colours about zero); None = by the sign of
    the values. A function gets the view, a batch (B, 3, H, W) and one class per image, and returns token maps (B, rows,
    columns), or (B, H, W) for ``level="pixel"``. Its keyword parameters become the method's, but for ``against=None``:
    the classes that the target is opposed to, one per image, or None. ``protocols``: None = the values of a class's
    parameter ``protocol``, a ``Literal``.
    """
    if not isinstance(name, str):
        raise VitrailError('a method needs a name: write @vitrail.method("my_name") above it, with parentheses.')

    def register(definition: C) -> C:
        is_class = isinstance(definition, type) and issubclass(definition, Method)
        params = definition.parameters() if is_class else _keyword_parameters(name, definition)  # type: ignore[attr-defined]
        info = MethodInfo(
            name,
            family=family,
            class_specific=class_specific,
            level=level,
            needs=needs,
            cost=cost,
            protocols=protocols or protocols_of(definition),
            params=params,
            paper=paper,
            summary=first_line(definition),
            signed=signed,
        )
        if is_class:
            definition.info = info  # type: ignore[attr-defined]
            METHODS.add(name, cast(MethodFactory, definition), definition.__module__)
        else:
            METHODS.add(name, FunctionFactory(definition, info), definition.__module__)
        return definition

    return register


def list_methods(pattern: str = "*") -> dict[str, MethodInfo]:
    """Every method whose name matches the glob, compositions included."""
    factories = METHODS.every_entry()
    names = [*factories]
    names += [f"{name}.{suffix}" for name, factory in factories.items() for suffix in _aggregations(factory)]
    return {name: get_method(name).info for name in matching(names, pattern)}


def get_method(name: str) -> MethodFactory:
    """A method by name, composition or alias; ``cat`` and ``tokentm.…`` resolve too."""
    if not isinstance(name, str):
        raise VitrailError(
            f"a method is one name, such as 'gen_att', but got {name!r}: for several, call once for each."
        )
    base, dot, suffix = name.strip().lower().partition(".")
    if dot and not suffix:
        raise VitrailError(f"{name!r} ends with a dot: expected an aggregation after it, as in {base}.plus.")
    if base in ALIASES:
        METHODS.mention_hidden(base)
        base, _, aliased = ALIASES[base].partition(".")
        suffix = ".".join(filter(None, (aliased, suffix)))
    factory = METHODS[base]
    return _composed(base, factory, suffix) if suffix else factory


def build_method(name: str, model: View, /, **params: Any) -> Method:
    """A method ready to use on a model; unknown parameters are an error that lists the known ones."""
    factory = get_method(name)
    check_known(name, params, {**factory.parameters(), "shape": "map"})
    return factory(model, **params)


def supported_methods(model: View) -> list[str]:
    """The names of the methods that can explain a model."""
    model = model.snapshot()
    return [name for name in list_methods() if not get_method(name).unsupported(model)]


def recommended_methods(model: View) -> list[str]:
    """The calls of about eight methods worth comparing on a model: its default first, ``random`` last."""
    calls = RECOMMENDED_ON_FEATURES if model.has_features else RECOMMENDED_ON_LOGITS
    calls = RECOMMENDED if model.has_tokens else calls
    return [call for call in calls if not get_method(split_call(call)[0]).unsupported(model)]


def describe_methods(pattern: str = "*", model: View | None = None) -> list[dict[str, Any]]:
    """Every method as a row of a listing; with a model, whether it can be explained and why not."""
    infos = list_methods(ALIASES.get(pattern, pattern))
    if not infos:
        raise VitrailError(f"no method matches {pattern!r}; `vitrail methods` lists all.")
    rows, model = [], None if model is None else model.snapshot()
    for name, info in infos.items():
        row: dict[str, Any] = {
            "name": name,
            "family": info.family,
            "class-specific": info.class_specific,
            "level": info.level,
            "cost": f"{info.cost[0]:g} F + {info.cost[1]:g} B",
            "aliases": [alias for alias, target in ALIASES.items() if target == name],
            "parameters": info.params,
            "paper": info.paper,
            "summary": info.summary,
        }
        if model is not None:
            row["supported"] = get_method(name).unsupported(model) or "yes"
        rows.append(row)
    return rows


def _aggregations(factory: MethodFactory) -> tuple[str, ...]:
    return getattr(factory, "aggregations", ())


def _composed(base: str, factory: MethodFactory, suffix: str) -> MethodFactory:
    from vitrail.methods.aggregation import AGGREGATIONS

    if "." in suffix:
        raise VitrailError(f"{base}.{suffix} does not exist: one aggregation at a time.")
    if suffix not in AGGREGATIONS:
        raise VitrailError(f"there is no aggregation {suffix!r}: expected {', '.join(AGGREGATIONS)}.")
    if suffix not in _aggregations(factory):
        reason = getattr(factory, "no_aggregation", "a function has no layers")
        raise VitrailError(f"{base}.{suffix} does not exist: {reason}.")
    return cast(MethodFactory, AGGREGATIONS[suffix](factory))  # type: ignore[arg-type]


def _keyword_parameters(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function after (model, images, target), with their defaults, without ``against``."""
    extra = list(inspect.signature(function).parameters.values())[3:]
    if any(parameter.default is parameter.empty for parameter in extra):
        raise VitrailError(f"every parameter of {name!r} after (model, images, target) needs a default value.")
    return {parameter.name: parameter.default for parameter in extra if parameter.name != "against"}


class FunctionFactory:
    """A function of a user under its name in the registry."""

    version = 1
    file_parameters: tuple[str, ...] = ()

    def __init__(self, function: Callable[..., Tensor], info: MethodInfo) -> None:
        self.function, self.info, self.__module__ = function, info, function.__module__

    def parameters(self) -> dict[str, Any]:
        return dict(self.info.params)

    def parameter_types(self) -> dict[str, Any]:
        hints = get_type_hints(self.function)
        return {name: hints.get(name, Any) for name in self.info.params}

    def unsupported(self, model: View) -> str | None:
        return lacks(self.info, model)

    def __call__(self, model: View, *, shape: Literal["map", "input"] = "map", **params: Any) -> Method:
        return FunctionMethod(model, shape=shape, factory=self, values={**self.parameters(), **params})


@dataclass(kw_only=True)
class FunctionMethod(Method):
    """A method around a user's function."""

    factory: FunctionFactory
    values: dict[str, Any]

    def __post_init__(self) -> None:
        self.info = self.factory.info  # type: ignore[misc]
        refuse_unsupported(self.info.name, self.factory.unsupported(self.model), self.model)

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.values)

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        function, values = self.factory.function, dict(self.values)
        if "against" in inspect.signature(function).parameters:
            values["against"] = against
        elif against is not None:
            raise VitrailError(f"{self.info.name} does not take against: add a parameter against=None to its function.")
        with torch.enable_grad():
            return Attribution(function(self.model, images, target, **values))
