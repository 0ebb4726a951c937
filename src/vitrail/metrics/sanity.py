"""Sanity checks: does the map depend on the weights; does it add up."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.engine.maps import enlarged, min_max
from vitrail.engine.requests import Asking, Batch
from vitrail.errors import VitrailError
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Scored, check_maps, check_seed, metric, shared
from vitrail.metrics.statistics import rank_correlations
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
        maps = []
        for batch, target in shared(cases, self.call, lambda: self.questions(method.model, cases)):
            again = build_method(method.info.name, batch.view, **method.params)
            attribution = yield from again.explained(batch, target)
            check_maps(method, cases[0], attribution.map)
            maps.append(attribution.map)
        before, after = torch.stack([case.map.to(maps[0]) for case in cases]), torch.stack(maps)
        return [Scored(sum(curve) / len(curve), curve) for curve in self.curves(before, after, cases[0].size)]

    def questions(self, view: View, cases: Sequence[Case]) -> list[tuple[Batch, Target]]:
        """What every method is asked: the images, seen by each of the randomised models."""
        images = torch.cat([case.pixels for case in cases])
        target = Target(torch.tensor([case.target for case in cases]))
        return [(Batch(twin, images), target) for twin in randomised(view, self.way, self.seed)]

    def curves(self, before: Tensor, after: Tensor, size: tuple[int, int]) -> list[list[float]]:
        """How alike the maps (images, …) and (layers, images, …) are: a value per layer for each image."""
        if self.reading == "rank":
            pairs = (values.abs().flatten(2).flatten(0, 1) for values in (before.expand_as(after), after))
            likeness = rank_correlations(*(values.double().cpu().numpy() for values in pairs))
            return np.nan_to_num(likeness).reshape(after.shape[:2]).T.tolist()
        return [[similarity(a, b, size) for b in maps] for a, maps in zip(before, after.transpose(0, 1), strict=True)]


def randomised(view: View, way: str, seed: int) -> Iterator[View]:
    """Copies of a view whose layers, from the head down, have weights drawn anew; the view itself stays as it is.

    The copies share all weights but those of their layer, so that holding them all costs one model.
    """
    if any(is_packed(parameter) for parameter in view.module.parameters()):
        raise VitrailError(
            f"{view.name} cannot be randomised: its weights are quantised, so that none can be drawn anew."
        )
    draw = torch.Generator().manual_seed(check_seed(seed))
    for index in reversed(range(len(view.layers()))):
        twin = _with_own(view, index)
        for weight in twin.layers()[index]:
            weight.copy_(_like(weight, draw))
        yield twin
        if way == "cascading":
            view = twin


def _with_own(view: View, index: int) -> View:
    """A copy with weights of its own in one layer, which shares all others with the view."""
    places = {weight.untyped_storage().data_ptr() for weight in view.layers()[index]}
    tensors = [tensor for module in view.modules for tensor in (*module.parameters(), *module.buffers())]
    kept = {id(tensor): tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in places}
    twin: View = copy.deepcopy(view, dict(kept))
    twin.known_weights = None
    return twin


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
