"""Methods that read gradients of the residual stream, of attention, or of the pixels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.engine.sharing import Wish
from vitrail.engine.trace import Trace
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method
from vitrail.methods.layerwise import LayerMap, Layerwise, Output, Rule
from vitrail.methods.registry import method
from vitrail.models.view import View
from vitrail.models.vit import ViT
from vitrail.progress import counted, shown


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
        return list(layers) == [self.vit.num_layers - 1]

    def scores(self, trace: Trace, layer: int) -> Tensor:
        return input_x_gradient(trace, layer)


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
        """The largest gap between y and its shares, relative to max(1, |y|); zero only under rule="frozen"."""
        return {"completeness_gap": completeness_gap(trace, layers)}


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


@method("att_ixg", family="gradient", signed=True, protocols=("default", "skipplus"), paper="AttCAT, Qiang et al. 2022")
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

    def wish_for(self, layers: Iterable[int]) -> Wish:
        return super().wish_for(sorted(set(layers) | {layer + self.shift for layer in layers}))

    def cancels(self, layers: Iterable[int]) -> bool:
        """As ``input_x_gradient``; the layers are those whose attention or stream is read."""
        depth = self.vit.num_layers
        return list(layers) == list(range(depth - 1 - self.shift, depth))

    def all_layers(self, start: int) -> range:
        return range(start, max(start + 1, self.vit.num_layers - self.shift))

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
    mixing: ClassVar[Literal["half", "half_raw", "add", "none"]] = "half_raw"

    def layers(self) -> range:
        return range(self.vit.num_layers - 1, self.vit.num_layers)

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        gradient = trace["G"][layer]
        match self.reduce:
            case "mean":
                return gradient.mean(1)
            case "abs":
                return gradient.abs().mean(1)
            case "relu":
                return gradient.clamp(min=0).mean(1)


@dataclass(kw_only=True)
class PixelGradient(Method):
    """captum's gradient methods on the pixels, through the view."""

    rule: Rule = "plain"
    output: Output = "logit"

    no_aggregation: ClassVar[str] = "it explains pixels, not layers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule != "plain" and not isinstance(self.model, ViT):
            raise VitrailError(f'rule="{self.rule}" needs tokens and blocks, which {self.model.name} does not have.')

    def score(self, against: Tensor | None) -> Score:
        return Score(self.model, self.rule, self.output, against)


@dataclass
class Score:
    """The explained number as a function of pixels and target, as captum calls it."""

    view: View
    rule: str
    output: str
    against: Tensor | None

    def __call__(self, images: Tensor, target: Tensor) -> Tensor:
        from vitrail.engine.ops import Walk
        from vitrail.engine.rules import get_rule

        if isinstance(self.view, ViT):
            walk = Walk(self.view.architecture(), get_rule(self.rule))
            logits = walk.encode(walk.embed(images))
        else:
            logits = self.view.logits(images)
        rival = None if self.against is None else self.against.repeat(len(images) // len(self.against))
        return self.view.score(logits, target, rival, self.output)


@method(
    "integrated_gradients",
    signed=True,
    family="gradient",
    level="pixel",
    needs="logits",
    cost=(50, 50),
    protocols=("default", "tis"),
    paper="Sundararajan et al. 2017",
)
@dataclass(kw_only=True)
class IntegratedGradients(PixelGradient):
    """Gradients along the way from the mean colour to the image, times the way; adds up to the change of the score."""

    steps: int = 50
    protocol: Literal["default", "tis"] = "default"

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        from captum.attr import IntegratedGradients as Captum

        if self.steps < 1:
            raise VitrailError(f"steps must be at least 1, but got {self.steps}.")
        maps, gaps = [], []
        total = len(images) * self.steps
        with torch.inference_mode(False), torch.enable_grad(), counted(total, self.info.name, "step") as bar:
            for i in range(len(images)):  # captum scales every image at once: one by one bounds the memory
                one = slice(i, i + 1)
                score = self.score(None if against is None else against[one])

                def step(scaled: Tensor, own: Tensor, score: Score = score) -> Tensor:
                    bar.update(len(scaled) if torch.is_grad_enabled() else 0)  # the two ends are asked for without
                    return score(scaled, own)

                found, gap = Captum(step).attribute(
                    images[one].clone(),
                    n_steps=self.steps,
                    method="gausslegendre",
                    internal_batch_size=8,
                    additional_forward_args=(target[one],),
                    return_convergence_delta=True,
                )
                maps.append(found.sum(1))
                with torch.no_grad():
                    gaps.append(gap.abs() / score(images[one], target[one]).abs().clamp(min=1))
        return Attribution(torch.cat(maps), {"completeness_gap": torch.cat(gaps)})


@method(
    "smooth_grad",
    signed=False,
    family="gradient",
    level="pixel",
    needs="logits",
    cost=(50, 50),
    protocols=("default", "tis"),
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

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        from captum.attr import Saliency

        if self.samples < 1 or (self.sigma or 0) < 0:
            raise VitrailError(f"samples ≥ 1 and sigma ≥ 0 are needed, but got {self.samples} and {self.sigma}.")
        saliency, total = Saliency(self.score(against)), torch.zeros_like(images)
        draw = torch.Generator().manual_seed(self.seed)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in shown(range(self.samples), self.info.name):
                noise = torch.randn(images.shape[1:], generator=draw, dtype=torch.float32).to(images)
                noisy = (images + self.deviation(images) * noise).requires_grad_()
                total += saliency.attribute(noisy, additional_forward_args=(target,))
        return Attribution((total / self.samples).sum(1))

    def deviation(self, images: Tensor) -> Tensor | float:
        if self.sigma is not None:
            return self.sigma
        if self.protocol == "tis":
            return 1.0
        return 0.15 * (images.amax((1, 2, 3), keepdim=True) - images.amin((1, 2, 3), keepdim=True))


def input_x_gradient(trace: Trace, layer: int) -> Tensor:
    """(B, n): Σ_k x_jk g_jk at the input of a block."""
    return (trace["x"][layer] * trace["gx"][layer]).sum(-1)


def completeness_gap(trace: Trace, layers: Iterable[int]) -> Tensor:
    """(B,): the largest |y − shares − biases| over the layers, relative to max(1, |y|)."""
    gaps = [trace.y - input_x_gradient(trace, layer).sum(1) - trace.bias_from(layer) for layer in layers]
    return torch.stack(gaps).abs().amax(0) / trace.y.abs().clamp(min=1)
