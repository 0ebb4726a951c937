"""Removal without an edge to see: pixels are imputed from their neighbours (Rong et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.noise import noise
from vitrail.engine.requests import Asking, Pictures, joined, size
from vitrail.errors import VitrailError
from vitrail.metrics.base import Case, MapMetric, Scored, average, metric, shared
from vitrail.metrics.curves import ranks
from vitrail.metrics.functional import functional
from vitrail.targets import ClassScore

SHARES = (10, 20, 30, 40, 50, 70, 90)  # per cent of the pixels
DIRECT, DIAGONAL = 1 / 6, 1 / 12  # weights of the neighbours
TOLERANCE, TINY = 1e-9, 1e-300  # of the conjugate gradients
LOW = torch.float32  # precision of what only speeds them up
SMALLEST = 4  # cells along a side of the coarsest grid
NUMBERS = 2**25  # of the images that are imputed together


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
        place = ranks(values, self.seed).view(case.size)
        counts = torch.tensor([share * place.numel() // 100 for share in SHARES], device=place.device)
        drawn = shared([case], ("road", self.seed), partial(self.drawn, case))
        return Imputations(
            view=case.view,
            count=len(counts),
            length=case.view.num_tokens,
            reading=ClassScore("probability"),
            about=(case.target,),
            name="imputation",
            same=(id(case), "road", least_first, self.sigma, self.seed),
            make=lambda part: place < counts[part, None, None],
            image=case.pixels,
            added=self.sigma * drawn,
        )

    def drawn(self, case: Case) -> Tensor:
        """(shares, 3, H, W): the noise of every removed pixel."""
        drawn = noise("normal", case.pixels.shape[1:], range(len(SHARES)), self.seed, case.pixels.device)
        return drawn.to(case.pixels.dtype)


@dataclass(eq=False, kw_only=True)
class Imputations(Pictures):
    """An image (1, 3, H, W) without some pixels: ``make`` tells which (m, H, W), all chunks are imputed at once.

    ``added``: what removed pixels get besides.
    """

    image: Tensor
    added: Tensor

    @staticmethod
    def inputs(pieces: Sequence[tuple[Any, slice]]) -> tuple[Tensor, ...]:
        removed = joined([request.make(part) for request, part in pieces])
        images = joined([request.image.expand(size(part), -1, -1, -1) for request, part in pieces])
        added = joined([request.added[part] for request, part in pieces])
        return (imputed(images, removed) + added * removed[:, None],)


def imputed(images: Tensor, removed: Tensor) -> Tensor:
    """(M, 3, H, W): images (M or 1, 3, H, W) whose pixels ``removed`` (M, H, W) are the weighted means of their
    neighbours.

    By conjugate gradients on a GPU of NVIDIA's, which computes many masks together, else factorised one by one.
    """
    images = images.expand(len(removed), -1, -1, -1)
    if images.device.type != "cuda":
        return torch.cat([factorised(image[None], mask) for image, mask in zip(images, removed, strict=True)])
    step = max(1, NUMBERS // images[0].numel())
    parts = zip(images.split(step), removed.split(step), strict=True)
    return torch.cat([iterated(part.double(), mask[:, None]).to(images.dtype) for part, mask in parts])


def factorised(image: Tensor, removed: Tensor) -> Tensor:
    """(1, 3, H, W) for one mask (H, W)."""
    from scipy.sparse.linalg import splu

    unknown = removed.flatten().cpu().numpy()
    if not unknown.any():
        return image
    colours = image[0].flatten(1).T.cpu().double().numpy().copy()
    rows = _differences(*removed.shape)[unknown]
    factors = splu(rows[:, unknown].tocsc(), permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    colours[unknown] = factors.solve(-(rows[:, ~unknown] @ colours[~unknown]))
    return torch.from_numpy(colours.T.copy()).view(image.shape).to(image.dtype).to(image.device)


def iterated(images: Tensor, removed: Tensor) -> Tensor:
    """Conjugate gradients for masks (M, 1, H, W), preconditioned by a multigrid; every colour is a system of its own.

    Raises:
        VitrailError: the residual is still above ``TOLERANCE`` after as many steps as there are pixels.
    """
    levels = _levels(removed)
    weights = _around(torch.ones_like(images[:1, :1]))
    unknown = removed.to(images.dtype)
    right = _around((1 - unknown) * images) * unknown
    goal = TOLERANCE**2 * _dot(right, right)
    solution, residual = torch.zeros_like(right), right.clone()
    direction, previous = torch.zeros_like(right), torch.ones_like(goal)
    for _ in range(removed[0].numel()):
        if bool((_dot(residual, residual) <= goal).all()):
            return torch.where(removed, solution, images)
        corrected = _cycle(residual.to(LOW), levels).to(images.dtype)
        product = _dot(residual, corrected)
        direction = torch.addcmul(corrected, product / previous, direction)
        image_of = (weights * direction).sub_(_around(direction)).mul_(unknown)
        rate = product / _dot(direction, image_of).clamp(min=TINY)
        solution.addcmul_(rate, direction)
        residual.addcmul_(-rate, image_of)
        previous = product.clamp(min=TINY)
    raise VitrailError("road: the pixels that were removed could not be imputed; report this image as a bug.")


@dataclass(frozen=True)
class Level:
    """Systems on one grid: which cells are unknown, (M, 1, h, w), their weights, and the inverse of those."""

    unknown: Tensor
    weights: Tensor
    inverse: Tensor


def _levels(removed: Tensor) -> list[Level]:
    """From the pixels to ever larger cells; a cell is unknown if all of its four parts are."""
    levels, unknown = [], removed.to(LOW)
    while True:
        weights = _around(torch.ones_like(unknown[:1]))
        levels.append(Level(unknown, weights, unknown / weights))
        height, width = unknown.shape[-2:]
        if min(height, width) < SMALLEST:
            return levels
        unknown = -F.max_pool2d(-F.pad(unknown, (0, width % 2, 0, height % 2)), 2)


def _cycle(residual: Tensor, levels: Sequence[Level]) -> Tensor:
    """One symmetric V-cycle from zero: about the solution for a residual. Jacobi's method damps half of all waves to a
    third here.
    """
    level, rest = levels[0], levels[1:]
    solution = residual * level.inverse
    if rest:
        height, width = residual.shape[-2:]
        left = _left(residual, solution, level)
        coarse = 4 * F.avg_pool2d(F.pad(_smoothed(left), (0, width % 2, 0, height % 2)), 2)
        correction = _cycle(coarse * rest[0].unknown, rest)
        enlarged = F.interpolate(correction, scale_factor=2, mode="nearest")[..., :height, :width]
        solution.addcmul_(_smoothed(enlarged), level.unknown)
    return solution.addcmul_(_left(residual, solution, level), level.inverse)


def _left(residual: Tensor, solution: Tensor, level: Level) -> Tensor:
    """The residual that a solution leaves."""
    return residual.addcmul(level.weights, solution, value=-1).add_(_around(solution)).mul_(level.unknown)


def _around(images: Tensor) -> Tensor:
    """The weighted sum of each pixel's neighbours: of [1, 2, 1] along both sides, without the pixel itself."""
    return _smoothed(images).mul_(16 * DIAGONAL).sub_(images, alpha=4 * DIAGONAL)


def _smoothed(images: Tensor) -> Tensor:
    """[1, 2, 1] / 4 along both sides, zero outside: the mean of two neighbours, twice."""
    return F.avg_pool2d(F.avg_pool2d(images, 2, stride=1, padding=1), 2, stride=1)


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
