"""Complexity: how concentrated a map is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.metrics.base import Case, MapMetric, Scored, metric


def gini(values: Tensor) -> float:
    """The Gini index of non-negative values: 0 for equal ones, 1 − 1/n where one has all; 0 where all are zero."""
    ordered = values.flatten().double().sort().values
    count, total = len(ordered), ordered.sum()
    place = torch.arange(1, count + 1, dtype=torch.float64, device=ordered.device)
    return float(((2 * place - count - 1) * ordered).sum() / (count * total)) if total > 0 else 0.0


@metric("sparseness", family="complexity", higher_is_better=True, paper="TIS")
@dataclass(kw_only=True)
class Sparseness(MapMetric):
    """Gini index of the map at the size of the model input.

    A map with negative values is shifted to start at 0; ``protocol="tis"`` shifts every map and adds 1e-7.
    """

    protocol: Literal["default", "tis"] = "default"

    def score(self, case: Case) -> Scored:
        values = case.on_input.double()
        if self.protocol == "tis":
            return Scored(gini(values - values.min() + 1e-7))
        return Scored(gini(values - values.min() if bool((values < 0).any()) else values))
