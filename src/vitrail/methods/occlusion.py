"""Black-box rivals of TIS and ViT-CX: RISE, Occlusion, Score-CAM, and AtMan, which mutes tokens inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.operations import Walk
from vitrail.core.parts import Architecture
from vitrail.core.rules import Plain, attention_scores, softmax
from vitrail.engine.maps import upsampled
from vitrail.engine.requests import Variants, joined, size
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import TokenMethod
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import (
    Explained,
    MaskMethod,
    Space,
    Subject,
    features_of,
    features_spec,
    refuse_baseline,
    tokens_spec,
    weighted_sum,
)
from vitrail.methods.registry import method
from vitrail.methods.vit_cx import scaled
from vitrail.models.view import View
from vitrail.targets import Reading, at_least_single


@method("rise", family="mask", signed=False, level="pixel", needs="logits", cost=(4000, 0), paper="Petsiuk et al. 2018")
@dataclass(kw_only=True)
class Rise(MaskMethod):
    """Mean of random smooth masks, weighted by the score of the image seen through them.

    ``ratio``: the share of cells kept. ``space="tokens"`` removes random patches instead of darkening pixels. None
    stands for the protocol's values: 4000 masks of 8×8 cells, a quarter kept (the paper's text keeps half:
    ``ratio=0.5``); "authors" and "rise": 6000, a tenth kept; "tis": 4000, a tenth kept, scored by logits. Every image
    gets the same masks.
    """

    masks: int | None = None
    cells: int = 8
    ratio: float | None = None
    output: Output | None = None
    space: Space = "pixels"
    seed: int = 0
    protocol: Literal["default", "authors", "rise", "tis"] = "default"

    version: ClassVar[int] = 2
    bears_bf16: ClassVar[bool] = True

    def explain_one(self, subject: Subject) -> Explained:
        count = self.masks if self.masks is not None else 6000 if self.protocol in ("authors", "rise") else 4000
        share = self.ratio if self.ratio is not None else 0.25 if self.protocol == "default" else 0.1
        output = self.output or ("logit" if self.protocol == "tis" else "probability")
        if count < 1 or self.cells < 1 or not 0 < share <= 1:
            raise VitrailError(f"masks, cells ≥ 1 and 0 < ratio ≤ 1 are needed; got {count}, {self.cells}, {share}.")
        scorer, image = self.scorer(subject, output), subject.image
        if self.space == "tokens":
            chosen = self.token_masks(count, share).to(image.device)
            scores = yield from scorer.token_sets(chosen)
            values = (scores @ chosen.to(scores.dtype)).unflatten(0, self.model.grid)
        else:
            masks = SmoothMasks(count, self.cells, share, image, self.seed)
            scores = yield scorer.pictures(count, lambda part: image * masks(part)[:, None].to(image.dtype))
            values = weighted_sum(scores, masks, masks.size)
        return values / (count * share), {"masks": scores.new_tensor(count), "mean_score": scores.mean()}

    def token_masks(self, count: int, share: float) -> Tensor:
        """(M, N): which patches are present."""
        if self.cells != self.parameters()["cells"]:
            raise VitrailError(f'cells is for space="pixels" only: patches are removed one by one; got {self.cells}.')
        draw, (rows, columns) = torch.Generator().manual_seed(self.seed), self.model.grid
        return torch.rand((count, rows * columns), generator=draw, dtype=torch.float32) < share


class SmoothMasks:
    """RISE's masks (m, H, W), made when they are asked for: random grids, enlarged, at random offsets."""

    def __init__(self, count: int, cells: int, share: float, image: Tensor, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.size, self.cells = (image.shape[-2], image.shape[-1]), cells
        dtype = torch.promote_types(image.dtype, torch.float32)
        self.grids = (torch.rand((count, cells, cells), generator=draw, dtype=torch.float32) < share).to(
            image.device, dtype
        )
        self.cell = [math.ceil(length / cells) for length in self.size]
        self.offsets = [torch.randint(cell, (count,), generator=draw).to(image.device) for cell in self.cell]

    def __call__(self, part: slice) -> Tensor:
        rows, columns = (self._axis(axis, part) for axis in (0, 1))  # (m, H, cells), (m, W, cells)
        return torch.einsum("mhc,mcd,mwd->mhw", rows, self.grids[part], columns)

    def _axis(self, axis: int, part: slice) -> Tensor:
        """Bilinear weights of each pixel of each mask; beyond the outer cells the grid is mirrored."""
        whole = (self.cells + 1) * self.cell[axis]
        cells = torch.arange(self.cells).to(self.grids)
        pixel = torch.arange(self.size[axis]).to(self.grids) + self.offsets[axis][part, None]
        place = ((pixel + 0.5) * self.cells / whole - 0.5).abs()
        place = torch.where(place > self.cells - 1, 2 * (self.cells - 1) - place, place).clamp(0, self.cells - 1)
        return (1 - (place[..., None] - cells).abs()).clamp(min=0)


@method(
    "occlusion", family="mask", signed=True, level="pixel", needs="logits", cost=(196, 0), paper="Zeiler & Fergus 2014"
)
@dataclass(kw_only=True)
class Occlusion(MaskMethod):
    """Fall of the score when a window is painted over, averaged over the windows that cover a pixel.

    ``window``, ``stride``: pixels (None = 16, at most the image) or, with ``space="tokens"``, patches (None = 1), which
    are then removed. ``baseline``: the normalised colour painted; 0 is the mean colour.
    """

    output: Output = "probability"
    window: int | None = None
    stride: int | None = None
    baseline: float = 0.0
    space: Space = "pixels"

    def explain_one(self, subject: Subject) -> Explained:
        sides = subject.size if self.space == "pixels" else self.model.grid
        window = self.window if self.window is not None else min(1 if self.space == "tokens" else 16, *sides)
        stride = self.stride if self.stride is not None else window
        if not 1 <= stride <= window <= min(sides):
            raise VitrailError(f"1 ≤ stride ≤ window ≤ {min(sides)} is needed, but got {stride} and {window}.")
        rows, columns = (windows(side, window, stride).to(subject.image.device) for side in sides)
        scorer, image = self.scorer(subject, self.output), subject.image

        def hidden(part: slice) -> Tensor:
            """(m, rows, columns): what each window covers."""
            numbers = torch.arange(part.start, part.stop, device=image.device)
            return rows[numbers // len(columns)][:, :, None] & columns[numbers % len(columns)][:, None]

        count = len(rows) * len(columns)
        if self.space == "tokens":
            refuse_baseline(self.baseline)
            scores = yield from scorer.token_sets(~hidden(slice(0, count)).flatten(1))
        else:
            scores = yield scorer.pictures(
                count, lambda part: torch.where(hidden(part)[:, None], self.baseline, image).to(image.dtype)
            )
        # in the precision of the others: a difference of two precisions would shift the whole map
        whole = (yield scorer.pictures(1, lambda _: image)) if self.reduced else subject.score(self.model, self.output)
        drops = (whole - scores).unflatten(0, (len(rows), len(columns)))
        rows, columns = rows.to(drops.dtype), columns.to(drops.dtype)
        return (rows.T @ drops @ columns) / torch.outer(rows.sum(0), columns.sum(0)), {}


def windows(side: int, window: int, stride: int) -> Tensor:
    """(windows, side): what each window covers along a side; the last one may reach over its end."""
    starts = torch.arange(1 + math.ceil((side - window) / stride), device="cpu")[:, None] * stride
    place = torch.arange(side, device="cpu")
    return (place >= starts) & (place < starts + window)


@method(
    "score_cam", family="mask", signed=False, level="pixel", needs="features", cost=(768, 0), paper="Wang et al. 2020"
)
@dataclass(kw_only=True)
class ScoreCam(MaskMethod):
    """Feature maps weighted by the score of the image seen through them.

    ``variant="eq1"``: scores times masks (ViT-CX, equation 1, which has ``output="probability"``). ``"library"``:
    pytorch-grad-cam, softmax over the channels of the logits, raw features, ReLU, min–max.
    """

    output: Output = "logit"
    layer: Literal["norm1", "attention"] = "norm1"
    variant: Literal["eq1", "library"] = "eq1"

    version: ClassVar[int] = 2
    bears_bf16: ClassVar[bool] = True

    @property
    def products(self) -> torch.dtype | None:
        """None for the library's variant: its softmax over the channels magnifies what half precision rounds."""
        return None if self.variant == "library" else super().products

    def needs(self) -> Sequence[TraceSpec]:
        return [features_spec(self.model, self.layer)]

    def explain_one(self, subject: Subject) -> Explained:
        image, size = subject.image, subject.size
        features = features_of(subject, self.model, self.layer)
        scorer = self.scorer(subject, self.output)
        if self.variant == "library":
            scores = yield scorer.pictures(
                len(features), lambda part: image * library_masks(features[part], size)[:, None]
            )
            cam = torch.einsum("d,dhw->hw", scores.to(features.dtype).softmax(0), features).clamp(min=0)
            return library_scale(upsampled(library_scale(cam)[None], size)[0]), {"mean_score": scores.mean()}
        coarse = scaled(features, size)
        scores = yield scorer.pictures(
            len(coarse), lambda part: image * upsampled(coarse[part], size)[:, None].to(image.dtype)
        )
        weighted = torch.einsum("d,dhw->hw", scores, coarse.to(scores.dtype))  # enlarging is linear
        return upsampled(weighted[None], size)[0], {"mean_score": scores.mean()}


def library_masks(features: Tensor, size: tuple[int, int]) -> Tensor:
    """(D, H, W): corners aligned, each map to [0, 1] with the release's 1e-8."""
    masks = F.interpolate(features[:, None], size=size, mode="bilinear", align_corners=True)[:, 0]
    low, high = masks.amin((1, 2), keepdim=True), masks.amax((1, 2), keepdim=True)
    return (masks - low) / (high - low + 1e-8)


def library_scale(cam: Tensor) -> Tensor:
    shifted = cam - cam.min()
    return shifted / (1e-7 + shifted.max())


class Muted(Plain):
    """AtMan's attention: the scores of each row from 0 up, those of each key times its factor (B, n)."""

    name = "muted"

    def __init__(self, factors: Tensor):
        self.factors = factors

    def attend(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None, talk: Tensor | None = None) -> Tensor:
        scores = attention_scores(at_least_single(q), at_least_single(k), scale, bias, talk)
        scores = scores - scores.amin(-1, keepdim=True)
        return softmax(scores * self.factors[:, None, None, -k.shape[2] :], q.dtype)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        return self.mix(self.attend(q, k, scale, bias), v)


@dataclass(eq=False, kw_only=True)
class MutedTokens(Variants):
    """x_0 ``tokens`` (1, n, d) with the attention scores of each key times its factor (M, n)."""

    tokens: Tensor
    factors: Tensor

    @staticmethod
    def inputs(pieces: Sequence[tuple[MutedTokens, slice]]) -> tuple[Tensor, ...]:
        tokens = joined([request.tokens.expand(size(part), -1, -1) for request, part in pieces])
        return tokens, joined([request.factors[part] for request, part in pieces])

    def logits(self, parts: Architecture | None, *inputs: Tensor) -> Tensor:
        assert parts is not None
        tokens, factors = inputs
        return Walk(parts, Muted(factors)).encode(tokens)


@dataclass(frozen=True)
class Surprise(Reading):
    """−log p of a class, minus that of the class it is opposed to."""

    contrast: bool = False

    def __call__(self, view: View, logits: Tensor, about: Tensor) -> Tensor:
        surprise = -view.log_probabilities(logits).gather(1, about)
        return surprise[:, 0] - surprise[:, 1] if self.contrast else surprise[:, 0]


@method("atman", family="mask", signed=True, cost=(196, 0), paper="Deb et al. 2023")
@dataclass(kw_only=True)
class AtMan(TokenMethod, MaskMethod):
    """Rise of the cross-entropy when a patch, and the patches like it, are muted in every attention.

    ``factor``: what is left of the scores of a muted patch. ``threshold``: patches whose embeddings are at least this
    similar are muted too, by as much as they are similar; None = the patch alone.
    """

    factor: float = 0.1
    threshold: float | None = 0.6

    def needs(self) -> Sequence[TraceSpec]:
        if not self.factor >= 0:
            raise VitrailError(f"factor must be at least 0, but got {self.factor}.")
        return [tokens_spec(self.model)]

    def explain_one(self, subject: Subject) -> Explained:
        tokens, target = subject.tokens, subject.target
        factors = self.factors(tokens[0], self.model.num_prefix)
        factors = F.pad(factors, (0, 0, 1, 0), value=1.0)  # the first mutes nothing
        surprise = yield MutedTokens(
            view=self.model,
            count=len(factors),
            length=tokens.shape[1] * 4,  # the attention maps are held
            reading=Surprise(target.against is not None),
            about=target.about,
            name=self.info.name,
            products=self.products,
            tokens=tokens,
            factors=factors,
        )
        return (surprise[1:] - surprise[0]).unflatten(0, self.model.grid), {}

    def factors(self, tokens: Tensor, prefix: int) -> Tensor:
        """(N, n): the factor of each key when a patch is muted."""
        patches = tokens[prefix:]
        others = torch.ones(len(patches), len(patches), dtype=tokens.dtype, device=tokens.device)
        if self.threshold is not None:
            unit = F.normalize(patches, dim=-1)
            cosine = unit @ unit.T
            near = cosine >= max(self.threshold, 0.0)
            others = torch.where(near, (1 - self.factor) * (1 - cosine) + self.factor, others)
        return F.pad(others.fill_diagonal_(self.factor), (prefix, 0), value=1.0)
