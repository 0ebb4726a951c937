"""Agreement: do the values of a map predict how far the score falls without the corresponding cells?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitrail.engine.maps import min_max
from vitrail.engine.requests import Asking
from vitrail.errors import VitrailError
from vitrail.methods.masking import Space
from vitrail.metrics.base import Case, MapMetric, Scored, check_seed, known, metric, tie_fraction
from vitrail.metrics.curves import even_counts, ranks
from vitrail.metrics.functional import functional
from vitrail.metrics.presence import ask_present
from vitrail.metrics.statistics import correlation, rank_correlation
from vitrail.targets import ClassScore


@metric("saco", family="agreement", higher_is_better=True, paper="Wu et al. 2024")
@dataclass(kw_only=True)
class Saco(MapMetric):
    """Whether groups of more salient pixels take away more of the class's probability, weighted by the salience gap.

    The pixels, sorted by salience, form ``groups`` of equal size, each of which is replaced on its own by the image's
    mean colour. ``space="tokens"``: groups of patches, removed from the sequence. 1 where every pair of groups is in
    the right order, −1 where none is; 0 for a constant map.
    """

    groups: int = 10
    space: Space = "pixels"
    seed: int = 0

    least: ClassVar = {"groups": 2}

    def ask(self, case: Case) -> Asking[Scored]:
        values = case.on_input if self.space == "pixels" else case.on_grid
        place = ranks(values, self.seed)
        edges = torch.tensor(even_counts(len(place), self.groups), device=place.device)
        member = torch.bucketize(place, edges[1:], right=True)
        absent = member == torch.arange(len(edges) - 1, device=place.device)[:, None]
        falls = yield from _falls(case, absent.unflatten(1, values.shape), self.space, "probability", self.info.name)
        salience = min_max(values.double()).flatten()  # of a constant map exactly 0
        means = absent.double() @ salience / absent.sum(1)
        return Scored(ordered_share(means, falls), extras={"ties": tie_fraction(values)})


def ordered_share(salience: Tensor, falls: Tensor) -> float:
    """Over pairs of groups (K,), by falling salience: the share of the gaps whose falls are in order, minus the rest.

    0 where there are no gaps.
    """
    first, second = torch.triu_indices(len(salience), len(salience), 1, device=salience.device)
    gaps = salience[first] - salience[second]
    agrees = falls[first] >= falls[second]
    total = gaps.sum()
    return float(torch.where(agrees, gaps, -gaps).sum() / total) if total > 0 else 0.0


@metric("idsds", family="agreement", higher_is_better=True, needs="tokens", paper="Hesse et al. 2024")
@dataclass(kw_only=True)
class Idsds(MapMetric):
    """Rank correlation of the map with the fall of the class's logit when each patch alone is removed.

    Patches of equal value share their mean rank; 0 for a constant map.
    """

    def ask(self, case: Case) -> Asking[Scored]:
        values = case.on_grid
        absent = torch.eye(values.numel(), dtype=torch.bool, device=values.device).unflatten(1, values.shape)
        falls = yield from known(case, self.call, _falls(case, absent, "tokens", "logit", self.info.name))
        return Scored(rank_correlation(values, falls))


@metric("faithfulness_correlation", family="agreement", higher_is_better=True, paper="Bhatt et al. 2020")
@dataclass(kw_only=True)
class FaithfulnessCorrelation(MapMetric):
    """Pearson correlation of the map's sum over random patches with the fall of the class's logit without them.

    ``runs`` subsets of ``subset``, a share of the patches (of 14 × 14 cells where a model has none), which get the
    image's mean colour. ``space="tokens"`` removes them from the sequence. 0 for a constant map.
    """

    subset: float = 0.2
    runs: int = 100
    space: Space = "pixels"
    seed: int = 0

    least: ClassVar = {"runs": 2}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.subset < 1:
            raise VitrailError(f"subset must be above 0 and below 1, a share of the patches, but got {self.subset}.")

    def ask(self, case: Case) -> Asking[Scored]:
        values = case.on_grid
        absent = random_subsets(values.numel(), self.subset, self.runs, self.seed).to(values.device)
        asking = _falls(case, absent.unflatten(1, values.shape), self.space, "logit", self.info.name)
        falls = yield from known(case, self.call, asking)
        sums = absent.double() @ min_max(values.double()).flatten()  # of a constant map exactly 0
        return Scored(correlation(sums, falls))


def random_subsets(cells: int, share: float, count: int, seed: int) -> Tensor:
    """(count, cells), bool: subsets of one size, at least one cell and never all of several."""
    size = min(max(1, round(share * cells)), max(1, cells - 1))
    generator = torch.Generator().manual_seed(check_seed(seed))
    drawn = torch.rand(count, cells, generator=generator, dtype=torch.float32)
    return torch.zeros(count, cells, dtype=torch.bool).scatter_(1, drawn.argsort(dim=1)[:, :size], True)


def _falls(case: Case, absent: Tensor, space: Space, output: str, name: str) -> Asking[Tensor]:
    """(M,): the fall of the class's score without the cells of each mask ``absent`` (M, rows, columns)."""
    present = torch.cat([torch.ones_like(absent[:1]), ~absent])
    scores = yield from ask_present(case, present, space, ClassScore(output), (case.target,), name)
    falls: Tensor = scores[0].double() - scores[1:].double()
    return falls.to(absent.device)


saco = functional(Saco)
idsds = functional(Idsds)
faithfulness_correlation = functional(FaithfulnessCorrelation)
