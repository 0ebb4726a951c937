"""Insertion and deletion curves: an order of removal, what replaces removed cells, what is read.

Orders are ranks: a cell is changed at step t if its rank is below the step's count. A curve is thus computed on the
device without a loop over pixels, and curves of several images share chunks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.precision import HALF
from vitrail.engine.noise import noise
from vitrail.engine.requests import Asking, Pictures, Request, Subsets, Tokens
from vitrail.errors import VitrailError
from vitrail.metrics.base import Case, check_seed
from vitrail.models.view import View
from vitrail.targets import Reading, at_least_single

Baseline = Literal["mean", "blur", "black", "random"]
Way = Literal["insertion", "deletion"]
# "auto": a GPU scores in half precision (final norm, head and logits excepted); "full": in the model's own.
Precision = Literal["auto", "full"]

# Columns of a reading.
PROBABILITY, LOG_PROBABILITY, TOP = 0, 1, 2

BLUR, SIGMA = 11, 5.0


def ranks(values: Tensor, seed: int) -> Tensor:
    """(n,): the place of each cell in the order of falling values; cells of equal value in a drawn order."""
    drawn = _drawn(values.numel(), seed).to(values.device)
    flat = values.flatten()[drawn]
    order = drawn[flat.argsort(descending=True, stable=True)]
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


@lru_cache(maxsize=32)
def _drawn(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(check_seed(seed)))


def even_counts(cells: int, steps: int) -> list[int]:
    """How many cells are changed after each step, from none to all."""
    if steps < 1:
        raise VitrailError(f"steps must be at least 1, but got {steps}.")
    steps = min(steps, cells)
    return [step * cells // steps for step in range(steps + 1)]


def pixel_curve(
    case: Case,
    way: Way,
    counts: Sequence[int],
    background: Tensor,
    *,
    seed: int,
    precision: Precision,
    same: Hashable,
    least_first: bool = False,
) -> Pictures:
    """(steps, 3): what is read while pixels of the image are replaced by the background, or the other way round.

    ``background`` (1, 3, H, W); most important pixels first unless ``least_first``. Metrics whose curves have the
    ``same`` value share one curve.
    """
    start, end = (case.pixels, background) if way == "deletion" else (background, case.pixels)
    place = ranks(-case.on_input if least_first else case.on_input, seed).view(1, 1, *case.size)
    taken = torch.tensor(counts, device=place.device)[:, None, None, None]
    return case.pictures(
        len(counts),
        lambda part: torch.where(place < taken[part], end, start),
        Standing(),
        name="curves",
        products=HALF if precision == "auto" and case.view.gains_from_half else None,
        same=(id(case), same),
    )


def token_curve(case: Case, keep: Sequence[Tensor], precision: Precision, same: Hashable) -> Asking[Tensor]:
    """(sets, 3): what is read with only the patches of each set present; sets of one size share their chunks."""
    tokens = yield Tokens(case.batch)
    requests: list[Request] = [
        Subsets(
            view=case.view,
            count=1,
            length=len(patches) + case.view.num_prefix,
            reading=Standing(),
            about=(case.target,),
            name="curves",
            products=HALF if precision == "auto" and case.view.gains_from_half else None,
            same=(id(case), same, i),
            tokens=tokens,
            keep=patches[None],
        )
        for i, patches in enumerate(keep)
    ]
    return torch.cat((yield requests))


@dataclass(frozen=True)
class Standing(Reading):
    """(m, 3): the probability of the class asked about and its logarithm, and the class that comes first."""

    def __call__(self, view: View, logits: Tensor, about: Tensor) -> Tensor:
        logits = at_least_single(logits)
        values = [view.probabilities(logits).gather(1, about), view.log_probabilities(logits).gather(1, about)]
        return torch.cat([*(v.double() for v in values), view.predicted(logits)[:, None]], dim=1)


def top_is_true(case: Case, points: Tensor) -> Tensor:
    """Whether the true class comes first at each point; of an image without one, the class predicted."""
    return (points[:, TOP] == (case.predicted if case.label is None else case.label)).double()


def background(case: Case, kind: str, seed: int, tis: bool = False) -> Tensor:
    """(1, 3, H, W): what removed pixels become, made in the space of colours 0…1 and normalised as the model has it.

    ``tis``: as TIS's release, all in normalised space: "black" is the mean colour of ImageNet, "mean" one number.
    """
    image = case.pixels
    if kind == "mean":  # the mean of normalised colours is the normalised mean
        return (image.mean() if tis else image.mean((2, 3), keepdim=True)).expand_as(image)
    if kind == "blur":  # likewise
        return blurred(image, _gaussian(), "reflect")
    if kind == "black":
        colours = torch.zeros_like(image)
    else:
        colours = noise("uniform", image.shape[1:], range(1), seed, image.device).to(image.dtype)
    return colours if tis else case.view.preprocessing.normalise(colours)


def rise_background(case: Case, way: Way) -> Tensor:
    """As RISE's release has it: deletion to zeros, insertion from a blur by a near-box kernel, zeros outside."""
    return torch.zeros_like(case.pixels) if way == "deletion" else blurred(case.pixels, _near_box(), "constant")


def blurred(image: Tensor, kernel: Tensor, padding: Literal["reflect", "constant"]) -> Tensor:
    """(1, 3, H, W) convolved with (k, k) channel by channel; mirrored at the edges, or with zeros outside."""
    half = kernel.shape[0] // 2
    if padding == "reflect" and min(image.shape[-2:]) <= half:
        raise VitrailError(
            f'baseline="blur" needs images larger than {half} pixels, but got {tuple(image.shape[-2:])}.'
        )
    padded = F.pad(image, [half] * 4, mode=padding)
    weight = kernel.to(image).expand(3, 1, -1, -1)
    return F.conv2d(padded, weight, groups=3)


@lru_cache(maxsize=1)
def _gaussian() -> Tensor:
    place = torch.arange(BLUR, dtype=torch.float64) - BLUR // 2
    bell = torch.exp(-(place**2) / (2 * SIGMA**2))
    return torch.outer(bell, bell) / bell.sum() ** 2


@lru_cache(maxsize=1)
def _near_box() -> Tensor:
    from scipy.ndimage import gaussian_filter

    point = np.zeros((BLUR, BLUR))
    point[BLUR // 2, BLUR // 2] = 1
    return torch.from_numpy(gaussian_filter(point, SIGMA))
