"""Shapley values of the patches, by permutations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.engine.noise import noise
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import TokenMethod
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import Explained, MaskMethod, Subject, tokens_spec
from vitrail.methods.registry import method

FEWEST = 4  # permutations: two pairs, for an error


@method("shapley", family="mask", signed=True, cost=(1568, 0), paper="Castro et al. 2009")
@dataclass(kw_only=True)
class Shapley(TokenMethod, MaskMethod):
    """Shapley values of the patches: what a patch adds to the score of those before it, over random permutations.

    Unbiased; ``error`` is the standard error. Patches are removed from the network's input, and the values add up to
    the score of the image minus that of no patch at all. ``permutations``: every second is the reverse of the one
    before.
    """

    permutations: int = 16
    output: Output = "probability"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.permutations < FEWEST or self.permutations % 2:
            raise VitrailError(f"permutations must be even and at least {FEWEST}, but got {self.permutations}.")

    def needs(self) -> Sequence[TraceSpec]:
        return [tokens_spec(self.model)]

    def explain_one(self, subject: Subject) -> Explained:
        rows, columns = self.model.grid
        places = self.places(rows * columns).to(subject.image.device)
        count, patches = places.shape
        before = torch.arange(1, patches, device=places.device)[:, None]
        present = (places[:, None] < before).flatten(0, 1)  # the first 1, 2, … N − 1 patches of each permutation
        ends = torch.tensor([[False], [True]], device=places.device).expand(2, patches)
        scores = yield from self.scorer(subject, self.output).token_sets(torch.cat([ends, present]))
        (empty, full), inner = scores[:2], scores[2:].view(count, patches - 1)
        curves = torch.cat([empty.expand(count, 1), inner, full.expand(count, 1)], 1)
        added = curves.diff(dim=1).gather(1, places)  # (permutations, N): what each patch adds
        pairs = added.unflatten(0, (-1, 2)).mean(1)
        error = pairs.std(0).clamp(min=torch.finfo(pairs.dtype).tiny) / len(pairs) ** 0.5
        values = pairs.mean(0)
        split = {"score": full, "score_patches": values.sum(), "score_baseline": empty}
        return values.view(rows, columns), split, error.view(rows, columns)

    def places(self, patches: int) -> Tensor:
        """(permutations, N): the place of each patch, 0 = first. The first rows do not depend on their number."""
        drawn = noise("uniform", (patches,), range(self.permutations // 2), self.seed, torch.device("cpu"))
        forth = drawn.argsort(1).argsort(1)
        return torch.stack([forth, patches - 1 - forth], 1).flatten(0, 1)
