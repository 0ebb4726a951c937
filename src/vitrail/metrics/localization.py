"""Localisation: does the map fall on the object of its class? Functions of tensors, and the metrics made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.maps import min_max
from vitrail.errors import VitrailError
from vitrail.metrics.base import NOT_APPLICABLE, Case, MapMetric, Scored, metric
from vitrail.metrics.curves import ranks


def peak(values: Tensor, seed: int | None = 0) -> tuple[int, int]:
    """(row, column) of the largest value; of several the one drawn by ``seed``, or with None the first."""
    largest = (values == values.max()).flatten()
    index = int(largest.int().argmax()) if seed is None else int(ranks(largest.int(), seed).argmin())
    return index // values.shape[1], index % values.shape[1]


def peak_ties(values: Tensor) -> float:
    """The share of cells that have the largest value, where it is not one alone."""
    count = int((values == values.max()).sum())
    return count / values.numel() if count > 1 else 0.0


def points_into(values: Tensor, region: Tensor, tolerance: float = 0.0, seed: int | None = 0) -> bool:
    """Whether the largest value of (H, W) lies in the region, or at most ``tolerance`` pixels from it."""
    _same_size(values, region)
    row, column = peak(values, seed)
    if tolerance == 0:
        return bool(region[row, column])
    inside = region.nonzero().double()
    if not len(inside):
        return False
    return bool((inside - inside.new_tensor([row, column])).square().sum(1).min() <= tolerance**2)


def mass(values: Tensor) -> Tensor:
    """Evidence as weights: of a map with negative values their positive part, of another what exceeds its minimum."""
    return values.clamp(min=0) if bool((values < 0).any()) else values - values.min()


def share_inside(weights: Tensor, region: Tensor) -> float:
    """The share of weights (H, W) inside a region; 0 where there is no weight."""
    _same_size(weights, region)
    total = weights.double().sum()
    return float(weights.double()[region].sum() / total) if total > 0 else 0.0


def foreground(values: Tensor) -> Tensor:
    """What Chefer's protocol takes for the object: above the mean of the min–max map."""
    scaled = min_max(values)
    return scaled > scaled.double().mean()


def overlaps(predicted: Tensor, region: Tensor) -> list[float]:
    """Intersection and union of the object, then of its background, in pixels."""
    _same_size(predicted, region)
    pairs = ((predicted, region), (~predicted, ~region))
    return [float(n) for a, b in pairs for n in ((a & b).sum(), (a | b).sum())]


def mean_overlap(areas: Tensor) -> Tensor:
    """(…, 4) intersections and unions → mean of the two IoUs; a class that is nowhere counts as 0."""
    inside, union = areas[..., 0::2], areas[..., 1::2]
    return (inside / (union + torch.finfo(torch.float64).eps)).mean(-1)


def average_precision(scores: Tensor, truth: Tensor) -> float:
    """Area under the precision-recall steps; NaN without a positive."""
    if not truth.any():
        return float("nan")
    ordered, order = scores.flatten().sort(descending=True)
    hits = truth.flatten()[order].double().cumsum(0)
    ends = F.pad(ordered[1:] != ordered[:-1], (0, 1), value=True)  # cells of equal value come in together
    positives = hits[ends]
    precision = positives / (ends.nonzero()[:, 0] + 1)
    gained = positives - F.pad(positives[:-1], (1, 0))
    return float((precision * gained).sum() / hits[-1])


def _same_size(values: Tensor, region: Tensor) -> None:
    if values.shape != region.shape:
        raise VitrailError(f"a map of {tuple(values.shape)} was given with a mask of {tuple(region.shape)}.")


@metric("pointing_game", family="localisation", higher_is_better=True, needs="region", paper="Zhang et al. 2018")
@dataclass(kw_only=True)
class PointingGame(MapMetric):
    """Whether the largest value lies on the object.

    ``tolerance``: pixels by which it may miss (15 in the original game). ``max_area``: images whose object covers at
    least this share do not count. Several largest values: one drawn by ``seed``; ``protocol="tis"`` takes the first.
    """

    tolerance: float = 0.0
    max_area: float = 0.5
    seed: int = 0
    protocol: Literal["default", "tis", "vit_cx"] = "default"

    least: ClassVar = {"tolerance": 0}

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        if not self.max_area > 0:
            raise VitrailError(f"max_area must be above 0 (above 1: no image is left out), but got {self.max_area}.")
        published = self.protocol == "tis"
        region = _cut_short(case) if published and not case.from_masks else case.region
        if float(region.double().mean()) >= self.max_area:
            return NOT_APPLICABLE
        seed = None if published else self.seed
        hit = points_into(case.on_input, region, self.tolerance, seed)
        return Scored(float(hit), extras={"ties": peak_ties(case.on_input)})


