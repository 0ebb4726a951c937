"""greedy: the order of regions that a search for the best curve finds, as a ceiling for all maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from vitrail.engine.maps import regions
from vitrail.engine.requests import Asking, concurrently
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import TokenMethod
from vitrail.methods.masking import Explained, MaskMethod, Scorer, Subject, tokens_spec
from vitrail.methods.registry import method
from vitrail.progress import counted

ROUND = 16  # regions that are asked about together


# The cost is the most of 49 regions: 2,452 subsets, half as long as the image on average.
@method("greedy", family="control", signed=False, cost=(1226, 0), paper="vitrail")
@dataclass(kw_only=True)
class Greedy(TokenMethod, MaskMethod):
    """Order in which regions are best inserted or deleted, by greedy search: a ceiling of the curves, no explanation.

    It optimises what insertion or deletion measure, with tokens removed, and says nothing about how the network
    decides: use it to see how much of what is attainable a map attains. The search starts once from no region and once
    from all of them, and the better order counts. ``cells``: patches along the side of a region.
    """

    curve: Literal["insertion", "deletion"] = "insertion"
    cells: int = 2

    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cells < 1:
            raise VitrailError(f"cells must be at least 1, but got {self.cells}.")

    def needs(self) -> Sequence[TraceSpec]:
        return [tokens_spec(self.model)]

    def explain_one(self, subject: Subject) -> Explained:
        regions = self.regions().to(subject.image.device)  # (R, N)
        scorer = replace(self.scorer(subject, "probability"), name="")  # the bar is that of the search
        bar = counted(2 * len(regions), self.info.name, "region")
        with bar:
            chains = yield from concurrently([self.chain(scorer, regions, grows, bar) for grows in (True, False)])
        best = max(chains, key=lambda chain: chain.total)
        order = best.order if self.curve == "insertion" else best.order[::-1]
        places = torch.tensor(order).argsort().to(regions.device)
        values = (len(regions) - places).to(subject.logits.dtype) @ regions.to(subject.logits.dtype)
        asked = sum(chain.asked for chain in chains)
        return values.view(self.model.grid), {"subsets": subject.logits.new_tensor(asked)}

    def regions(self) -> Tensor:
        """(R, N): the patches of each region."""
        return regions(self.model.grid, self.cells)

    def chain(self, scorer: Scorer, regions: Tensor, grows: bool, bar: Any) -> Asking[Chain]:
        """Subsets, each the one before and another region, whose scores are large for insertion, small for deletion.

        ``grows``: from no region to all of them, else the other way. Each step takes the region with the largest
        change; changes known from earlier steps only decide which regions are asked about first, and when to stop.
        """
        sign = 1 if self.curve == "insertion" else -1
        present = torch.full_like(regions[0], not grows)
        gains = torch.full((len(regions),), torch.inf, dtype=torch.float64)
        score = sign * float((yield from scorer.token_sets(present[None]))[0])
        order, total, asked = list[int](), score, 1
        while len(order) < len(regions):
            fresh = torch.zeros(len(regions), dtype=torch.bool)
            while True:
                stale = gains.masked_fill(fresh, -torch.inf)
                known = gains.masked_fill(~fresh, -torch.inf)
                if fresh.any() and known.max() >= stale.max():
                    break
                count = min(ROUND, len(regions) - len(order) - int(fresh.sum()))
                chosen = stale.topk(count).indices
                changed = regions[chosen.to(regions.device)]
                sets = present | changed if grows else present & ~changed
                answers = (yield from scorer.token_sets(sets)).double().cpu()
                asked += count
                gains[chosen] = sign * answers - score
                fresh[chosen] = True
            best = int(known.argmax())
            score += float(gains[best])
            total += score
            present = present | regions[best] if grows else present & ~regions[best]
            gains[best] = -torch.inf
            order.append(best)
            bar.update()
        return Chain(order if grows else order[::-1], total, asked)


class Chain(NamedTuple):
    """The regions in the order in which the subsets grow, the signed sum of their scores, and how many were asked."""

    order: list[int]
    total: float
    asked: int
