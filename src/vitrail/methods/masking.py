"""What mask methods share: one image at a time, token maps as image masks, sums over masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.operations import Walk
from vitrail.engine.noise import Kind, noise
from vitrail.engine.scheduler import Asking, Request, Scorer, together
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method
from vitrail.models.view import View
from vitrail.models.vit import ViT

SEEDS = (-(2**63), 2**64)  # those that torch takes
MASKS_AT_ONCE = {"cpu": 64, "cuda": 256}  # at image size

Explained = Asking[tuple[Tensor, dict[str, Tensor]]]


@dataclass(kw_only=True)
class MaskMethod(Method):
    """A method that asks the model about many variants of one image; several images are asked about together."""

    no_aggregation: ClassVar[str] = "a mask method has no layers"

    def __post_init__(self) -> None:
        super().__post_init__()
        seed = getattr(self, "seed", 0)
        if not SEEDS[0] <= seed < SEEDS[1]:
            raise VitrailError(f"seed must be a whole number of at most 64 bits, but got {seed}.")

    def explain_one(self, image: Tensor, target: Tensor, against: Tensor | None) -> Explained:
        """The map of one image (1, 3, H, W) and, by name, what was measured (0-d tensors)."""
        raise NotImplementedError

    def scorer(self, target: Tensor, against: Tensor | None, output: str) -> Scorer:
        rival = None if against is None else int(against)
        return Scorer(view=self.model, target=int(target), against=rival, output=output, name=self.info.name)

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        rivals = [None] * len(images) if against is None else list(against.split(1))
        each = zip(images.split(1), target.split(1), rivals, strict=True)
        chunks: list[int] = []
        found = together([self.explain_one(*one) for one in each], chunks)
        names = found[0][1]
        extras = {name: torch.stack([values[name].to(images.device) for _, values in found]) for name in names}
        if chunks:
            extras["chunk"] = torch.full((len(images),), min(chunks), device=images.device)
        return Attribution(torch.stack([one for one, _ in found]), extras)


@dataclass(kw_only=True)
class SturdyMaskMethod(MaskMethod):
    """A method whose maps keep their ranks when scores are rounded: it averages many, and takes no small differences.

    ``precision="auto"`` lets a GPU score in bf16, final norm, head and logits excepted; "full" keeps the model's own.
    """

    precision: Literal["auto", "full"] = "auto"

    def scorer(self, target: Tensor, against: Tensor | None, output: str) -> Scorer:
        return replace(super().scorer(target, against, output), reduced=self.precision == "auto")


def weighted_sum(scores: Tensor, make: Callable[[slice], Tensor], size: tuple[int, int]) -> Tensor:
    """Σ s_k M_k (H, W) with the masks made chunk by chunk, (m, H, W)."""
    total, chunk = scores.new_zeros(size), MASKS_AT_ONCE.get(scores.device.type, 64)
    for start in range(0, len(scores), chunk):
        part = slice(start, min(start + chunk, len(scores)))
        total += torch.einsum("k,khw->hw", scores[part], make(part).to(scores.dtype))
    return total


def upsampled(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """(K, h, w) → (K, H, W), bilinear."""
    return F.interpolate(maps[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def patch_features(view: View, image: Tensor, layer: str) -> Tensor:
    """(D, h, w): of a ViT the last first norm's output or the last attention's; of others the second-to-last stage."""
    from vitrail.models.hierarchical import Hierarchical

    if isinstance(view, Hierarchical):
        if layer != "norm1":
            raise VitrailError(
                f'layer="{layer}" needs the tokens of a ViT, which {view.name} does not have: leave layer at "norm1", '
                "which stands for its second-to-last stage."
            )
        with torch.no_grad():
            return view.features(image)[0]
    assert isinstance(view, ViT)
    parts = view.architecture()
    *below, last = parts.blocks
    with torch.inference_mode():
        walk = Walk(parts)
        x = walk.embed(image)
        for number, block in enumerate(below):
            x = walk.block(x, block, number)
        x = walk.norm(x, last.norm1, len(below))
        if layer == "attention":
            x = walk.attention(x, x, last.attention, len(below))
    return x[0, walk.prefix :].T.unflatten(1, view.grid).clone()  # no longer of inference mode


def drawn(kind: Kind, like: Tensor, part: slice, seed: int) -> Tensor:
    """Noise shaped like ``like`` (1, …) for the masks ``part``: it depends on a mask's number, not on the chunks."""
    return noise(kind, like.shape[1:], range(part.start, part.stop), seed, like.device).to(like.dtype)


def score_token_sets(scorer: Scorer, view: ViT, image: Tensor, present: Tensor) -> Asking[Tensor]:
    """(M,): the scores with only the patches of each set (M, N) present; sets of one size go together.

    Nothing present is the prefix tokens alone or, where the head pools patches, the mean-colour image.
    """
    with torch.no_grad():
        tokens = view.embed(image)
    sizes = present.sum(1)
    groups = {size: (sizes == size).nonzero()[:, 0] for size in sizes.unique().tolist()}

    def asked(size: int, rows: Tensor) -> Request:
        if size == 0 and view.pools_patches:
            return scorer.images(1, lambda _: torch.zeros_like(image))
        return scorer.subsets(tokens, present[rows].to(torch.int8).topk(size, dim=1).indices)

    found = yield [asked(size, rows) for size, rows in groups.items()]
    scores = torch.cat([own.expand(len(rows)) for own, rows in zip(found, groups.values(), strict=True)])
    return torch.empty_like(scores).index_copy_(0, torch.cat([*groups.values()]), scores)
