"""Perturbation curves over pixels: insertion, deletion, positive and negative perturbation, AOPC, log-odds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from vitrail.engine.requests import Asking, Pictures
from vitrail.errors import VitrailError
from vitrail.metrics.base import Case, MapMetric, Scored, average, metric, trapezoid
from vitrail.metrics.curves import (
    LOG_PROBABILITY,
    PROBABILITY,
    Baseline,
    Precision,
    Way,
    background,
    even_counts,
    pixel_curve,
    rise_background,
    top_is_true,
)
from vitrail.metrics.functional import functional


@dataclass(kw_only=True)
class PixelCurve(MapMetric):
    """A curve while pixels change."""

    baseline: Baseline | None = None
    steps: int = 224
    seed: int = 0
    precision: Precision = "auto"

    least: ClassVar = {"steps": 1}


@dataclass(kw_only=True)
class Area(PixelCurve):
    """The area under the probability of the explained class while pixels change.

    A target that has a score in place of a probability is scaled so that the empty image has 0 and the full image 1.
    ``baseline``: what removed pixels become, the image's mean colour, a blur of it, black, or random colours (None =
    "mean", as the protocol says). ``protocol="tis"``: no point before the first step, plain mean, baselines in
    normalised space. ``"rise"`` (and ``"vit_cx"``, whose text names no other): deletion to zeros of normalised space,
    insertion from a blur by RISE's near-box kernel. ``precision="full"`` keeps a GPU from scoring in half precision.
    """

    protocol: Literal["default", "tis", "rise", "vit_cx"] = "default"

    way: ClassVar[Way]

    def ask(self, case: Case) -> Asking[Scored]:
        (scored,) = yield from self.areas(case, self.way)
        return scored

    def curve(self, case: Case, way: Way) -> Pictures:
        """The request for a curve."""
        if self.baseline is not None and self.protocol in ("rise", "vit_cx"):
            raise VitrailError(f'protocol="{self.protocol}" has baselines of its own: leave baseline= out.')
        kind = "rise" if self.protocol in ("rise", "vit_cx") else (self.protocol, self.baseline or "mean")
        return pixel_curve(
            case,
            way,
            self.counts(case),
            self.background(case, way),
            seed=self.seed,
            precision=self.precision,
            same=(way, kind, self.steps, self.seed, self.precision),
        )

    def areas(self, case: Case, *ways: Way) -> Asking[list[Scored]]:
        """The area under each curve."""
        if case.view.output == "score" and self.protocol == "tis":
            raise VitrailError(
                'protocol="tis" measures probabilities, but the target has a score: use another protocol.'
            )
        curves = yield [self.curve(case, way) for way in ways]
        return [self.scored(case, curve[:, PROBABILITY], way) for curve, way in zip(curves, ways, strict=True)]

    def scored(self, case: Case, points: Tensor, way: Way) -> Scored:
        """Of probabilities as they are; of a score relative to those of the empty image, 0, and the full image, 1."""
        scale = None
        if case.view.output == "score":
            empty, full = (points[0], points[-1]) if way == "insertion" else (points[-1], points[0])
            scale, points = [float(empty), float(full)], (points - empty) / (full - empty)
        return Scored(self.area(points), points.tolist(), extras={"ties": case.ties}, scale=scale)

    def background(self, case: Case, way: Way) -> Tensor:
        if self.protocol in ("default", "tis"):
            return background(case, self.baseline or "mean", self.seed, self.protocol == "tis")
        return rise_background(case, way)

    def counts(self, case: Case) -> list[int]:
        cells = case.size[0] * case.size[1]
        if self.protocol == "default":
            return even_counts(cells, self.steps)
        step = math.ceil(cells / self.steps)
        if self.protocol == "tis":
            return [min(i * step, cells) for i in range(1, self.steps + 1)]
        return [min(i * step, cells) for i in range(math.ceil(cells / step) + 1)]

    def area(self, points: Tensor) -> float:
        return average(points) if self.protocol == "tis" else trapezoid(points)


@metric("insertion", family="perturbation", higher_is_better=True, paper="Petsiuk et al. 2018")
@dataclass(kw_only=True)
class Insertion(Area):
    """Area under the class's probability while the most important pixels appear first."""

    way: ClassVar[Way] = "insertion"