def _cut_short(case: Case) -> Tensor:
    """The boxes as TIS's release paints them: corners cut to whole numbers, the last row and column left out."""
    region = torch.zeros(case.size, dtype=torch.bool, device=case.map.device)
    for x0, y0, x1, y1 in case.boxes or ():
        region[max(int(y0), 0) : int(y1), max(int(x0), 0) : int(x1)] = True
    return region


@metric("energy_pointing_game", family="localisation", higher_is_better=True, needs="region", paper="Wang et al. 2020")
@dataclass(kw_only=True)
class EnergyPointingGame(MapMetric):
    """Share of the evidence that lies on the object.

    Of a map with negative values the positive part counts, of another what exceeds its minimum; ``protocol="tis"``:
    absolute values.
    """

    protocol: Literal["default", "tis"] = "default"

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        if self.protocol == "tis":
            return Scored(share_inside(case.on_input.abs(), case.region if case.from_masks else _cut_short(case)))
        return Scored(share_inside(mass(case.on_input), case.region))


@metric("pixel_accuracy", family="localisation", higher_is_better=True, needs="mask", paper="VTranM")
@dataclass(kw_only=True)
class PixelAccuracy(MapMetric):
    """Share of pixels that the map, cut at its mean, puts on the right side (Chefer's segmentation test)."""

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        return Scored(float((foreground(case.on_input) == case.region).double().mean()))


@metric("mean_iou", family="localisation", higher_is_better=True, needs="mask", paper="VTranM")
@dataclass(kw_only=True)
class MeanIou(MapMetric):
    """Mean IoU of object and background, the map cut at its mean; of a data set, from areas summed over all images."""

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        areas = overlaps(foreground(case.on_input), case.region)
        return Scored(float(mean_overlap(torch.tensor(areas, dtype=torch.float64))), parts=areas)

    @staticmethod
    def combine(parts: Tensor) -> Tensor:
        return mean_overlap(parts.sum(-2))


@metric("mean_ap", family="localisation", higher_is_better=True, needs="mask", paper="VTranM")
@dataclass(kw_only=True)
class MeanAp(MapMetric):
    """Average precision over object and background together (Chefer's segmentation test)."""

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        scaled = min_max(case.on_input.double())
        truth = torch.stack([~case.region, case.region])
        return Scored(average_precision(torch.stack([1 - scaled, scaled]), truth))


@metric("segmentation_ap", family="localisation", higher_is_better=True, needs="mask", paper="SkipPLUS")
@dataclass(kw_only=True)
class SegmentationAp(MapMetric):
    """Area under precision and recall of the map's blocks as a detector of the object's pixels.

    Pixels of unknown class do not count; under ``protocol="skipplus"`` they are no object, and an image whose object
    covers less than 5 % is left out.
    """

    protocol: Literal["default", "skipplus"] = "default"

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        blocks = F.interpolate(case.map[None, None], size=case.size, mode="nearest-exact")[0, 0]
        counts = torch.ones_like(case.region) if case.ignore is None else ~case.ignore
        if self.protocol == "skipplus":
            region = case.region & counts
            small = float(region.double().mean()) < 0.05
            return NOT_APPLICABLE if small else Scored(average_precision(blocks, region))
        return Scored(average_precision(blocks[counts], case.region[counts]))


@metric("discriminativity", family="localisation", higher_is_better=True, needs="objects", paper="SkipPLUS")
@dataclass(kw_only=True)
class Discriminativity(MapMetric):
    """In an image with objects of two classes: the share of the evidence that lies on the right one of them.

    ``reading="hit"``: whether the largest value does.
    """

    reading: Literal["mass", "hit"] = "mass"
    seed: int = 0

    def score(self, case: Case) -> Scored:
        assert case.region is not None
        assert case.others is not None
        if self.reading == "hit":
            hit = points_into(case.on_input, case.region, seed=self.seed)
            return Scored(float(hit), extras={"ties": peak_ties(case.on_input)})
        weights = mass(case.on_input).double()
        right, wrong = float(weights[case.region].sum()), float(weights[case.others].sum())
        return Scored(right / (right + wrong) if right + wrong > 0 else 0.5)
