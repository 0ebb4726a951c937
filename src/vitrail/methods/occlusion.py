"""Black-box rivals of TIS and ViT-CX: RISE, Occlusion, Score-CAM, and AtMan, which mutes tokens inside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.ops import Walk
from vitrail.engine.rules import Plain, attention_scores, softmax
from vitrail.engine.scoring import Reading, Request, Scorer, first_chunk, joined, picture_length, size
from vitrail.errors import VitrailError
from vitrail.methods.base import TokenMethod
from vitrail.methods.layerwise import Output
from vitrail.methods.masking import (
    Explained,
    MaskMethod,
    SturdyMaskMethod,
    patch_features,
    score_token_sets,
    upsampled,
    weighted_sum,
)
from vitrail.methods.registry import method
from vitrail.methods.vit_cx import scaled
from vitrail.models.view import View
from vitrail.models.vit import ViT
from vitrail.progress import counted

Space = Literal["pixels", "tokens"]


def needs_tokens(method: MaskMethod) -> ViT:
    if not isinstance(method.model, ViT):
        raise VitrailError(f'space="tokens" needs tokens, which {method.model.name} does not have: use space="pixels".')
    return method.model


def refuse_paint(baseline: float) -> None:
    if baseline != 0:
        raise VitrailError(f'baseline is for space="pixels" only: tokens are removed, not painted; got {baseline}.')


@method(
    "rise",
    family="mask",
    signed=False,
    level="pixel",
    needs="logits",
    cost=(4000, 0),
    protocols=("default", "authors", "rise", "tis"),
    paper="Petsiuk et al. 2018",
)
@dataclass(kw_only=True)
class Rise(SturdyMaskMethod):
    """Mean of random smooth masks, weighted by the score of the image seen through them.

    ``ratio``: the share of cells kept. ``space="tokens"`` removes random patches instead of darkening pixels. None
    stands for the protocol's values: 4000 masks of 8×8 cells, half kept; "authors" and "rise": 6000, a tenth kept;
    "tis": 4000, a tenth kept, scored by logits. Every image gets the same masks.
    """

    masks: int | None = None
    cells: int = 8
    ratio: float | None = None
    output: Output | None = None
    space: Space = "pixels"
    seed: int = 0
    protocol: Literal["default", "authors", "rise", "tis"] = "default"

    def explain_one(self, image: Tensor, target: Tensor, against: Tensor | None) -> Explained:
        count = self.masks if self.masks is not None else 6000 if self.protocol in ("authors", "rise") else 4000
        share = self.ratio if self.ratio is not None else 0.5 if self.protocol == "default" else 0.1
        output = self.output or ("logit" if self.protocol == "tis" else "probability")
        if count < 1 or self.cells < 1 or not 0 < share <= 1:
            raise VitrailError(f"masks, cells ≥ 1 and 0 < ratio ≤ 1 are needed; got {count}, {self.cells}, {share}.")
        scorer = self.scorer(target, against, output)
        if self.space == "tokens":
            return (yield from self._by_tokens(scorer, image, count, share))
        masks = SmoothMasks(count, self.cells, share, image, self.seed)
        scores = yield scorer.images(count, lambda part: image * masks(part)[:, None].to(image.dtype))
        weighted = weighted_sum(scores, masks, masks.size)
        return weighted / (count * share), {"masks": scores.new_tensor(count), "mean_score": scores.mean()}

    def _by_tokens(self, scorer: Scorer, image: Tensor, count: int, share: float) -> Explained:
        view = needs_tokens(self)
        if self.cells != self.parameters()["cells"]:
            raise VitrailError(f'cells is for space="pixels" only: patches are removed one by one; got {self.cells}.')
        patches = view.grid[0] * view.grid[1]
        draw = torch.Generator().manual_seed(self.seed)
        chosen = (torch.rand((count, patches), generator=draw, dtype=torch.float32) < share).to(image.device)
        scores = yield from score_token_sets(scorer, view, image, chosen)
        values = (scores @ chosen.to(scores.dtype)) / (count * share)
        extras = {"masks": scores.new_tensor(count), "mean_score": scores.mean()}
        return values.unflatten(0, view.grid), extras


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

    def explain_one(self, image: Tensor, target: Tensor, against: Tensor | None) -> Explained:
        scorer = self.scorer(target, against, self.output)
        size = (image.shape[-2], image.shape[-1]) if self.space == "pixels" else needs_tokens(self).grid
        window = self.window if self.window is not None else min(1 if self.space == "tokens" else 16, *size)
        stride = self.stride if self.stride is not None else window
        if not 1 <= stride <= window <= min(size):
            raise VitrailError(f"1 ≤ stride ≤ window ≤ {min(size)} is needed, but got {stride} and {window}.")
        if self.space == "tokens":
            return (yield from self._by_tokens(scorer, image, window, stride))
        return self._by_pixels(scorer, image, window, stride), {}

    def _by_pixels(self, scorer: Scorer, image: Tensor, window: int, stride: int) -> Tensor:
        from captum.attr import Occlusion as Captum

        channels, *sides = image.shape[1:]
        windows = math.prod(len(starts(side, window, stride)) for side in sides)
        with torch.no_grad(), counted(1 + windows, scorer.name) as bar:

            def score(images: Tensor) -> Tensor:
                found = scorer.score(self.model.logits(images))
                bar.update(len(images))
                return found

            found = Captum(score).attribute(
                image,
                (channels, window, window),
                (channels, stride, stride),
                self.baseline,
                perturbations_per_eval=first_chunk(self.model, picture_length(self.model)),
            )
        return found[0].mean(0)

    def _by_tokens(self, scorer: Scorer, image: Tensor, window: int, stride: int) -> Explained:
        view = needs_tokens(self)
        refuse_paint(self.baseline)
        corners = list(product(*(starts(side, window, stride) for side in view.grid)))
        hidden = torch.zeros(len(corners), *view.grid, dtype=torch.bool, device=image.device)
        for i, (top, left) in enumerate(corners):
            hidden[i, top : top + window, left : left + window] = True
        flat = hidden.flatten(1)
        sets = torch.cat([torch.ones_like(flat[:1]), ~flat])
        scores = yield from score_token_sets(scorer, view, image, sets)
        drops = scores[0] - scores[1:]
        covered = flat.to(drops.dtype)
        return ((drops @ covered) / covered.sum(0)).unflatten(0, view.grid), {}


def starts(side: int, window: int, stride: int) -> range:
    """Where windows begin along a side; the last one may reach over its end."""
    return range(0, stride * (1 + math.ceil((side - window) / stride)), stride)


@method(
    "score_cam", family="mask", signed=False, level="pixel", needs="features", cost=(768, 0), paper="Wang et al. 2020"
)
@dataclass(kw_only=True)
class ScoreCam(SturdyMaskMethod):
    """Feature maps weighted by the score of the image seen through them.

    ``variant="eq1"``: probabilities times masks (ViT-CX, equation 1). ``"library"``: pytorch-grad-cam, softmax over the
    channels of the logits, raw features, ReLU, min–max.
    """

    output: Output | None = None  # None = probability, of the library variant the logit
    layer: Literal["norm1", "attention"] = "norm1"
    variant: Literal["eq1", "library"] = "eq1"

    def explain_one(self, image: Tensor, target: Tensor, against: Tensor | None) -> Explained:
        size = (image.shape[-2], image.shape[-1])
        features = patch_features(self.model, image, self.layer)
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        output = self.output or ("logit" if self.variant == "library" else "probability")
        scorer = self.scorer(target, against, output)
        if self.variant == "library":
            scores = yield scorer.images(
                len(features), lambda part: image * library_masks(features[part], size)[:, None]
            )
            cam = torch.einsum("d,dhw->hw", scores.to(features.dtype).softmax(0), features).clamp(min=0)
            return library_scale(upsampled(library_scale(cam)[None], size)[0]), {"mean_score": scores.mean()}
        coarse = scaled(features, size)

        def make(part: slice) -> Tensor:
            return upsampled(coarse[part], size)

        scores = yield scorer.images(len(coarse), lambda part: image * make(part)[:, None].to(image.dtype))
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

    def attend(self, q: Tensor, k: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        scores = attention_scores(q, k, scale, bias)
        scores = scores - scores.amin(-1, keepdim=True)
        return softmax(scores * self.factors[:, None, None, -k.shape[2] :], q.dtype)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None) -> Tensor:
        return self.mix(self.attend(q, k, scale, bias), v)


@dataclass(kw_only=True)
class MutedTokens(Request):
    """x_0 ``tokens`` (1, n, d) with the attention scores of each key times its factor (M, n)."""

    tokens: Tensor
    factors: Tensor

    @staticmethod
    def inputs(pieces: Sequence[tuple[MutedTokens, slice]]) -> tuple[Tensor, ...]:
        tokens = joined([request.tokens.expand(size(part), -1, -1) for request, part in pieces])
        return tokens, joined([request.factors[part] for request, part in pieces])

    def logits(self, *inputs: Tensor) -> Tensor:
        assert isinstance(self.view, ViT)
        tokens, factors = inputs
        return Walk(self.view.architecture(), Muted(factors)).encode(tokens)


@dataclass(frozen=True)
class Surprise(Reading):
    """−log p of a class, minus that of the class it is opposed to."""

    opposed: bool = False

    def __call__(self, view: View, logits: Tensor, about: Tensor) -> Tensor:
        surprise = -view.log_probabilities(logits).gather(1, about)
        return surprise[:, 0] - surprise[:, 1] if self.opposed else surprise[:, 0]


@method("atman", family="mask", signed=True, cost=(196, 0), paper="Deb et al. 2023")
@dataclass(kw_only=True)
class AtMan(TokenMethod, MaskMethod):
    """Rise of the cross-entropy when a patch, and the patches like it, are muted in every attention.

    ``factor``: what is left of the scores of a muted patch. ``threshold``: patches whose embeddings are at least this
    similar are muted too, by as much as they are similar; None = the patch alone.
    """

    factor: float = 0.1
    threshold: float | None = 0.6

    def explain_one(self, image: Tensor, target: Tensor, against: Tensor | None) -> Explained:
        if not self.factor >= 0:
            raise VitrailError(f"factor must be at least 0, but got {self.factor}.")
        view = self.vit
        with torch.no_grad():
            tokens = view.embed(image)
        factors = F.pad(self.factors(tokens[0], view.num_prefix), (0, 0, 1, 0), value=1.0)  # the first mutes nothing
        surprise = yield MutedTokens(
            view=view,
            count=len(factors),
            length=tokens.shape[1] * 4,  # the attention maps are held
            reading=Surprise(against is not None),
            about=(int(target),) if against is None else (int(target), int(against)),
            name=self.info.name,
            tokens=tokens,
            factors=factors,
        )
        return (surprise[1:] - surprise[0]).unflatten(0, view.grid), {}

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
