"""Methods that read attention alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution
from vitrail.methods.layerwise import LayerMap, check_layers, readout_row
from vitrail.methods.registry import method


@method(
    "raw_attention", family="attention", signed=False, class_specific=False, cost=(1, 0), paper="Chefer et al. 2021"
)
@dataclass(kw_only=True)
class RawAttention(LayerMap):
    """Attention of the last layer, averaged over heads, in the row that the head reads."""

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        return trace["A"][layer].mean(1)


@method("rollout", signed=False, family="attention", class_specific=False, cost=(1, 0), paper="Abnar & Zuidema 2020")
@dataclass(kw_only=True)
class Rollout(LayerMap):
    """Product over the layers of ½ identity + ½ attention, in the row that the head reads.

    The first block is left out, as in Chefer's scripts (``protocol="authors"``); ``protocol="rollout"`` starts with it,
    as the paper and ``raw_attention.rollout`` do. ``discard`` zeroes that share of the smallest entries of each
    fused map. ``protocol="tis"`` is vit-explain as released: all blocks, discard 0.9, only entry (0, 0) is safe, rows
    divided by the sums of the wrong axis, and the row of token 0 divided by its maximum.
    """

    start_layer: int | None = None
    fusion: Literal["mean", "min", "max"] = "mean"
    discard: float | None = None
    protocol: Literal["default", "authors", "rollout", "tis"] = "default"

    version: ClassVar[int] = 2
    aggregations: ClassVar[tuple[str, ...]] = ()
    no_aggregation: ClassVar[str] = "Rollout is an aggregation itself (raw_attention.rollout)"

    def layers(self) -> range:
        depth = self.model.num_layers
        published = min(1, depth - 1) if self.protocol in ("default", "authors") else 0
        return range(published if self.start_layer is None else self.start_layer, depth)

    def needs(self) -> Sequence[TraceSpec]:
        if self.protocol == "tis" and not self.model.num_prefix:
            raise VitrailError(f'protocol="tis" reads the class token, which {self.model.name} does not have.')
        return self.specs(check_layers(self.layers(), self.model.num_layers))

    def read(self, *traces: Trace) -> Attribution:
        (trace,), layers = traces, self.layers()
        if self.protocol != "tis":
            return Attribution(self.on_grid(self.rollout(trace, layers.start)))
        row = readout_row(trace, "cls", self.model.name)
        for layer in reversed(layers):
            matrix = self.layer_map(trace, layer)
            matrix = (matrix + torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)) / 2
            row = (row[:, None] @ (matrix / matrix.sum(-1)[:, None, :]))[:, 0]  # column j by the sum of row j
        patches = self.on_grid(row)
        peak = patches.amax((1, 2), keepdim=True)
        return Attribution(patches / torch.where(peak == 0, torch.ones_like(peak), peak))

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        maps = trace["A"][layer]
        fused = maps.mean(1) if self.fusion == "mean" else maps.amin(1) if self.fusion == "min" else maps.amax(1)
        share = self.discard if self.discard is not None else 0.9 if self.protocol == "tis" else 0.0
        if not 0 <= share < 1:
            raise VitrailError(f"discard must be at least 0 and below 1, but got {share}.")
        return _without_smallest(fused, share) if share else fused


def _without_smallest(matrix: Tensor, share: float) -> Tensor:
    """(B, n, m) with the smallest entries of each image zeroed, all but entry (0, 0)."""
    flat = matrix.flatten(1)
    smallest = flat.topk(int(share * flat.shape[1]), dim=1, largest=False).indices
    mask = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, smallest, True)
    mask[:, 0] = False
    return flat.masked_fill(mask, 0).view_as(matrix)
