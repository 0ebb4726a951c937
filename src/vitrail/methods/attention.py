"""Methods that read attention alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from vitrail.engine.trace import Trace
from vitrail.methods.aggregation import row_sweep
from vitrail.methods.base import Attribution, TokenMethod
from vitrail.methods.layerwise import LayerMap, check_layers
from vitrail.methods.registry import method


@method("raw_attention", family="attention", class_specific=False, cost=(1, 0), paper="Chefer et al. 2021")
@dataclass(kw_only=True)
class RawAttention(LayerMap):
    """Attention of the last layer, averaged over heads, in the row that the head reads."""

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        return trace["A"][layer].mean(1)


@method("rollout", family="attention", class_specific=False, cost=(1, 0), paper="Abnar & Zuidema 2020")
@dataclass(kw_only=True)
class Rollout(TokenMethod):
    """Product over the layers of ½ identity + ½ mean attention, in the row that the head reads."""

    start_layer: int = 0
    readout: Literal["head", "cls"] = "head"

    no_aggregation: ClassVar[str] = "Rollout is an aggregation itself (raw_attention.rollout)"

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        base = RawAttention(self.model, readout=self.readout)
        layers = check_layers(range(self.start_layer, self.vit.num_layers), self.vit.num_layers)
        found = base.trace(images, target, against, layers)
        return Attribution(self.on_grid(row_sweep(base, found, layers)))
