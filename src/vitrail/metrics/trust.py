"""Trust: a score of a single map, from the network's own answers in fewer than a hundred forward passes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.requests import Asking
from vitrail.errors import VitrailError
from vitrail.methods.masking import Space
from vitrail.metrics.base import Case, average
from vitrail.metrics.presence import ask_present
from vitrail.metrics.statistics import correlation
from vitrail.targets import ClassScore

REMOVED = 0.1  # the share of patches that is taken out
RANDOM = 16  # random sets of that size
SUBSETS = 64  # with which the map is compared
KEPT = 0.4  # the share of patches in each of them
BLOBS = 4  # the subsets are blobs: noise on a grid of this size, enlarged and cut at a threshold
PASSES = 2 + RANDOM + SUBSETS
COST = 1 + (1 + RANDOM) * (1 - REMOVED) + SUBSETS * KEPT  # in forward passes of the whole image
SEED = 0


@dataclass(frozen=True)
class Trust:
    """What the network says about a map.

    ``score`` in [0, 1] is the mean of two parts: how much more the top tenth of the patches takes away than a random
    tenth, relative to what is left then, and ``agreement``.
    """

    score: float
    drop: float  # fall of the probability without the top tenth of the patches
    random_drop: float  # without a random tenth
    agreement: float  # correlation of the map's sum over a subset of patches with the probability it gives
    interval: tuple[float, float]  # of the agreement, 95 %
    patch_share: float | None  # the part of the score that is on patches; None where the method does not say
    probability: float  # of the whole image

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Trust:
        """From the content of a JSON file."""
        low, high = saved["interval"]
        return cls(**{**saved, "interval": (low, high)})

    def words(self, name: str) -> str:
        """The result as text; ``name``: the class that the probability is of."""
        before, top, random = (f"{max(0.0, self.probability - fall):.0%}" for fall in (0, self.drop, self.random_drop))
        agreement, low, high = (f"{value:.2f}".replace("-", "−") for value in (self.agreement, *self.interval))
        text = (
            f"{self.score:.2f} – removing the top {REMOVED:.0%} of patches takes {name} from {before} to {top}, a "
            f"random {REMOVED:.0%} to {random}; agreement with {SUBSETS} subsets {agreement} [{low}, {high}]"
        )
        return text if self.patch_share is None else f"{text}; {self.patch_share:.0%} of the score is on patches"


def ask_trust(case: Case, against: int | None = None, patch_share: float | None = None) -> Asking[Trust]:
    """Asks the network about one map; a contrast is about the probability of the target against its rival."""
    values = case.on_grid.flatten().cpu()
    cells, generator = len(values), torch.Generator().manual_seed(SEED)
    removed = max(1, round(REMOVED * cells))
    if cells - removed < 1:
        raise VitrailError(f"trust needs at least two patches, but {case.view.name} has {cells}: use --no-trust.")
    order = values.argsort(descending=True, stable=True)
    shuffled = torch.rand(RANDOM, cells, generator=generator).argsort(dim=1)
    without = torch.cat([order[None, removed:], shuffled[:, removed:]])
    kept = max(1, round(KEPT * cells))
    subsets = _blobs(case.view.cells, generator).topk(kept, dim=1).indices
    present = torch.zeros(1 + len(without) + len(subsets), cells, dtype=torch.bool)
    present[0] = True
    present[1 : 1 + len(without)].scatter_(1, without, True)
    present[1 + len(without) :].scatter_(1, subsets, True)
    probabilities = (yield from _probabilities(case, against, present)).double().cpu()
    whole, top, random = float(probabilities[0]), float(probabilities[1]), average(probabilities[2 : 2 + RANDOM])
    agreement = correlation(values.double()[subsets].sum(1), probabilities[-SUBSETS:])
    removal = min(1.0, max(0.0, (random - top) / random)) if random > 0 else 0.0
    return Trust(
        score=(removal + max(0.0, agreement)) / 2,
        drop=whole - top,
        random_drop=whole - random,
        agreement=agreement,
        interval=_fisher(agreement, SUBSETS),
        patch_share=patch_share,
        probability=whole,
    )


def _probabilities(case: Case, against: int | None, present: Tensor) -> Asking[Tensor]:
    """(M,): the probability with only the cells of each mask ``present`` (M, N)."""
    space: Space = "tokens" if case.view.has_tokens else "pixels"
    masks = present.unflatten(1, case.view.cells)
    if against is None:
        return (yield from ask_present(case, masks, space, ClassScore("probability"), (case.target,), "trust"))
    contrast = ClassScore("logit", contrast=True)
    return (yield from ask_present(case, masks, space, contrast, (case.target, against), "trust")).sigmoid()


def _blobs(cells: tuple[int, int], generator: torch.Generator) -> Tensor:
    """(SUBSETS, N): smooth noise; what is above a threshold is a subset of a few connected regions."""
    coarse = torch.randn(SUBSETS, 1, BLOBS, BLOBS, generator=generator)
    return F.interpolate(coarse, size=cells, mode="bicubic", align_corners=False).flatten(1)


def _fisher(agreement: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a correlation, by Fisher's transformation."""
    middle, half = math.atanh(max(-0.999999, min(0.999999, agreement))), 1.96 / math.sqrt(count - 3)
    return math.tanh(middle - half), math.tanh(middle + half)