@metric("deletion", family="perturbation", higher_is_better=False, paper="Petsiuk et al. 2018")
@dataclass(kw_only=True)
class Deletion(Area):
    """Area under the class's probability while the most important pixels vanish first."""

    way: ClassVar[Way] = "deletion"


@metric("insertion_minus_deletion", family="perturbation", higher_is_better=True, paper="TIS")
@dataclass(kw_only=True)
class InsertionMinusDeletion(Area):
    """Insertion minus deletion, by the same parameters."""

    def ask(self, case: Case) -> Asking[Scored]:
        inserted, deleted = yield from self.areas(case, "insertion", "deletion")
        return replace(inserted, value=inserted.value - deleted.value, curve=None)


@dataclass(kw_only=True)
class Removal(PixelCurve):
    """What becomes of the prediction while pixels are removed in equal steps, from none to all.

    ``baseline``: what removed pixels become (None = "mean"; black under ``protocol="vtranm"``). ``precision="full"``
    keeps a GPU from scoring in half precision.
    """

    steps: int = 20
    protocol: Literal["default", "vtranm"] = "default"

    least_first: ClassVar[bool] = False

    def ask(self, case: Case) -> Asking[Scored]:
        kind = self.baseline or ("black" if self.protocol == "vtranm" else "mean")
        points = yield pixel_curve(
            case,
            "deletion",
            even_counts(case.size[0] * case.size[1], self.steps),
            background(case, kind, self.seed),
            seed=self.seed,
            precision=self.precision,
            same=("removal", self.least_first, kind, self.steps, self.seed, self.precision),
            least_first=self.least_first,
        )
        curve = self.heights(case, points)
        return Scored(self.summed(curve), curve.tolist(), extras={"ties": case.ties})

    def heights(self, case: Case, points: Tensor) -> Tensor:
        """(steps + 1,): the curve, from what was read at its points (steps + 1, 3)."""
        return top_is_true(case, points)

    def summed(self, curve: Tensor) -> float:
        return trapezoid(curve)


class MeanChange(Removal):
    """The mean over the curve, the untouched image included."""

    def summed(self, curve: Tensor) -> float:
        return average(curve)


@metric("positive_auc", family="perturbation", higher_is_better=False, paper="VTranM")
@dataclass(kw_only=True)
class PositiveAuc(Removal):
    """Top-1 accuracy while the most important pixels are removed first (area over 0…100 %)."""


@metric("negative_auc", family="perturbation", higher_is_better=True, paper="VTranM")
@dataclass(kw_only=True)
class NegativeAuc(Removal):
    """Top-1 accuracy while the least important pixels are removed first (area over 0…100 %)."""

    least_first: ClassVar[bool] = True


@metric("aopc", family="perturbation", higher_is_better=True, paper="VTranM")
@dataclass(kw_only=True)
class Aopc(MeanChange):
    """Mean fall of the class's probability while the most important pixels are removed, the untouched image counted."""

    def heights(self, case: Case, points: Tensor) -> Tensor:
        return points[0, PROBABILITY] - points[:, PROBABILITY]


@metric("log_odds", family="perturbation", higher_is_better=False, paper="VTranM")
@dataclass(kw_only=True)
class LogOdds(MeanChange):
    """Mean change of the class's log-probability while the most important pixels are removed."""

    def heights(self, case: Case, points: Tensor) -> Tensor:
        return points[:, LOG_PROBABILITY] - points[0, LOG_PROBABILITY]


insertion = functional(Insertion)
deletion = functional(Deletion)
insertion_minus_deletion = functional(InsertionMinusDeletion)
positive_auc = functional(PositiveAuc)
negative_auc = functional(NegativeAuc)
aopc = functional(Aopc)
log_odds = functional(LogOdds)
