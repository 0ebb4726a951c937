"""Recurring content: a sticker, tag or ruler under the evidence of many images of one class and of no other.

Objects of a class resemble each other; an artefact is the same pixels again and again. So the window of an image that
holds most evidence is searched for in the other images, by the correlation of what is left when smooth colours are
taken away. What occurs more often in images of one predicted class than chance allows is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.stats import fisher_exact
from torch import Tensor

from vitrail.audit.records import SIDE, Records
from vitrail.geometry import Box

WINDOW = 24  # pixels of SIDE: three of fourteen patches
STRIDE = 4  # between windows that are tried
BLUR = 2.0  # pixels, of the smooth colours that are taken away
FLOOR = 0.03  # contrast below which a window counts as empty
SAME = 0.6  # correlation from which two windows show the same: of natural windows one pair of a thousand has it
LEVEL = 0.01  # of significance, over all windows of an audit together
FEWEST = 4  # images that share the content
CLASS_SIZE = 5  # smallest class that is searched
WINDOWS, MEMBERS, OTHERS = 48, 240, 120  # per class at most: windows, images of the class, images of other classes
PER_CLASS = 3  # findings
BLOCK = 4  # pixels by which a window grows
ALIKE = 0.35  # mean correlation of images from which what is beside the window belongs to the content


Sides = tuple[int, int, int, int]  # left, top, right and bottom, relative to the upper left corner of a window


@dataclass(frozen=True)
class Match:
    """Where an image shows the content; ``box`` in shares of the width and of the height."""

    image: int
    box: Box
    correlation: float
    share: float  # of the image's evidence inside


@dataclass(frozen=True)
class Pattern:
    """Content that recurs below the evidence for a class; shares are of images."""

    target: int  # the predicted class
    matches: Sequence[Match]  # the best first
    inside: float  # of the images of the class that were searched
    outside: float  # of images of other classes
    chance: float  # the probability of this or more by chance, over all windows of the audit

    @property
    def share(self) -> float:
        """The mean share of the evidence on the content, where it is."""
        return float(np.mean([match.share for match in self.matches]))


@dataclass(frozen=True)
class Appearance:
    """The windows with most evidence of some images of a class, and how well each image matches them."""

    members: Sequence[int]
    windows: Sequence[int]  # the images that the windows are of
    scores: Tensor  # (windows, members): correlations; NaN of a window with its own image


class Search:
    """The search for recurring content in all images."""

    def __init__(self, records: Records) -> None:
        self.predicted = records.predicted
        evidence = records.evidence()
        fine = F.interpolate(evidence[:, None], size=(SIDE, SIDE), mode="nearest-exact")
        fine = fine / fine.sum((2, 3), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        self.evidence = fine[:, 0]
        self.sums = F.avg_pool2d(fine, WINDOW, 1)[:, 0] * WINDOW**2  # evidence of the window at every place
        self.pictures = records.pictures()
        self.details = self.pictures - blurred(self.pictures)
        self.spectra = torch.fft.rfft2(self.details)
        squares = F.avg_pool2d(self.details.square().sum(1), WINDOW, 1).clamp(min=0) * WINDOW**2
        self.floor = FLOOR * WINDOW * 3**0.5
        self.norms = squares.sqrt().clamp(min=self.floor)
        counts = np.unique(self.predicted, return_counts=True)
        self.classes = [int(index) for index, count in zip(*counts, strict=True) if count >= CLASS_SIZE]
        self.tests = sum(min(WINDOWS, int((self.predicted == index).sum())) for index in self.classes)

    def appearance(self, target: int) -> Appearance:
        """The windows of a class and their matches in it."""
        members = _sample(np.flatnonzero(self.predicted == target), MEMBERS)
        windows = _sample(members, WINDOWS)
        scores = torch.stack([self._correlations(image, members)[0] for image in windows])
        for row, image in enumerate(windows):
            scores[row, members.index(image)] = torch.nan
        return Appearance(members, windows, scores)

    def patterns(self, appearance: Appearance, target: int) -> Iterator[Pattern]:
        """What recurs in a class, the least likely first."""
        others = _sample(np.flatnonzero(self.predicted != target), OTHERS)
        if not others:
            return
        left = set(appearance.members)
        for _ in range(PER_CLASS):
            counted = [
                (len([m for m, q in zip(appearance.members, row, strict=True) if m in left and q > SAME]), image)
                for image, row in zip(appearance.windows, appearance.scores.tolist(), strict=True)
                if image in left
            ]
            counted = [entry for entry in sorted(counted, key=lambda entry: -entry[0]) if entry[0] + 1 >= FEWEST]
            pattern = self._best([image for _, image in counted[:8]], sorted(left), others, target)
            if pattern is None:
                return
            yield pattern
            left -= {match.image for match in pattern.matches}

    def _best(self, images: Sequence[int], members: list[int], others: list[int], target: int) -> Pattern | None:
        """The pattern of the window whose occurrence is least likely by chance; None if all may be chance."""
        patterns = [self._pattern(image, members, others, target) for image in images]
        likely = [pattern for pattern in patterns if pattern.chance <= LEVEL and len(pattern.matches) >= FEWEST]
        return min(likely, key=lambda pattern: (pattern.chance, -len(pattern.matches)), default=None)

    def _pattern(self, image: int, members: list[int], others: list[int], target: int) -> Pattern:
        inside, places = self._correlations(image, members)
        outside, _ = self._correlations(image, others)
        # the image of the window is the hypothesis, not evidence for it
        count, total = int((inside > SAME).sum()) - int(inside[members.index(image)] > SAME), len(members) - 1
        foreign = int((outside > SAME).sum())
        table = [[count, total - count], [foreign, len(others) - foreign]]
        chance = min(1.0, float(fisher_exact(table, alternative="greater").pvalue) * self.tests)
        spots = [
            (member, *divmod(int(place), SIDE - WINDOW + 1), float(score))
            for member, place, score in zip(members, places, inside, strict=True)
            if score > SAME
        ]
        sides = self._grown([(member, top, left) for member, top, left, _ in spots])
        matches = [self._match(member, top, left, score, sides) for member, top, left, score in spots]
        matches.sort(key=lambda match: -match.correlation)
        return Pattern(target, matches, len(matches) / len(members), foreign / len(others), chance)

    def _match(self, image: int, top: int, left: int, correlation: float, sides: Sides) -> Match:
        x0, y0 = max(0, left + sides[0]), max(0, top + sides[1])
        x1, y1 = min(SIDE, left + sides[2]), min(SIDE, top + sides[3])
        share = float(self.evidence[image, y0:y1, x0:x1].sum())
        return Match(image, (x0 / SIDE, y0 / SIDE, x1 / SIDE, y1 / SIDE), correlation, share)

    def _grown(self, spots: Sequence[tuple[int, int, int]]) -> Sides:
        """The content around windows at (image, top, left): each side moves while what it takes in is alike."""
        sides = [0, 0, WINDOW, WINDOW]
        moving = [0, 1, 2, 3]
        while moving:
            for side in list(moving):
                strip = list(sides)
                strip[side] += BLOCK if side >= 2 else -BLOCK
                strip[(side + 2) % 4] = sides[side]
                if abs(strip[side]) < SIDE and self._likeness(spots, strip) > ALIKE:
                    sides[side] += BLOCK if side >= 2 else -BLOCK
                else:
                    moving.remove(side)
        return sides[0], sides[1], sides[2], sides[3]

    def _likeness(self, spots: Sequence[tuple[int, int, int]], strip: Sequence[int]) -> float:
        """The mean correlation of pairs of images within a strip; 0 where it is outside most of them."""
        parts = []
        for image, top, left in spots:
            x0, y0, x1, y1 = left + strip[0], top + strip[1], left + strip[2], top + strip[3]
            if min(x0, y0) >= 0 and max(x1, y1) <= SIDE:
                parts.append(self.details[image, :, y0:y1, x0:x1].flatten())
        count = len(parts)
        if count < max(FEWEST - 1, len(spots) / 2):
            return 0.0
        stacked = torch.stack(parts).double()
        length, mean = stacked.square().sum(1).mean(), stacked.mean(0).square().sum()
        floor = FLOOR**2 * stacked.shape[1]
        return float((count * mean - length) / ((count - 1) * length.clamp(min=floor)))

    def _correlations(self, image: int, others: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The best correlation of an image's window in each of other images, (n,), and where it is, (n,)."""
        sums = self.sums[image, ::STRIDE, ::STRIDE]
        row, column = divmod(int(sums.argmax()), sums.shape[1])
        top, left = row * STRIDE, column * STRIDE
        window = self.details[image, :, top : top + WINDOW, left : left + WINDOW]
        spectrum = torch.fft.rfft2(window, s=(SIDE, SIDE)).conj()
        products = torch.fft.irfft2((self.spectra[list(others)] * spectrum).sum(1), s=(SIDE, SIDE))
        valid = products[:, : SIDE - WINDOW + 1, : SIDE - WINDOW + 1]  # windows that do not wrap around
        scores = valid / (self.norms[list(others)] * max(float(window.norm()), self.floor))
        best = scores.flatten(1).max(1)
        return best.values, best.indices


def blurred(images: Tensor) -> Tensor:
    """Images (n, 3, h, w) after a Gaussian filter."""
    reach = round(3 * BLUR)
    kernel = torch.exp(-torch.arange(-reach, reach + 1).float().square() / (2 * BLUR**2))
    kernel = kernel / kernel.sum()
    padded = F.pad(images, (reach,) * 4, mode="replicate").flatten(0, 1)[:, None]
    return F.conv2d(F.conv2d(padded, kernel[None, None, None]), kernel[None, None, :, None]).view(images.shape)


def _sample(images: Sequence[int] | NDArray[np.int64], most: int) -> list[int]:
    """At most so many, evenly spaced."""
    if len(images) <= most:
        return [int(image) for image in images]
    return [int(images[place]) for place in np.linspace(0, len(images) - 1, most).round().astype(int)]
