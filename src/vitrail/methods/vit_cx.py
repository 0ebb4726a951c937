"""ViT-CX: causal explanation by clustered feature masks (Xie et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.engine.kmeans import means
from vitrail.engine.linkage import clustered
from vitrail.engine.maps import bilinear, upsampled
from vitrail.engine.requests import Asking
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import Explained, MaskMethod, Scorer, Subject, drawn, features_of, features_spec
from vitrail.methods.registry import method

RANDOM_MASKS = 5000  # of the paper's variant 2


@method("vit_cx", family="mask", signed=False, level="pixel", needs="features", cost=(130, 0), paper="ViT-CX")
@dataclass(kw_only=True)
class VitCx(MaskMethod):
    """Clusters of feature maps as masks, each scored by what it keeps and freed of the effect of its own artefacts.

    ``delta``: merge maps nearer than this (cosine distance; None = 0.1, for hierarchical models 0.05). ``sigma``:
    deviation of the noise outside a mask. The paper's variants: 1 ``cluster=False``; 2 ``source="random"``; 3
    ``debias=False``; 4 ``pcb=False``; 5 both. Cluster masks are stretched to [0, 1] again, as in the release that the
    published numbers come from; ``protocol="authors"`` also divides by their number. ``protocol="vit_cx"`` is the
    paper's text: masks are the plain means of their maps.
    """

    version: ClassVar[int] = 3

    output: Output = "probability"
    layer: Literal["norm1", "attention"] = "norm1"
    delta: float | None = None
    sigma: float = 0.1
    linkage: Literal["complete", "average", "single"] = "complete"
    cluster: bool = True
    source: Literal["features", "random"] = "features"
    debias: bool = True
    pcb: bool = True
    seed: int = 0
    protocol: Literal["default", "authors", "vit_cx"] = "default"

    def needs(self) -> Sequence[TraceSpec]:
        return [features_spec(self.model, self.layer)]

    def explain_one(self, subject: Subject) -> Explained:
        if not 0 <= self.sigma < float("inf"):
            raise VitrailError(f"sigma must be a number of at least 0, but got {self.sigma}.")
        size = subject.size
        coarse, similarity = self.masks(features_of(subject, self.model, self.layer), subject)
        scorer = self.scorer(subject, self.output)
        scores = yield from self.scores(scorer, lambda part: upsampled(coarse[part], size), len(coarse))
        grids = coarse.to(scores.dtype)
        weighted = torch.einsum("k,khw->hw", scores, grids)
        extras = {"masks": scores.new_tensor(len(scores)), "mean_score": scores.mean()}
        if similarity is not None:
            extras["mask_similarity"] = similarity
        values = divided(weighted, grids, size) if self.pcb else upsampled(weighted[None], size)[0]
        return values / (len(scores) if self.protocol == "authors" else 1), extras

    def masks(self, features: Tensor, subject: Subject) -> tuple[Tensor, Tensor | None]:
        """The masks before they are enlarged, (K, h, w); how similar the feature maps (D, h, w) are."""
        size = subject.size
        if self.source == "random":
            return self.random_grids(features.shape[1:], subject.image), None
        maps = scaled(features, size)
        similarity = similarities(maps, size)
        merged = means(maps.flatten(1), *self.clusters(similarity))[0].unflatten(1, maps.shape[1:])
        return merged if self.protocol == "vit_cx" else scaled(merged, size), mean_similarity(similarity)

    def clusters(self, similarity: Tensor) -> tuple[Tensor, int]:
        """(D,): the cluster of each map, merged only while the linkage distance stays below delta; their number."""
        count = len(similarity)
        if not self.cluster or count == 1:
            return torch.arange(count, device=similarity.device), count
        delta = self.delta if self.delta is not None else 0.1 if self.model.has_tokens else 0.05
        if not delta >= 0:
            raise VitrailError(f"delta must be at least 0, but got {delta}.")
        distance = 1 - (similarity + similarity.T).double() / 2
        return clustered(distance.clamp(min=0), delta, self.linkage)

    def random_grids(self, grid: Sequence[int], image: Tensor) -> Tensor:
        """Random binary grids of the size of the feature maps, half of the cells kept."""
        draw = torch.Generator().manual_seed(self.seed)
        return (torch.rand((RANDOM_MASKS, *grid), generator=draw, dtype=torch.float32) < 0.5).to(image)

    def scores(self, scorer: Scorer, make: Callable[[slice], Tensor], count: int) -> Asking[Tensor]:
        """s_k = p(x⊙M + ε) − p(x + ε) + p(x) with ε = (1−M)⊙Z_k, the same noise in both; or p(x⊙M) alone."""
        image = scorer.subject.image

        def masks(first: int, last: int) -> Tensor:
            return make(slice(first, last))[:, None].to(image.dtype)

        if not self.debias:
            return (yield scorer.pictures(count, lambda part: image * masks(part.start, part.stop)))

        def pairs(part: slice) -> Tensor:
            """Both images of each mask, one after the other: masks and noise are made once for the two."""
            first, last = part.start // 2, (part.stop + 1) // 2
            mask = masks(first, last)
            noise = (1 - mask) * self.sigma * drawn("normal", image, slice(first, last), self.seed)
            both = torch.stack([image * mask + noise, image + noise], dim=1).flatten(0, 1)
            return both[part.start - 2 * first : part.stop - 2 * first]

        both = yield scorer.pictures(2 * count, pairs)
        return both[0::2] - both[1::2] + scorer.subject.score(self.model, self.output)


def extremes(maps: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The smallest and largest value of each map (D, h, w) at image size.

    Between four cell centres an enlargement is bilinear: its extremes are at the corners of that patch of pixels.
    """
    rows, columns = (corners(n, m, maps.dtype, maps.device) for n, m in zip(maps.shape[1:], size, strict=True))
    values = (rows @ maps @ columns.T).flatten(1)
    return values.amin(1), values.amax(1)


