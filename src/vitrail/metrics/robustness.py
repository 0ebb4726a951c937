"""Metrics that explain or score perturbed inputs, computed by captum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from vitrail.engine.noise import Kind, noise
from vitrail.errors import VitrailError
from vitrail.methods.base import Method, spread
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Scored, metric
from vitrail.metrics.functional import functional


@metric("max_sensitivity", family="robustness", higher_is_better=False, needs="method", paper="Yeh et al. 2019")
@dataclass(kw_only=True)
class MaxSensitivity(MethodMetric):
    """Largest relative change of the map when the image moves by at most ``radius`` (in normalised colours)."""

    samples: int = 10
    radius: float = 0.02
    seed: int = 0

    def measure(self, method: Method, cases: Sequence[Case]) -> list[Scored]:
        from captum.metrics import sensitivity_max

        _check_samples(self.samples)
        if self.radius < 0:
            raise VitrailError(f"radius must be at least 0, but got {self.radius}.")
        found = []
        for case in cases:
            value = sensitivity_max(
                method.attribute,
                case.pixels,
                perturb_func=partial(_moved, _drawn("uniform", case, self.samples, self.seed)),
                perturb_radius=self.radius,
                n_perturb_samples=self.samples,
                max_examples_per_batch=self.samples,
                target=case.target,
            )
            found.append(Scored(float(value)))
        return found


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

    def score(self, case: Case) -> Scored:
        from captum.metrics import infidelity

        _check_samples(self.samples)
        if not self.sigma > 0:
            raise VitrailError(f"sigma must be above 0, but got {self.sigma}.")

        def logit(images: Tensor) -> Tensor:
            with torch.no_grad():
                return case.view.class_scores(case.view.logits(images))[:, case.target]

        value = infidelity(
            logit,
            partial(_taken, _drawn("normal", case, self.samples, self.seed) * self.sigma),
            case.pixels,
            spread(case.map[None].to(case.pixels), case.pixels),
            n_perturb_samples=self.samples,
            normalize=self.normalize,
        )
        return Scored(float(value))


def _moved(drawn: Tensor, images: Tensor, radius: float) -> Tensor:
    return images + (2 * drawn - 1) * radius


def _taken(drawn: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """What is taken away, and what is left."""
    return drawn, images - drawn


def _drawn(kind: Kind, case: Case, samples: int, seed: int) -> Tensor:
    return noise(kind, case.pixels.shape[1:], range(samples), seed, case.pixels.device).to(case.pixels.dtype)


def _check_samples(samples: int) -> None:
    if samples < 1:
        raise VitrailError(f"samples must be at least 1, but got {samples}.")


max_sensitivity = functional(MaxSensitivity)
infidelity = functional(Infidelity)
