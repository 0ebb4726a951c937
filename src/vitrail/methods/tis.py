"""TIS: Transformer Input Sampling (Englebert et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.kmeans import kmeans
from vitrail.engine.maps import min_max
from vitrail.engine.requests import Pictures
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import TokenMethod
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import Explained, MaskMethod, Scorer, Space, Subject, drawn
from vitrail.methods.registry import method


@method("tis", family="mask", signed=False, cost=(513, 0), paper="TIS")
@dataclass(kw_only=True)
class Tis(TokenMethod, MaskMethod):
    """Mean score of the token subsets that hold a token; subsets are clusters of the network's own activations.

    ``ratio``: the share of patches kept, or several. ``space="pixels"`` fills the dropped patches with noise instead of
    removing them (the authors' ablation). ``protocol="authors"`` or "tis" adds their min–max.
    """

    version: ClassVar[int] = 2
    bears_bf16: ClassVar[bool] = True

    output: Output = "probability"
    masks: int = 1024
    ratio: float | tuple[float, ...] = 0.5
    space: Space = "tokens"
    seed: int = 0
    protocol: Literal["default", "authors", "tis"] = "default"

    def needs(self) -> Sequence[TraceSpec]:
        if self.masks < 1:
            raise VitrailError(f"masks must be at least 1, but got {self.masks}.")
        return [TraceSpec.of({"x"}, range(self.model.num_layers + 1))]

    def explain_one(self, subject: Subject) -> Explained:
        centroids = self.centroids(subject)
        patches = centroids.shape[1]
        kept = [centroids.topk(count, dim=1).indices for count in self.counts(patches)]  # (masks, count) per ratio
        scorer = self.scorer(subject, self.output)
        answers = yield [
            scorer.subsets(keep) if self.space == "tokens" else self.painted(scorer, keep, i * len(keep))
            for i, keep in enumerate(kept)
        ]
        scores = torch.cat(answers)
        chosen = torch.cat([indicator(keep, patches, scores.dtype) for keep in kept])  # (M, N)
        values, coverage = mean_score(chosen, scores)
        values = values.unflatten(0, self.model.grid)
        extras = {
            "masks": scores.new_tensor(len(scores)),
            "least_coverage": coverage.min(),
            "mean_score": scores.mean(),
        }
        return values if self.protocol == "default" else min_max(values), extras

    def counts(self, patches: int) -> list[int]:
        """How many patches each ratio keeps."""
        ratios = self.ratio if isinstance(self.ratio, tuple | list) else (self.ratio,)
        if not ratios or not all(0 < ratio <= 1 and int(ratio * patches) for ratio in ratios):
            raise VitrailError(f"ratio must keep one to all of {patches} patches, but got {self.ratio}.")
        return [int(ratio * patches) for ratio in ratios]

    def centroids(self, subject: Subject) -> Tensor:
        """(masks, N): clusters of the outputs of all blocks, each channel one point; all channels if they are few."""
        trace = subject.trace
        assert trace is not None
        outputs = [trace["x"][layer][subject.row, trace.num_prefix :] for layer in range(1, trace.num_layers + 1)]
        points = torch.cat(outputs, dim=1).T  # (L·d, N)
        points = points.to(torch.promote_types(points.dtype, torch.float32))
        return points if self.masks >= len(points) else kmeans(points, self.masks, self.seed)

    def painted(self, scorer: Scorer, keep: Tensor, first: int) -> Pictures:
        """The images whose dropped patches are uniform noise, drawn anew for each mask; ``first``: masks before."""
        (rows, columns), image = self.model.grid, scorer.subject.image

        def make(part: slice) -> Tensor:
            mask = indicator(keep[part], rows * columns, image.dtype).view(-1, 1, rows, columns)
            mask = F.interpolate(mask, size=image.shape[-2:], mode="nearest")
            numbers = slice(first + part.start, first + part.stop)
            return image * mask + drawn("uniform", image, numbers, self.seed) * (1 - mask)

        return scorer.pictures(len(keep), make)


def indicator(keep: Tensor, patches: int, dtype: torch.dtype) -> Tensor:
    """Patch numbers (M, k) → ones at them (M, patches)."""
    return torch.zeros(len(keep), patches, dtype=dtype, device=keep.device).scatter_(1, keep, 1)


def mean_score(chosen: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """(N,): the mean score of the masks (M, N) that hold a token, the mean of all where none does; and the coverage."""
    coverage = chosen.sum(0)
    total = scores @ chosen
    return torch.where(coverage > 0, total / coverage.clamp(min=1), scores.mean()), coverage
