"""Robustness to small changes of the image: max-sensitivity and infidelity (Yeh et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from vitrail.engine.maps import spread
from vitrail.engine.noise import Kind, noise
from vitrail.engine.requests import Asking, Batch
from vitrail.errors import VitrailError
from vitrail.methods.base import Method
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Scored, check_maps, known, metric, shared
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
        changes = []
        for case in cases:  # one after another: the traces of one are held at a time
            batch, target = shared([case], self.call, partial(self.moved, case))
            attribution = yield from method.explained(batch, target)
            changes.append(self.change(method, case, attribution.map))
        return [Scored(value) for value in torch.stack(changes).tolist()]

    def moved(self, case: Case) -> tuple[Batch, Target]:
        """Images within the radius, and the class of each."""
        drawn = _drawn("uniform", case, self.samples, self.seed)
        batch = Batch(case.view, case.pixels + (2 * drawn - 1) * self.radius)
        return batch, Target(torch.full((self.samples,), case.target))

    def change(self, method: Method, case: Case, maps: Tensor) -> Tensor:
        """max ‖φ(x′) − φ(x)‖ / ‖φ(x)‖."""
        check_maps(method, case, maps)
        length = case.map.norm()
        change = (maps - case.map.to(maps)).flatten(1).norm(dim=1).max()
        return change / torch.where(length > 0, length, 1).to(change)


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
        drawn = shared([case], self.call, lambda: _drawn("normal", case, self.samples, self.seed) * self.sigma)
        change = yield from known(case, "change of " + self.call, self.changes(case, drawn))
        predicted = (drawn * spread(case.map[None].to(drawn), case.pixels)).flatten(1).sum(1)
        if self.normalize:
            size = predicted.square().mean()
            predicted = predicted * ((predicted * change).mean() / size if size > 0 else 1)
        return Scored(float((predicted - change).square().mean()))

    def changes(self, case: Case, drawn: Tensor) -> Asking[Tensor]:
        """(samples,): f(x) − f(x − I), which knows no map."""
        images = torch.cat([case.pixels, case.pixels - drawn])
        scores = yield case.pictures(len(images), lambda part: images[part], ClassScore("logit"), name="infidelity")
        return scores[0] - scores[1:]


def _drawn(kind: Kind, case: Case, samples: int, seed: int) -> Tensor:
    return noise(kind, case.pixels.shape[1:], range(samples), seed, case.pixels.device).to(case.pixels.dtype)


max_sensitivity = functional(MaxSensitivity)
infidelity = functional(Infidelity)
