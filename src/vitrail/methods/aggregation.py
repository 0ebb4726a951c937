"""Aggregations: PLUS, SkipPLUS and Rollout, each a value around a method with layers: ``SkipPlus(DecompX)(model)``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

from vitrail.calls import check_parameters
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, MethodInfo, TraceMethod, refuse_unsupported
from vitrail.methods.layerwise import LayerMap, Layerwise, check_layers
from vitrail.models.view import View


@dataclass(frozen=True)
class Aggregation:
    """A method made of the layers of another; called with a model, it has the base's parameters and a start layer."""

    base: type[Layerwise]

    suffix: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]

    @cached_property
    def info(self) -> MethodInfo:
        base = self.base.info
        return replace(
            base,
            name=f"{base.name}.{self.suffix}",
            needs="tokens",
            params=self.parameters(),
            paper=self.paper,
            summary=f"{self.title} of {base.name}: {base.summary[:1].lower()}{base.summary[1:]}",
        )

    @property
    def version(self) -> int:
        return self.base.version if self.base.aggregated_version is None else self.base.aggregated_version

    @property
    def file_parameters(self) -> tuple[str, ...]:
        return self.base.file_parameters

    def parameters(self) -> dict[str, Any]:
        """Those of the base, but for its own choice of a layer, and ``start_layer``."""
        inherited = self.base.parameters()
        return {"start_layer": None, **{k: v for k, v in inherited.items() if k not in ("start_layer", "layer")}}

    def parameter_types(self) -> dict[str, Any]:
        types = {**self.base.parameter_types(), "start_layer": int | None}
        return {name: types[name] for name in self.parameters()}

    def unsupported(self, model: View) -> str | None:
        return TraceMethod.unsupported(model) or self.base.unsupported(model)

    def __call__(
        self,
        model: View,
        *,
        start_layer: int | None = None,
        shape: Literal["map", "input"] = "map",
        **params: Any,
    ) -> Aggregated:
        refuse_unsupported(self.info.name, self.unsupported(model), model)
        base = self.base(model, **params)
        return Aggregated(model, shape=shape, aggregation=self, base=base, start_layer=start_layer)

    def first_layer(self, depth: int) -> int:
        """Where the aggregation starts if ``start_layer`` is not given."""
        return 0

    def layers(self, base: Layerwise, start: int) -> range:
        """The layers that are traced."""
        check_layers(range(start, base.model.num_layers), base.model.num_layers)
        return check_layers(base.all_layers(start), base.all_layers(0).stop)

    def read(self, base: Layerwise, trace: Trace, layers: range) -> Attribution:
        return base.sum_over(trace, layers, base.term)


class Plus(Aggregation):
    """The sum over all layers."""

    suffix = "plus"
    title = "sum over all layers"
    paper = "SkipPLUS, eq. 3"


class SkipPlus(Aggregation):
    """The sum over the upper half of the layers."""

    suffix = "skipplus"
    title = "sum over the upper half of the layers"
    paper = "SkipPLUS, eq. 4"

    def first_layer(self, depth: int) -> int:
        return min((depth + 1) // 2, depth - 1)  # ⌈L/2⌉, and the only layer of a model with one


class RolloutOf(Aggregation):
    """The product of the layers' maps."""

    suffix = "rollout"
    title = "rollout"
    paper = "Abnar & Zuidema 2020"

    def layers(self, base: Layerwise, start: int) -> range:
        return check_layers(range(start, base.model.num_layers), base.model.num_layers)

    def read(self, base: Layerwise, trace: Trace, layers: range) -> Attribution:
        assert isinstance(base, LayerMap)
        return Attribution(base.on_grid(base.rollout(trace, layers.start)))


AGGREGATIONS: dict[str, type[Aggregation]] = {kind.suffix: kind for kind in (Plus, SkipPlus, RolloutOf)}


@dataclass(kw_only=True)
class Aggregated(TraceMethod):
    """An aggregation on a model."""

    aggregation: Aggregation
    base: Layerwise
    start_layer: int | None

    def __post_init__(self) -> None:
        self.info = self.aggregation.info  # type: ignore[misc]
        self.version = self.aggregation.version  # type: ignore[misc]
        check_parameters(type(self), {"start_layer": self.start_layer, "shape": self.shape})
        if getattr(self.base, "protocol", "default") == "authors":
            suffix, name = self.aggregation.suffix, self.base.info.name
            raise VitrailError(f'protocol="authors" is {name} as released, without .{suffix}.')

    @property
    def params(self) -> dict[str, Any]:
        values = self.base.params
        return {name: self.start_layer if name == "start_layer" else values[name] for name in self.info.params}

    @property
    def reduced(self) -> bool:
        return self.base.reduced

    def layers(self) -> range:
        depth = self.model.num_layers
        start = self.aggregation.first_layer(depth) if self.start_layer is None else self.start_layer
        return self.aggregation.layers(self.base, start)

    def needs(self) -> Sequence[TraceSpec]:
        return self.base.specs(self.layers())

    def read(self, *traces: Trace) -> Attribution:
        return self.aggregation.read(self.base, self.base.combined(*traces), self.layers())
