"""Aggregations: PLUS, SkipPLUS and Rollout wrap any method with layers."""

from __future__ import annotations

from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, get_type_hints

from torch import Tensor

from vitrail.engine.sharing import Wish
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method, TokenMethod
from vitrail.methods.layerwise import LayerMap, Layerwise, check_layers
from vitrail.models.view import View


@dataclass(kw_only=True)
class Aggregation(TokenMethod):
    """``SkipPlus.of(DecompX)`` is a method with the parameters of its base and a start layer of its own."""

    start_layer: int | None = None

    base_class: ClassVar[type[Layerwise]]
    suffix: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]

    @classmethod
    def of(cls, base: type[Method]) -> type[Aggregation]:
        """The aggregation of a base method, as a method class."""
        own = {"model", "shape", "start_layer", "layer"}
        hints = get_type_hints(base)
        inherited = [(f.name, hints[f.name], f.default) for f in fields(base) if f.name not in own]
        made = make_dataclass(f"{base.__name__}{cls.__name__}", inherited, bases=(cls,), kw_only=True)
        made.base_class = base  # type: ignore[attr-defined]
        made.version = base.version  # type: ignore[attr-defined]
        made.__doc__ = f"{cls.title} of {base.info.name}."
        made.info = replace(  # type: ignore[attr-defined]
            base.info,
            name=f"{base.info.name}.{cls.suffix}",
            needs="tokens",
            params=made.parameters(),  # type: ignore[attr-defined]
            paper=cls.paper,
            summary=f"{cls.title} of {base.info.name}: {base.info.summary[:1].lower()}{base.info.summary[1:]}",
        )
        return made

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        return super().unsupported(model) or cls.base_class.unsupported(model)

    @cached_property
    def base(self) -> Layerwise:
        params: dict[str, Any] = {name: getattr(self, name) for name in self.parameters() if name != "start_layer"}
        return self.base_class(self.model, **params)

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self, "protocol", "default") == "authors":
            raise VitrailError(
                f'protocol="authors" is {self.base_class.info.name} as released, without .{self.suffix}.'
            )

    def wish(self) -> Wish | None:
        return self.base.wish_for(self.traced())

    def traced(self) -> range:
        """The layers that the trace has."""
        return self.base.all_layers(self.start())

    def first_layer(self) -> int:
        """Where the aggregation starts if ``start_layer`` is not given."""
        return 0

    def start(self) -> int:
        return self.first_layer() if self.start_layer is None else self.start_layer


class Plus(Aggregation):
    suffix = "plus"
    title = "sum over all layers"
    paper = "SkipPLUS, eq. 3"

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        check_layers(range(self.start(), self.vit.num_layers), self.vit.num_layers)
        return self.base.sum_over(self.traced(), self.base.term, images, target, against)


class SkipPlus(Plus):
    suffix = "skipplus"
    title = "sum over the upper half of the layers"
    paper = "SkipPLUS, eq. 4"

    def first_layer(self) -> int:
        depth = self.vit.num_layers
        return min((depth + 1) // 2, depth - 1)  # ⌈L/2⌉, and the only layer of a model with one


class RolloutOf(Aggregation):
    suffix = "rollout"
    title = "rollout"
    paper = "Abnar & Zuidema 2020"

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        assert isinstance(self.base, LayerMap)
        layers = check_layers(self.traced(), self.vit.num_layers)
        found = self.base.trace(images, target, against, layers)
        return Attribution(self.on_grid(self.base.rollout(found, layers.start)))

    def traced(self) -> range:
        return range(self.start(), self.vit.num_layers)


AGGREGATORS: dict[str, type[Aggregation]] = {cls.suffix: cls for cls in (Plus, SkipPlus, RolloutOf)}
