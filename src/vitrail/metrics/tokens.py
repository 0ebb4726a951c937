"""Curves with true token masking: patches are taken out after their positions were added, prefix tokens stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.engine.maps import regions
from vitrail.engine.requests import Asking
from vitrail.errors import VitrailError
from vitrail.metrics.base import Case, MapMetric, Scored, average, metric, tie_fraction, trapezoid
from vitrail.metrics.curves import PROBABILITY, Precision, Way, ranks, token_curve, top_is_true
from vitrail.metrics.functional import functional

STEPS = 10  # a tenth of the patches each


@dataclass(kw_only=True)
class TokenCurve(MapMetric):
    """A curve of ten points: the whole image, and 10…90 % of the patches removed (deletion) or kept (insertion).

    The mean height over the axis it spans, 0.9. ``cells``: instead, one square of ``cells`` × ``cells`` patches is
    removed or kept after another, in the order of their mean value, down to the last; the value is the mean height.
    This is what ``greedy`` searches. ``protocol="skipplus"``: in per cent, not divided by the span, and 100 − x where
    less is better.
    """

    cells: int | None = None
    seed: int = 0
    precision: Precision = "auto"
    protocol: Literal["default", "skipplus"] = "default"

    way: ClassVar[Way]
    flipped: ClassVar[bool]  # whether SkipPLUS shows 100 − x

    @property
    def higher_is_better(self) -> bool:
        return self.protocol == "skipplus" or self.info.higher_is_better

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cells is not None and self.cells < 1:
            raise VitrailError(f"cells must be at least 1, but got {self.cells}.")
        if self.cells is not None and self.protocol == "skipplus":
            raise VitrailError('protocol="skipplus" removes a tenth of the patches at a time: leave cells= out.')

    def points(self, case: Case) -> Asking[Tensor]:
        """(steps, 3), in order of the share removed or kept."""
        same = ("tokens", self.way, self.cells, self.seed, self.precision)
        return (yield from token_curve(case, self.sets(case), self.precision, same))

    def sets(self, case: Case) -> list[Tensor]:
        """The patches that are there at each point."""
        if self.cells is not None:
            return self.regions_present(case, self.cells)
        order = ranks(case.on_grid, self.seed).argsort()
        counts = [step * len(order) // STEPS for step in range(1, STEPS)]
        if self.way == "deletion":
            sets = [order[count:] for count in (0, *counts)]
        else:
            sets = [order[:count] for count in (*counts, len(order))]
        smallest = 1 if case.view.pools_patches else 0
        sets = [order[:1] if len(patches) < smallest else patches for patches in sets]  # a head that pools needs one
        return [patches.sort().values for patches in sets]

    def regions_present(self, case: Case, side: int) -> list[Tensor]:
        """The patches that are there as squares come or go; never none."""
        if side > min(case.view.grid):
            rows, columns = case.view.grid
            raise VitrailError(
                f"cells must be at most {min(rows, columns)} on the {rows} × {columns} patches of {case.view.name}, "
                f"but got {side}."
            )
        squares = regions(case.view.grid, side).to(case.on_grid.device)
        means = case.on_grid.flatten().double() @ (squares / squares.sum(1, keepdim=True)).double().T
        rank = ranks(means, self.seed)  # (R,): 0 = the most important
        count = torch.arange(len(rank), device=rank.device)[:, None]
        chosen = rank >= count if self.way == "deletion" else rank <= count  # (R, R): at each point, of the squares
        present = chosen.double() @ squares.double() > 0
        return [patches.nonzero()[:, 0] for patches in present]

    def scored(self, case: Case, heights: Tensor) -> Scored:
        if self.cells is not None:
            return Scored(average(heights), heights.tolist(), extras={"ties": tie_fraction(case.on_grid)})
        value = trapezoid(heights)  # over an axis of length one, hence the mean height
        if self.protocol == "skipplus":
            value = 100 * value * (STEPS - 1) / STEPS
            value = 100 - value if self.flipped else value
        return Scored(value, heights.tolist(), extras={"ties": tie_fraction(case.on_grid)})

    def ask(self, case: Case) -> Asking[Scored]:
        points = yield from self.points(case)
        return self.scored(case, self.heights(case, points))

    def heights(self, case: Case, points: Tensor) -> Tensor:
        """(steps,): the curve, from what was read at its points (steps, 3)."""
        return top_is_true(case, points)


class TokenFall(TokenCurve):
    """A curve of what is missing of the probability with the whole image."""

    def heights(self, case: Case, points: Tensor) -> Tensor:
        probabilities = points[:, PROBABILITY]
        return (probabilities[0] if self.way == "deletion" else probabilities[-1]) - probabilities


def _metric(name: str, higher_is_better: bool):  # type: ignore[no-untyped-def]
    return metric(name, family="token masking", higher_is_better=higher_is_better, needs="tokens", paper="SkipPLUS")


@_metric("token_deletion_accuracy", higher_is_better=False)
@dataclass(kw_only=True)
class TokenDeletionAccuracy(TokenCurve):
    """Top-1 accuracy while the most important patches are taken out."""

    way: ClassVar[Way] = "deletion"
    flipped: ClassVar[bool] = True


@_metric("token_insertion_accuracy", higher_is_better=True)
@dataclass(kw_only=True)
class TokenInsertionAccuracy(TokenCurve):
    """Top-1 accuracy with only the most important patches present."""

    way: ClassVar[Way] = "insertion"
    flipped: ClassVar[bool] = False


@_metric("token_deletion_aopc", higher_is_better=True)
@dataclass(kw_only=True)
class TokenDeletionAopc(TokenFall):
    """Fall of the class's probability while the most important patches are taken out."""

    way: ClassVar[Way] = "deletion"
    flipped: ClassVar[bool] = False


@_metric("token_insertion_aopc", higher_is_better=False)
@dataclass(kw_only=True)
class TokenInsertionAopc(TokenFall):
    """What is missing of the class's probability with only the most important patches present."""

    way: ClassVar[Way] = "insertion"
    flipped: ClassVar[bool] = True


token_deletion_accuracy = functional(TokenDeletionAccuracy)
token_insertion_accuracy = functional(TokenInsertionAccuracy)
token_deletion_aopc = functional(TokenDeletionAopc)
token_insertion_aopc = functional(TokenInsertionAopc)
