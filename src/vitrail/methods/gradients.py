"""Methods that read gradients of the residual stream, of attention, or of the pixels."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.engine.noise import noise
from vitrail.engine.requests import Asking, Batch, Logits, Pictures, PixelGradients, check_finite, concurrently
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method
from vitrail.methods.layerwise import LayerMap, Layerwise, Mixing, Output, Rule, input_x_gradient
from vitrail.methods.registry import method
from vitrail.models.view import View
from vitrail.samples import SAMPLES, open_sample
from vitrail.targets import Target


@dataclass(kw_only=True)
class GradientMethod(Layerwise):
    """A layerwise method with a choice of rule and of what is differentiated."""

    rule: Rule = "plain"
    output: Output = "logit"


@method("gradient", family="gradient", paper="Simonyan et al. 2014")
@dataclass(kw_only=True)
class Gradient(GradientMethod):
    """Gradient of the tokens: its length, or its sum over channels.

    The sum (SkipPLUS's VanillaGrad) is zero but for rounding wherever LayerNorms remove the mean of every token.
    """

    start_layer: int = 0
    reduce: Literal["sum", "l2"] = "l2"

    keep: ClassVar[frozenset[str]] = frozenset({"gx"})

    def cancels(self, layers: Iterable[int]) -> bool:
        return self.reduce == "sum"

    def scores(self, trace: Trace, layer: int) -> Tensor:
        gradient = trace["gx"][layer]
        return gradient.sum(-1) if self.reduce == "sum" else gradient.norm(dim=-1)


@method("input_x_gradient", family="gradient", signed=True, paper="Shrikumar et al. 2016")
@dataclass(kw_only=True)
class InputXGradient(GradientMethod):
    """Tokens times their gradient, summed over channels; rule="frozen" is LibraGrad."""

    start_layer: int = 0

    def cancels(self, layers: Iterable[int]) -> bool:
        """At the last block most tokens count only through a LayerNorm, which ignores their length: Euler's zero."""
        return list(layers) == [self.model.num_layers - 1]


@method("full_grad", family="gradient", signed=True, paper="Srinivas & Fleuret 2019")
@dataclass(kw_only=True)
class FullGrad(GradientMethod):
    """Input × gradient and every bias × its gradient; complete under rule="frozen"."""

    start_layer: int = 0

    keep: ClassVar[frozenset[str]] = frozenset({"x", "gx", "bias"})

    def scores(self, trace: Trace, layer: int) -> Tensor:
        biases = [shares for l, shares in trace.bias.items() if l >= layer]
        return input_x_gradient(trace, layer) + torch.stack(biases).sum(0)

    def extras(self, trace: Trace, layers: Iterable[int]) -> dict[str, Tensor]:
        """The gap of completeness, zero only under rule="frozen", and then how the score splits."""
        assert trace.pooled_bias is not None
        shares = [(self.scores(trace, layer), trace.pooled_bias) for layer in layers]
        gap = completeness_gap(trace, shares)
        return gap | score_split(trace, shares) if self.rule == "frozen" else gap


@method("full_grad_plus", family="gradient", signed=True, paper="SkipPLUS, eq. 5")
@dataclass(kw_only=True)
class FullGradPlus(GradientMethod):
    """Input × gradient of every layer and every bias × its gradient, each bias once."""

    keep: ClassVar[frozenset[str]] = frozenset({"x", "gx", "bias"})

    def layers(self) -> range:
        return self.all_layers(0)

    def scores(self, trace: Trace, layer: int) -> Tensor:
        return input_x_gradient(trace, layer) + trace.bias[layer]

    def closing(self, trace: Trace) -> Tensor:
        return trace.bias[trace.num_layers]


@method("att_ixg", family="gradient", signed=True, paper="AttCAT, Qiang et al. 2022")
@dataclass(kw_only=True)
class AttentionIxG(GradientMethod):
    """Input × gradient, weighted by the attention that each token receives; ``att_cat`` is its sum over layers.

    ``pairing="input"`` (AttCAT) weighs the input of a block with that block's attention, ``"output"`` its output
    (``protocol="skipplus"``, where the last block drops out).
    """

    start_layer: int = 0
    pairing: Literal["input", "output"] | None = None
    protocol: Literal["default", "skipplus"] = "default"

    keep: ClassVar[frozenset[str]] = frozenset({"x", "gx", "A"})

    @property
    def shift(self) -> int:
        pairing = self.pairing or ("output" if self.protocol == "skipplus" else "input")
        return int(pairing == "output")

    def specs(self, layers: Iterable[int]) -> Sequence[TraceSpec]:
        layers = list(layers)
        return super().specs(sorted({*layers, *(layer + self.shift for layer in layers)}))

    def cancels(self, layers: Iterable[int]) -> bool:
        """As ``input_x_gradient``; the layers are those whose attention or stream is read."""
        depth = self.model.num_layers
        return list(layers) == list(range(depth - 1 - self.shift, depth))

    def all_layers(self, start: int) -> range:
        return range(start, max(start + 1, self.model.num_layers - self.shift))

    def scores(self, trace: Trace, layer: int) -> Tensor:
        received = trace["A"][layer].mean((1, 2))  # AttnFrom: over heads and all query rows
        return received * input_x_gradient(trace, layer + self.shift)


@method("attention_gradient", family="gradient", paper="SkipPLUS, figure 8")
@dataclass(kw_only=True)
class AttentionGradient(LayerMap):
    """Gradient of the attention weights, averaged over heads, in the row that the head reads."""

    reduce: Literal["mean", "abs", "relu"] = "mean"
    rule: Rule = "plain"
    output: Output = "logit"

    keep: ClassVar[frozenset[str]] = frozenset({"G"})
    mixing: ClassVar[Mixing] = "half_raw"

    def layers(self) -> range:
        return range(self.model.num_layers - 1, self.model.num_layers)

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        gradient = trace["G"][layer]
        if self.reduce == "abs":
            gradient = gradient.abs()
        elif self.reduce == "relu":
            gradient = gradient.clamp(min=0)
        return gradient.mean(1)


@dataclass(kw_only=True)
class PixelGradient(Method):
    """A method that reads gradients of the pixels, image by image."""

    rule: Rule = "plain"
    output: Output = "logit"

    bears_half: ClassVar[bool] = True
    no_aggregation: ClassVar[str] = "it explains pixels, not layers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule != "plain" and not self.model.has_tokens:
            raise VitrailError(f'rule="{self.rule}" needs tokens and blocks, which {self.model.name} does not have.')

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        logits = yield Logits(batch, self.reduced)
        check_finite(self.model, logits)
        target = target.resolved(self.model, logits)
        scores = target.score(self.model, logits, self.output)
        askers = [self.explain_one(image, target.row(i), scores[i]) for i, image in enumerate(batch.images.split(1))]
        results = yield from concurrently(askers)
        extras = {name: torch.stack([values[name] for _, values in results]) for name in results[0][1]}
        return Attribution(torch.stack([values for values, _ in results]), extras)

    def explain_one(self, image: Tensor, target: Target, score: Tensor) -> Asking[tuple[Tensor, dict[str, Tensor]]]:
        """The map of one image (1, 3, H, W) with this score and, by name, what was measured (0-d tensors)."""
        raise NotImplementedError

    def gradients(
        self,
        count: int,
        make: Callable[[slice], Tensor],
        fold: Callable[[Tensor, slice], Tensor],
        target: Target,
    ) -> PixelGradients:
        """The sum of what ``fold`` makes of the gradients at ``count`` images."""
        return PixelGradients(
            view=self.model,
            count=count,
            make=make,
            fold=fold,
            target=target,
            rule=self.rule,
            output=self.output,
            reduced=self.reduced,
            name=self.info.name,
        )


@method(
    "integrated_gradients",
    signed=True,
    family="gradient",
    level="pixel",
    needs="logits",
    cost=(50, 50),
    paper="Sundararajan et al. 2017",
)
@dataclass(kw_only=True)
class IntegratedGradients(PixelGradient):
    """Gradients along the way from the mean colour to the image, times the way; adds up to the change of the score."""

    steps: int = 50
    protocol: Literal["default", "tis"] = "default"

    def explain_one(self, image: Tensor, target: Target, score: Tensor) -> Asking[tuple[Tensor, dict[str, Tensor]]]:
        if self.steps < 1:
            raise VitrailError(f"steps must be at least 1, but got {self.steps}.")
        nodes, shares = np.polynomial.legendre.leggauss(self.steps)  # Gauss–Legendre on [−1, 1], moved to [0, 1]
        places, weights = (torch.from_numpy(values / 2).to(image) for values in (nodes + 1, shares))
        gradients = self.gradients(
            self.steps,
            lambda part: image * places[part, None, None, None],
            lambda gradient, part: torch.einsum("k,kchw->chw", weights[part], gradient),
            target,
        )
        baseline = Pictures(
            view=self.model,
            count=1,
            length=self.model.num_tokens,
            reading=target.reading(self.output),
            about=target.about,
            name=self.info.name,
            products=self.products,
            make=lambda _: torch.zeros_like(image),
        )
        total, start = yield [gradients, baseline]
        contributions = total * image[0]
        gap = (contributions.sum() - (score - start[0])).abs() / score.abs().clamp(min=1)
        split = {"score": score, "score_patches": contributions.sum(), "score_baseline": start[0]}
        return contributions.sum(0), {"completeness_gap": gap, **split}


class References(str):
    """Images (k, 3, H, W) that stand in parameters, captions and tables as text: their number and a hash."""

    images: Tensor

    @classmethod
    def of(cls, images: Tensor, model: View) -> References:
        """Checked and in the model's precision."""
        try:
            images = model.check_images(images, model.precision).detach().clone()
        except VitrailError as error:
            raise VitrailError(f"references: {error}") from None
        if not len(images) or not images.isfinite().all():
            raise VitrailError("references must be at least one image, and their values finite.")
        digest = hashlib.sha256(images.cpu().contiguous().numpy().data).hexdigest()
        references = cls(f"{len(images)} image{'s' * (len(images) > 1)}, {digest[:8]}")
        references.images = images
        return references


@method(
    "expected_gradients",
    signed=True,
    family="gradient",
    level="pixel",
    needs="logits",
    cost=(55, 50),
    paper="Erion et al. 2021",
)
@dataclass(kw_only=True)
class ExpectedGradients(PixelGradient):
    """Gradients at random places on the way from reference images to the image, times the way; the mean over draws.

    The expected sum is the score minus the mean score of the references. ``references``: preprocessed images (k, 3, H,
    W), None = the pictures that come with vitrail. All are drawn equally often but for one draw, in an order by
    ``seed``, and the places of a reference are stratified.
    """

    samples: int = 50
    references: Tensor | References | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.references, Tensor):
            self.references = References.of(self.references, self.model)
        elif not isinstance(self.references, References | None):
            raise VitrailError(
                "references must be a tensor (k, 3, H, W) of preprocessed images, which can be passed in Python only, "
                f"but got {self.references!r}."
            )
        super().__post_init__()

    @functools.cached_property
    def images(self) -> Tensor:
        """The references (k, 3, H, W)."""
        if isinstance(self.references, References):
            return self.references.images
        pictures = torch.stack([self.model.preprocess(open_sample(file)) for file in SAMPLES])
        return self.model.check_images(pictures, self.model.precision)

    def explain_one(self, image: Tensor, target: Target, score: Tensor) -> Asking[tuple[Tensor, dict[str, Tensor]]]:
        if self.samples < 1:
            raise VitrailError(f"samples must be at least 1, but got {self.samples}.")
        references = self.images[self.order()].to(image)

        def between(part: slice) -> Tensor:
            rows, places = self.draws(part)
            return references[rows] + places.to(image)[:, None, None, None] * (image - references[rows])

        def contributions(gradient: Tensor, part: slice) -> Tensor:
            rows, _ = self.draws(part)
            return ((image - references[rows]) * gradient).sum((0, 1)) / self.samples

        baselines = Pictures(
            view=self.model,
            count=len(references),
            length=self.model.num_tokens,
            reading=target.reading(self.output),
            about=target.about,
            products=self.products,
            name="",  # the bar is that of the gradients
            make=lambda part: references[part],
        )
        values, starts = yield [self.gradients(self.samples, between, contributions, target), baselines]
        start = starts[self.draws(slice(0, self.samples))[0]].mean()
        gap = (values.sum() - (score - start)).abs() / score.abs().clamp(min=1)
        split = {"score": score, "score_patches": values.sum(), "score_baseline": start}
        return values, {"completeness_gap": gap, **split}

    def order(self) -> Tensor:
        """The references that are drawn, by number."""
        keys = noise("uniform", (len(self.images),), range(1), self.seed, torch.device("cpu"))
        return keys[0].argsort()[: self.samples]

    def draws(self, part: slice) -> tuple[Tensor, Tensor]:
        """The reference of each draw, by place in the order, and α.

        With m draws of a reference, its α are uniform in the m equal parts of [0, 1]: unbiased for every reference.
        """
        count = min(self.samples, len(self.images))
        numbers = torch.arange(part.start, part.stop)
        rows = numbers % count
        draws_of_row = (self.samples - 1 - rows) // count + 1
        jitter = noise("uniform", (), range(part.start + 1, part.stop + 1), self.seed, torch.device("cpu"))
        return rows, (numbers // count + jitter) / draws_of_row


@method(
    "smooth_grad",
    signed=False,
    family="gradient",
    level="pixel",
    needs="logits",
    cost=(50, 50),
    paper="Smilkov et al. 2017",
)
@dataclass(kw_only=True)
class SmoothGrad(PixelGradient):
    """Mean absolute gradient of the pixels under noise.

    ``sigma``: deviation of the noise in normalised colours; None = 0.15 of each image's range, or 1 under
    ``protocol="tis"``. Every image gets the same noises, so that a map does not depend on its company.
    """

    samples: int = 50
    sigma: float | None = None
    seed: int = 0
    protocol: Literal["default", "tis"] = "default"

    def explain_one(self, image: Tensor, target: Target, score: Tensor) -> Asking[tuple[Tensor, dict[str, Tensor]]]:
        if self.samples < 1 or (self.sigma or 0) < 0:
            raise VitrailError(f"samples ≥ 1 and sigma ≥ 0 are needed, but got {self.samples} and {self.sigma}.")
        draw = torch.Generator().manual_seed(self.seed)
        noises = [torch.randn(image.shape[1:], generator=draw, dtype=torch.float32) for _ in range(self.samples)]
        deviation = self.deviation(image)

        def noisy(part: slice) -> Tensor:
            return image + deviation * torch.stack(noises[part]).to(image)

        total = yield self.gradients(self.samples, noisy, lambda gradient, _: gradient.abs().sum(0), target)
        return (total / self.samples).sum(0), {}

    def deviation(self, image: Tensor) -> Tensor | float:
        if self.sigma is not None:
            return self.sigma
        return 1.0 if self.protocol == "tis" else 0.15 * (image.max() - image.min())


def completeness_gap(trace: Trace, shares: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The largest |y − shares| over the layers, relative to max(1, |y|); ``shares`` as in ``score_split``."""
    tokens, biases = (torch.stack(parts) for parts in zip(*shares, strict=True))
    gaps = trace.y - tokens.sum(-1) - biases
    return {"completeness_gap": gaps.abs().amax(0) / trace.y.abs().clamp(min=1)}


def score_split(trace: Trace, shares: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """How y splits into patches, prefix tokens and biases: the mean over layers, each of which holds the whole score.

    ``shares``: those of the tokens (B, n) and of the biases (B,) of each layer.
    """
    tokens, biases = (torch.stack(parts).mean(0) for parts in zip(*shares, strict=True))
    return {
        "score": trace.y,
        "score_patches": tokens[:, trace.num_prefix :].sum(1),
        "score_prefix": tokens[:, : trace.num_prefix].sum(1),
        "score_biases": biases,
        "score_layers": torch.full_like(trace.y, len(shares)),
    }
