"""TIS: Transformer Input Sampling (Englebert et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.kmeans import kmeans
from vitrail.engine.scheduler import Pictures, Scorer
from vitrail.engine.trace import trace
from vitrail.errors import VitrailError
from vitrail.methods.base import TokenMethod
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import Explained, SturdyMaskMethod, drawn
from vitrail.methods.registry import method
from vitrail.show.heatmap import min_max


@method("tis", family="mask", signed=False, cost=(513, 0), protocols=("default", "authors", "tis"), paper="TIS")
@dataclass(kw_only=True)
class Tis(TokenMethod, SturdyMaskMethod):
    """Mean score of the token subsets that hold a token; subsets are clusters of the network's own activations.

    ``ratio``: the share of patches kept, or several. ``space="pixels"`` fills the dropped patches with noise instead of
    removing them (the authors' ablation). ``protocol="authors"`` or "tis" adds their min–max.
    """

    version: ClassVar[int] = 2

    output: Output = "probability"
    masks: int = 1024
    ratio: float | tuple[float, ...] = 0.5
    space: Literal["tokens", "pixels"] = "tokens"
    seed: int = 0
    protocol: Literal["default", "authors", "tis"] = "default"

    def explain_one(self, image: Tensor, target: Tensor, against: Tensor | None) -> Explained:
        centroids = self.centroids(image)
        patches = centroids.shape[1]
        kept = [centroids.topk(count, dim=1).indices for count in self.counts(patches)]  # (masks, count) per ratio
        scorer = self.scorer(target, against, self.output)
        with torch.no_grad():
            tokens = self.vit.embed(image)
        found = yield [
            scorer.subsets(tokens, keep) if self.space == "tokens" else self.painted(scorer, image, keep, i * len(keep))
            for i, keep in enumerate(kept)
        ]
        scores = torch.cat(found)
        chosen = torch.cat([indicator(keep, patches, scores.dtype) for keep in kept])  # (M, N)
        values, coverage = mean_score(chosen, scores)
        values = values.unflatten(0, self.vit.grid)
        least = coverage.min()
        extras = {"masks": scores.new_tensor(len(scores)), "least_coverage": least, "mean_score": scores.mean()}
        return values if self.protocol == "default" else min_max(values), extras

    def counts(self, patches: int) -> list[int]:
        """How many patches each ratio keeps."""
        ratios = self.ratio if isinstance(self.ratio, tuple | list) else (self.ratio,)
        if not ratios or not all(0 < ratio <= 1 and int(ratio * patches) for ratio in ratios):
            raise VitrailError(f"ratio must keep one to all of {patches} patches, but got {self.ratio}.")
        return [int(ratio * patches) for ratio in ratios]

    def centroids(self, image: Tensor) -> Tensor:
        """(masks, N): clusters of the outputs of all blocks, each channel one point; all channels if they are few."""
        if self.masks < 1:
            raise VitrailError(f"masks must be at least 1, but got {self.masks}.")
        depth = self.vit.num_layers
        found = trace(self.vit, image, keep={"x"}, layers=range(1, depth + 1))
        streams = torch.cat([found["x"][layer][0, found.num_prefix :] for layer in range(1, depth + 1)], dim=1)
        points = streams.T.to(torch.promote_types(streams.dtype, torch.float32))  # (L·d, N)
        return points if self.masks >= len(points) else kmeans(points, self.masks, self.seed)

    def painted(self, scorer: Scorer, image: Tensor, keep: Tensor, first: int) -> Pictures:
        """The images whose dropped patches are uniform noise, drawn anew for each mask; ``first``: masks before."""
        rows, columns = self.vit.grid

        def make(part: slice) -> Tensor:
            mask = indicator(keep[part], rows * columns, image.dtype).view(-1, 1, rows, columns)
            mask = F.interpolate(mask, size=image.shape[-2:], mode="nearest")
            own = slice(first + part.start, first + part.stop)
            return image * mask + drawn("uniform", image, own, self.seed) * (1 - mask)

        return scorer.images(len(keep), make)


def indicator(keep: Tensor, patches: int, dtype: torch.dtype) -> Tensor:
    """Patch numbers (M, k) → ones at them (M, patches)."""
    return torch.zeros(len(keep), patches, dtype=dtype, device=keep.device).scatter_(1, keep, 1)


def mean_score(chosen: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """(N,): the mean score of the masks (M, N) that hold a token, the mean of all where none does; and the coverage."""
    coverage = chosen.sum(0)
    total = scores @ chosen
    return torch.where(coverage > 0, total / coverage.clamp(min=1), scores.mean()), coverage
