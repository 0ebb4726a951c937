"""Removal without an edge to see: pixels are imputed from their neighbours (Rong et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.engine.noise import noise
from vitrail.engine.requests import Asking, Pictures
from vitrail.errors import VitrailError
from vitrail.metrics.base import Case, MapMetric, Scored, average, metric
from vitrail.metrics.curves import ranks
from vitrail.metrics.functional import functional
from vitrail.targets import ClassScore

SHARES = (10, 20, 30, 40, 50, 70, 90)  # per cent of the pixels
DIRECT, DIAGONAL = 1 / 6, 1 / 12  # weights of the neighbours
TOLERANCE, CHECK_EVERY, TINY = 1e-9, 10, 1e-300  # of the conjugate gradients


@metric("road", family="perturbation", higher_is_better=True, paper="Rong et al. 2022")
@dataclass(kw_only=True)
class Road(MapMetric):
    """Half the gap in probability between removing the least and the most important pixels, imputed from the others.

    The mean over 10, 20, 30, 40, 50, 70 and 90 % of the pixels. Every removed pixel becomes the weighted mean of its
    neighbours plus noise of deviation ``sigma`` (in normalised colours). ``order="morf"``: the mean probability without
    the most important pixels alone, where lower is better; ``"lerf"``: without the least important.
    """

    order: Literal["both", "morf", "lerf"] = "both"
    sigma: float = 0.01
    seed: int = 0

    least: ClassVar = {"sigma": 0}

    @property
    def higher_is_better(self) -> bool:
        return self.order != "morf"

    def ask(self, case: Case) -> Asking[Scored]:
        if self.order == "both":
            least, most = yield [self.removal(case, least_first) for least_first in (True, False)]
            points = (least - most) / 2
        else:
            points = yield self.removal(case, self.order == "lerf")
        return Scored(average(points), extras={"ties": case.ties})

    def removal(self, case: Case, least_first: bool) -> Pictures:
        """(shares,): the probability without the most or the least important pixels."""
        values = -case.on_input if least_first else case.on_input
        place = ranks(values, self.seed).view(case.size).cpu()
        counts = [share * place.numel() // 100 for share in SHARES]

        def make(part: slice) -> Tensor:
            removed = torch.stack([place < count for count in counts[part]])
            filled = imputed(case.pixels, removed)
            drawn = noise("normal", case.pixels.shape[1:], range(part.start, part.stop), self.seed, filled.device)
            return filled + self.sigma * drawn.to(filled.dtype) * removed[:, None].to(filled)

        same = (id(case), "road", least_first, self.sigma, self.seed)
        return case.pictures(len(counts), make, ClassScore("probability"), name="imputation", same=same)


def imputed(image: Tensor, removed: Tensor) -> Tensor:
    """(M, 3, H, W): the image (1, 3, H, W) whose pixels ``removed`` (M, H, W) are the weighted means of their
    neighbours, all at once.

    Factorised on a CPU; by conjugate gradients on a GPU, which computes all masks together.
    """
    if image.device.type == "cpu":
        return torch.cat([factorised(image, mask) for mask in removed])
    return iterated(image.double(), removed[:, None].to(image.device)).to(image.dtype)


def factorised(image: Tensor, removed: Tensor) -> Tensor:
    """(1, 3, H, W) for one mask (H, W)."""
    from scipy.sparse.linalg import splu

    unknown = removed.flatten().cpu().numpy()
    if not unknown.any():
        return image
    colours = image[0].flatten(1).T.double().cpu().numpy().copy()
    rows = _differences(*removed.shape)[unknown]
    factors = splu(rows[:, unknown].tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    colours[unknown] = factors.solve(-(rows[:, ~unknown] @ colours[~unknown]))
    return torch.from_numpy(colours.T.copy()).view(image.shape).to(image)


def iterated(image: Tensor, removed: Tensor) -> Tensor:
    """Conjugate gradients for masks (M, 1, H, W), preconditioned by the diagonal; every colour is a system of its own.

    Raises:
        VitrailError: the residual is still above ``TOLERANCE`` after as many steps as there are pixels.
    """
    weights = _around(torch.ones_like(image[:, :1]))
    right = torch.where(removed, _around(torch.where(removed, 0, image)), 0)
    goal = TOLERANCE**2 * _dot(right, right)
    solution, residual = torch.zeros_like(right), right.clone()
    direction = residual / weights
    product = _dot(residual, direction)
    for step in range(removed[0].numel()):
        if step % CHECK_EVERY == 0 and bool((_dot(residual, residual) <= goal).all()):
            return torch.where(removed, solution, image)
        image_of = torch.where(removed, weights * direction - _around(direction), 0)
        rate = product / _dot(direction, image_of).clamp(min=TINY)
        solution += rate * direction
        residual -= rate * image_of
        scaled = residual / weights
        previous, product = product, _dot(residual, scaled)
        direction = scaled + product / previous.clamp(min=TINY) * direction
    raise VitrailError("road: the pixels that were removed could not be imputed; report this image as a bug.")


def _around(images: Tensor) -> Tensor:
    """The weighted sum of each pixel's neighbours."""
    sums = images  # [1, 2, 1] along both sides: 12 times the weights, and 4 times the pixel itself
    for side in (-1, -2):
        rest = sums.shape[side] - 1
        smoothed = 2 * sums
        smoothed.narrow(side, 1, rest).add_(sums.narrow(side, 0, rest))
        smoothed.narrow(side, 0, rest).add_(sums.narrow(side, 1, rest))
        sums = smoothed
    return DIAGONAL * (sums - 4 * images)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum((-1, -2), keepdim=True)


@lru_cache(maxsize=8)
def _differences(height: int, width: int) -> Any:
    """(HW, HW), sparse: each pixel times the weights of its neighbours, minus their weighted sum.

    Neighbours outside the image have no weight.
    """
    from scipy.sparse import diags, eye, kron

    down, across = (diags([1.0, 1.0], [-1, 1], shape=(side, side)) for side in (height, width))
    weights = DIRECT * (kron(down, eye(width)) + kron(eye(height), across)) + DIAGONAL * kron(down, across)
    return (diags(np.asarray(weights.sum(axis=1)).ravel()) - weights).tocsr()


road = functional(Road)
