"""Methods that take the score apart into shares of the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitrail.engine.trace import Trace
from vitrail.methods.layerwise import Layerwise
from vitrail.methods.registry import method


@method("decompx", family="decomposition", cost=(1, 1), paper="Modarressi et al. 2023")
@dataclass(kw_only=True)
class DecompX(Layerwise):
    """Each token's share of the logit under frozen attention, norms and gates; shares and biases add up to it."""

    start_layer: int = 0

    rule: ClassVar[str] = "frozen"
    keep: ClassVar[frozenset[str]] = frozenset({"x", "gx", "bias"})

    def scores(self, trace: Trace, layer: int) -> Tensor:
        return (trace["x"][layer] * trace["gx"][layer]).sum(-1)

    def extras(self, trace: Trace, layers: Iterable[int]) -> dict[str, Tensor]:
        """The largest gap over the layers between the logit and its shares, relative to max(1, |logit|)."""
        gaps = [trace.y - self.scores(trace, layer).sum(1) - trace.bias_from(layer) for layer in layers]
        return {"completeness_gap": torch.stack(gaps).abs().amax(0) / trace.y.abs().clamp(min=1)}
