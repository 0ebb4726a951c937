"""Robustness to small changes of the image: max-sensitivity and infidelity (Yeh et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitrail.engine.maps import spread
from vitrail.engine.noise import Kind, noise
from vitrail.engine.requests import Asking, Batch, concurrently
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Scored, check_maps, metric
from vitrail.metrics.functional import functional
from vitrail.targets import ClassScore, Target


@metric("max_sensitivity", family="robustness", higher_is_better=False, needs="method", paper="Yeh et al. 2019")
@dataclass(kw_only=True)
class MaxSensitivity(MethodMetric):
    """Largest relative change of the map when the image moves by at most ``radius`` (in normalised colours)."""

    samples: int = 10
    radius: float = 0.02
    seed: int = 0

    least: ClassVar = {"samples": 1, "radius": 0}

    def ask(self, method: Method, cases: Sequence[Case]) -> Asking[list[Scored]]:
        answers = yield from concurrently([self.moved(method, case) for case in cases])
        return [self.scored(method, case, moved) for case, moved in zip(cases, answers, strict=True)]

    def moved(self, method: Method, case: Case) -> Asking[Attribution]:
        """The maps of images within the radius."""
        drawn = _drawn("uniform", case, self.samples, self.seed)
        batch = Batch(case.view, case.pixels + (2 * drawn - 1) * self.radius)
        return (yield from method.explained(batch, Target(torch.full((self.samples,), case.target))))

    def scored(self, method: Method, case: Case, moved: Attribution) -> Scored:
        """max ‖φ(x′) − φ(x)‖ / ‖φ(x)‖."""
        check_maps(method, case, moved.map)
        length = case.map.norm()
        change = (moved.map - case.map.to(moved.map)).flatten(1).norm(dim=1).max()
        return Scored(float(change / (length if length > 0 else 1)))


@metric("infidelity", family="robustness", higher_is_better=False, paper="Yeh et al. 2019")
@dataclass(kw_only=True)
class Infidelity(MapMetric):
    """Mean squared error of the map as a linear model of the score under Gaussian noise of deviation ``sigma``.

    With ``normalize`` the map is scaled to fit best first: maps of different units can be compared.
    """

    samples: int = 10
    sigma: float = 0.1
    normalize: bool = True
    seed: int = 0

    least: ClassVar = {"samples": 1}

    def ask(self, case: Case) -> Asking[Scored]:
        """E[(Iᵀφ − (f(x) − f(x − I)))²] over noises I, φ first scaled by the factor that makes it least."""
        if not self.sigma > 0:
            raise VitrailError(f"sigma must be above 0, but got {self.sigma}.")
        drawn = _drawn("normal", case, self.samples, self.seed) * self.sigma
        images = torch.cat([case.pixels, case.pixels - drawn])
        scores = yield case.pictures(len(images), lambda part: images[part], ClassScore("logit"), name="infidelity")
        change = scores[0] - scores[1:]
        predicted = (drawn * spread(case.map[None].to(drawn), case.pixels)).flatten(1).sum(1)
        if self.normalize:
            size = predicted.square().mean()
            predicted = predicted * ((predicted * change).mean() / size if size > 0 else 1)
        return Scored(float((predicted - change).square().mean()))


def _drawn(kind: Kind, case: Case, samples: int, seed: int) -> Tensor:
    return noise(kind, case.pixels.shape[1:], range(samples), seed, case.pixels.device).to(case.pixels.dtype)


max_sensitivity = functional(MaxSensitivity)
infidelity = functional(Infidelity)
