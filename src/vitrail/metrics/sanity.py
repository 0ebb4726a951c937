"""Sanity checks: does the map depend on the weights; does it add up."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.engine.maps import enlarged, min_max
from vitrail.engine.requests import Asking, Batch
from vitrail.errors import VitrailError
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Scored, check_maps, check_seed, metric
from vitrail.metrics.statistics import rank_correlation
from vitrail.models.translation import is_packed
from vitrail.models.view import View
from vitrail.targets import Target


@metric("completeness", family="sanity", higher_is_better=False, needs="completeness", paper="Sundararajan et al. 2017")
@dataclass(kw_only=True)
class Completeness(MapMetric):
    """What the map, with the biases where they count, misses of the score it promises to add up to (relative to it).

    Relative to the score where that is above 1, absolute below; the smallest values are rounding.
    """

    def score(self, case: Case) -> Scored:
        return Scored(case.extras["completeness_gap"])


@metric("model_randomization", family="sanity", higher_is_better=False, needs="method", paper="Adebayo et al. 2018")
@dataclass(kw_only=True)
class ModelRandomization(MethodMetric):
    """How alike the map stays when layers get random weights, from the head down; mean over the layers.

    ``way="cascading"``: all layers above are random too; ``"independent"``: one layer at a time. ``reading``: rank
    correlation of the absolute maps, or SSIM of the min–max maps at the model input. The curve has one point per layer.
    It does not apply to methods that were trained for the weights of their model.
    """

    way: Literal["cascading", "independent"] = "cascading"
    reading: Literal["rank", "ssim"] = "rank"
    seed: int = 0

    def ask(self, method: Method, cases: Sequence[Case]) -> Asking[list[Scored]]:
        if method.trained:
            return [Scored(math.nan) for _ in cases]
        images = torch.cat([case.pixels for case in cases])
        target = Target(torch.tensor([case.target for case in cases]))
        similarities = []
        for view in randomised(method.model, self.way, self.seed):
            attribution = yield from build_method(method.info.name, view, **method.params).explained(
                Batch(view, images), target
            )
            check_maps(method, cases[0], attribution.map)
            pairs = zip(cases, attribution.map, strict=True)
            similarities.append([self._similarity(case.map.to(values), values, case.size) for case, values in pairs])
        curves = zip(*similarities, strict=True)
        return [Scored(sum(curve) / len(curve), list(curve)) for curve in curves]

    def _similarity(self, before: Tensor, after: Tensor, size: tuple[int, int]) -> float:
        if self.reading == "rank":
            return rank_correlation(before.abs(), after.abs())
        return similarity(before, after, size)


def randomised(view: View, way: str, seed: int) -> Iterator[View]:
    """A copy of a view whose layers, from the head down, get weights drawn anew; the view itself stays as it is."""
    if any(is_packed(parameter) for parameter in view.module.parameters()):
        raise VitrailError(
            f"{view.name} cannot be randomised: its weights are quantised, so that none can be drawn anew."
        )
    twin: View = copy.deepcopy(view)
    twin.known_weights = None
    draw = torch.Generator().manual_seed(check_seed(seed))
    for weights in reversed(twin.layers()):
        originals = [weight.clone() for weight in weights]
        for weight in weights:
            weight.copy_(_like(weight, draw))
        yield twin
        if way == "independent":
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)


def _like(weights: Tensor, draw: torch.Generator) -> Tensor:
    """Normal values with the mean and deviation of the weights they replace, so that the signal keeps its size."""
    deviation, mean = torch.std_mean(weights.double(), correction=0)
    drawn = torch.randn(weights.shape, generator=draw, dtype=torch.float64).to(weights.device)
    return (drawn * deviation + mean).to(weights.dtype)


def similarity(a: Tensor, b: Tensor, size: tuple[int, int]) -> float:
    """SSIM of two maps, min–max scaled, at ``size``."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    first, second = (min_max(enlarged(m.double(), size))[None, None] for m in (a, b))
    index = structural_similarity_index_measure(first, second, data_range=1.0)
    assert isinstance(index, Tensor)
    return float(index)