def scaled(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps (D, h, w) that reach from 0 to 1 at image size; constant ones, which mask nothing, are left out.

    The weights of an enlargement sum to 1: scaled before is scaled after. A map's offset, which may be far larger than
    its range, is taken off first, so that nothing is rounded by it.
    """
    maps = maps - maps.amin((1, 2), keepdim=True)
    low, high = extremes(maps, size)
    live = high > low
    if not live.all():
        if not live.any():
            raise VitrailError("all feature maps are constant on this image: there is no mask.")
        maps, low, high = maps[live], low[live], high[live]
    return (maps - low[:, None, None]) / (high - low)[:, None, None]


def mean_similarity(similarity: Tensor) -> Tensor:
    """mSim: the mean over all pairs of two maps; a map alone is like itself."""
    count = len(similarity)
    pairs = similarity.sum() - similarity.diagonal().sum()
    return pairs / (count * (count - 1)) if count > 1 else similarity.mean()


def similarities(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """(D, D): cosine similarity of maps in [0, 1] at image size, computed on the grid: UᵀU is small."""
    flat = maps.flatten(1)  # (D, N)
    inner = flat @ products((maps.shape[1], maps.shape[2]), size, flat.dtype, flat.device) @ flat.T
    length = inner.diagonal().sqrt()
    return inner / (length[:, None] * length[None])


def divided(weighted: Tensor, grids: Tensor, size: tuple[int, int]) -> Tensor:
    """Σ s M / Σ M (H, W) of Σ s M (h, w) and the masks (K, h, w) on the grid; 0 where no mask covers a pixel.

    Where a mask is 0 it is so but for rounding, most of all that of the weights: they come from coordinates as long as
    the grid. A mean of masks that is not above that is 0.
    """
    values, coverage = upsampled(torch.stack([weighted / len(grids), grids.mean(0)]), size)
    covered = coverage > sum(grids.shape[1:]) * torch.finfo(grids.dtype).eps
    return torch.where(covered, values / torch.where(covered, coverage, 1), 0)


@lru_cache(maxsize=4)
def products(grid: tuple[int, int], size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """UᵀU (N, N) of the bilinear enlargement U of a grid of N cells."""
    rows, columns = (bilinear(n, m) for n, m in zip(grid, size, strict=True))
    return torch.kron(rows.T @ rows, columns.T @ columns).to(device, dtype)


@lru_cache(maxsize=16)
def corners(cells: int, pixels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(c, cells): the rows of ``bilinear`` that are first or last between two cell centres."""
    matrix = bilinear(cells, pixels)
    left = (matrix > 0).int().argmax(1)  # the centre before each pixel
    change = left.diff().bool()
    edge = torch.tensor([True])
    return matrix[torch.cat([edge, change]) | torch.cat([change, edge])].to(device, dtype)
