"""Methods that read gradients of the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vitrail.engine.trace import Trace
from vitrail.methods.layerwise import Layerwise
from vitrail.methods.registry import method


@method("input_x_gradient", family="gradient", cost=(1, 1), paper="Shrikumar et al. 2016")
@dataclass(kw_only=True)
class InputXGradient(Layerwise):
    """Tokens times their gradient, summed over channels; rule="frozen" is LibraGrad."""

    start_layer: int = 0
    rule: Literal["plain", "frozen"] = "plain"
    output: Literal["logit", "probability"] = "logit"

    def scores(self, trace: Trace, layer: int) -> Tensor:
        return (trace["x"][layer] * trace["gx"][layer]).sum(-1)
