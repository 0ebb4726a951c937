"""greedy: the order of regions that a search for the best curve finds, as a ceiling for all maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from vitrail.engine.requests import Asking
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import TokenMethod
from vitrail.methods.masking import Explained, MaskMethod, Scorer, Subject, tokens_spec
from vitrail.methods.registry import method
from vitrail.progress import shown

ROUND = 16  # regions that are asked about together


# The cost is the most of 49 regions: 1,226 subsets, half as long as the image on average.
@method("greedy", family="control", signed=False, cost=(613, 0), paper="vitrail")
@dataclass(kw_only=True)
class Greedy(TokenMethod, MaskMethod):
    """Order in which regions are best inserted or deleted, by greedy search: a ceiling of the curves, no explanation.

    It optimises what insertion or deletion measure, with tokens removed, and says nothing about how the network
    decides: use it to see how much of what is attainable a map attains. ``cells``: patches along the side of a region.
    """

    curve: Literal["insertion", "deletion"] = "insertion"
    cells: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cells < 1:
            raise VitrailError(f"cells must be at least 1, but got {self.cells}.")

    def needs(self) -> Sequence[TraceSpec]:
        return [tokens_spec(self.model)]

    def explain_one(self, subject: Subject) -> Explained:
        regions = self.regions().to(subject.image.device)  # (R, N)
        scorer = replace(self.scorer(subject, "probability"), name="")  # the bar is that of the search
        order, asked = yield from self.search(scorer, regions)
        places = torch.tensor(order).argsort().to(regions.device)
        values = (len(regions) - places).to(subject.logits.dtype) @ regions.to(subject.logits.dtype)
        return values.view(self.model.grid), {"subsets": subject.logits.new_tensor(asked)}

    def regions(self) -> Tensor:
        """(R, N): the patches of each region."""
        rows, columns = (torch.arange(side, device="cpu") // self.cells for side in self.model.grid)
        numbers = (rows[:, None] * (columns.max() + 1) + columns).flatten()
        return torch.stack([numbers == number for number in numbers.unique()])

    def search(self, scorer: Scorer, regions: Tensor) -> Asking[tuple[list[int], int]]:
        """The regions in order, and how many subsets were asked about.

        Each step takes the region with the largest change; changes known from earlier steps only decide which regions
        are asked about first, and when to stop asking.
        """
        inserts = self.curve == "insertion"
        present = torch.full_like(regions[0], not inserts)
        gains = torch.full((len(regions),), torch.inf, dtype=torch.float64)
        score, order, asked = None, list[int](), 0
        for _ in shown(range(len(regions)), self.info.name, "region"):
            if score is None:
                score = float((yield from scorer.token_sets(present[None]))[0])
                asked += 1
            fresh = torch.zeros(len(regions), dtype=torch.bool)
            while True:
                stale = gains.masked_fill(fresh, -torch.inf)
                known = gains.masked_fill(~fresh, -torch.inf)
                if fresh.any() and known.max() >= stale.max():
                    break
                count = min(ROUND, len(regions) - len(order) - int(fresh.sum()))
                chosen = stale.topk(count).indices
                changed = regions[chosen.to(regions.device)]
                sets = present | changed if inserts else present & ~changed
                answers = (yield from scorer.token_sets(sets)).double().cpu()
                asked += count
                gains[chosen] = answers - score if inserts else score - answers
                fresh[chosen] = True
            best = int(known.argmax())
            score = score + float(gains[best]) if inserts else score - float(gains[best])
            present = present | regions[best] if inserts else present & ~regions[best]
            gains[best] = -torch.inf
            order.append(best)
        return order, asked
