"""Sanity checks: does the map depend on the weights; does it add up."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vitrail.engine.maps import enlarged
from vitrail.errors import VitrailError
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Scored, check_seed, metric
from vitrail.models.view import View
from vitrail.models.vit import forget
from vitrail.show.heatmap import min_max


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
    """

    way: Literal["cascading", "independent"] = "cascading"
    reading: Literal["rank", "ssim"] = "rank"
    seed: int = 0

    def measure(self, method: Method, cases: Sequence[Case]) -> list[Scored]:
        params = {name: getattr(method, name) for name in method.parameters()}
        images = torch.cat([case.pixels for case in cases])
        targets = [case.target for case in cases]
        likeness = []
        for view in randomised(method.model, self.way, self.seed):
            maps = build_method(method.info.name, view, **params).attribute(images, targets)
            if maps.shape[1:] != cases[0].map.shape:
                raise VitrailError(
                    f"the given maps are {tuple(cases[0].map.shape)}, those of {method.info.name} "
                    f"{tuple(maps.shape[1:])}: give the maps that this method made."
                )
            pairs = zip(cases, maps, strict=True)
            likeness.append([self._alike(case.map.to(found), found, case.size) for case, found in pairs])
        curves = zip(*likeness, strict=True)
        return [Scored(sum(curve) / len(curve), list(curve)) for curve in curves]

    def _alike(self, before: Tensor, after: Tensor, size: tuple[int, int]) -> float:
        if self.reading == "rank":
            return rank_correlation(before.abs(), after.abs())
        return similarity(before, after, size)


def randomised(view: View, way: str, seed: int) -> Iterator[View]:
    """A copy of a view whose layers, from the head down, get weights drawn anew; the view itself stays as it is."""
    twin: View = copy.deepcopy(view)
    twin.known_fingerprint = None
    draw = torch.Generator().manual_seed(check_seed(seed))
    for weights in reversed(twin.layers()):
        kept = [one.clone() for one in weights]
        for one in weights:
            one.copy_(_like(one, draw))
        forget(twin)
        yield twin
        if way == "independent":
            for one, before in zip(weights, kept, strict=True):
                one.copy_(before)


def _like(weights: Tensor, draw: torch.Generator) -> Tensor:
    """Normal values with the mean and deviation of the weights they replace, so that the signal keeps its size."""
    deviation, mean = torch.std_mean(weights.double(), correction=0)
    drawn = torch.randn(weights.shape, generator=draw, dtype=torch.float64).to(weights.device)
    return (drawn * deviation + mean).to(weights.dtype)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's ρ, equal values sharing their mean rank; 0 where a map is constant."""
    first, second = (_mean_ranks(m) for m in (a, b))
    deviation = first.std(correction=0) * second.std(correction=0)
    if deviation == 0:
        return 0.0
    return float(((first - first.mean()) * (second - second.mean())).mean() / deviation)


def _mean_ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.flatten().double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def similarity(a: Tensor, b: Tensor, size: tuple[int, int]) -> float:
    """SSIM of two maps, min–max scaled, at ``size``."""
    from torchmetrics.functional.image import structural_similarity_index_measure

    first, second = (min_max(enlarged(m.double(), size))[None, None] for m in (a, b))
    found = structural_similarity_index_measure(first, second, data_range=1.0)
    assert isinstance(found, Tensor)
    return float(found)
