"""Methods that weigh attention by gradients or relevance, and relevance carried back to tokens or pixels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.core.lrp import AlphaBeta, Epsilon, PublishedAlphaBeta
from vitrail.core.rules import Plain
from vitrail.engine.maps import min_max
from vitrail.engine.requests import Asking, Batch, PixelGradients, resolved
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, TokenMethod, TraceMethod
from vitrail.methods.layerwise import (
    LayerMap,
    Layerwise,
    Mixing,
    Output,
    OwnRollout,
    Rule,
    readout_row,
)
from vitrail.methods.registry import method
from vitrail.models.view import View
from vitrail.targets import Target


@method("attn_cam", family="attention", paper='Chefer et al. 2021 ("GradCAM")')
@dataclass(kw_only=True)
class AttentionCam(LayerMap):
    """Attention of the last layer, each head weighted by its mean gradient.

    ReLU and min–max follow, as in Chefer's release (``protocol="authors"``); ``protocol="signed"`` leaves them out, as
    the aggregated forms do.
    """

    rule: Rule = "plain"
    output: Output = "logit"
    protocol: Literal["default", "authors", "signed"] = "default"

    version: ClassVar[int] = 3
    aggregated_version: ClassVar[int | None] = 2
    keep: ClassVar[frozenset[str]] = frozenset({"A", "G"})
    aggregations: ClassVar[tuple[str, ...]] = ("plus", "skipplus")
    no_aggregation: ClassVar[str] = "no paper chains its layers"

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        """mean_h α_hi A_h[i, j]: every query i weighs the heads by its own mean gradient at the patches."""
        attention, gradient = trace["A"][layer], trace["G"][layer]
        unseen = trace.readout.shape[1] - attention.shape[-1]  # tokens that are no key of an attention pool
        weights = gradient[..., max(0, trace.num_prefix - unseen) :].mean(-1)  # (B, H, n)
        return torch.einsum("bhi,bhij->bij", weights, attention) / attention.shape[1]

    def read(self, *traces: Trace) -> Attribution:
        attribution = super().read(*traces)
        if self.protocol == "signed":
            return attribution
        return Attribution(torch.stack([min_max(values.clamp(min=0)) for values in attribution.map]))


@method("gen_att", family="relevance", signed=False, paper="Chefer et al. 2021b (Transformer-MM)")
@dataclass(kw_only=True)
class GenAtt(OwnRollout):
    """Product over the layers of identity + attention × its positive gradient, in the row that the head reads."""

    rule: Rule = "plain"
    output: Output = "logit"

    keep: ClassVar[frozenset[str]] = frozenset({"A", "G"})
    mixing: ClassVar[Mixing] = "add"

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        return (trace["A"][layer] * trace["G"][layer]).clamp_(min=0).mean(1)


@method("legrad", family="relevance", signed=False, cost=(1, 1), paper="Bousselham et al. 2025 (LeGrad)")
@dataclass(kw_only=True)
class LeGrad(Layerwise):
    """Positive gradients of attention, each layer's for the score that the head reads off it; the sum over layers.

    No gradient goes through later layers: they show what forms the class in a layer itself.
    """

    start_layer: int = 0
    rule: Rule = "plain"
    output: Output = "logit"

    keep: ClassVar[frozenset[str]] = frozenset({"G"})
    aggregations: ClassVar[tuple[str, ...]] = ("skipplus",)
    no_aggregation: ClassVar[str] = "it is a sum over layers already"

    def specs(self, layers: Iterable[int]) -> Sequence[TraceSpec]:
        return [replace(spec, every_layer=True) for spec in super().specs(layers)]

    def layers(self) -> range:
        return range(self.start_layer, self.model.num_layers)

    def scores(self, trace: Trace, layer: int) -> Tensor:
        """(B, n): the mean over heads and queries of ReLU(∂s_l/∂A_l)."""
        return trace["G"][layer].clamp(min=0).mean((1, 2))


@dataclass(kw_only=True)
class Relevance(TokenMethod):
    """Chefer's LRP: not for rotary positions, score bias, gated MLPs, attention pools, queries and other blocks."""

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        reason = super().unsupported(model)
        if reason:
            return reason
        parts = model.architecture()
        first = parts.blocks[0]
        for present, what in (
            (first.attention.rope is not None, "rotary positions"),
            (parts.head.pool == "queries", "queries"),
            (any(b.attention.bias is not None for b in parts.blocks), "a score bias"),
            (first.mlp.up is not None, "a gated MLP"),
            (first.attention.gate is not None, "gated attention"),
            (first.attention.talk is not None, "heads that are mixed"),
            (first.post1 is not None, "post-norm blocks"),
            (first.parallel, "parallel blocks"),
            (parts.head.pool == "attention", "an attention pool"),
        ):
            if present:
                return f"its LRP rules are not defined for {what}"
        return None


@method("trans_att", signed=False, family="relevance", cost=(2, 2.5), paper="Chefer et al. 2021 (TransAtt)")
@dataclass(kw_only=True)
class TransAtt(Relevance, OwnRollout):
    """As ``gen_att``, with the relevance of attention (LRP) in place of attention itself.

    ``protocol="authors"`` starts at block 1, as the authors' scripts do.
    """

    start_layer: int | None = None  # type: ignore[assignment]
    protocol: Literal["default", "authors"] = "default"

    bears_half: ClassVar[bool] = False  # shares of sums that all but cancel
    keep: ClassVar[frozenset[str]] = frozenset({"G"})
    mixing: ClassVar[Mixing] = "add"

    def layers(self) -> range:
        start = int(self.protocol == "authors") if self.start_layer is None else self.start_layer
        return range(start, self.model.num_layers)

    def specs(self, layers: Iterable[int]) -> Sequence[TraceSpec]:
        return [*super().specs(layers), TraceSpec.of({"G"}, layers, AlphaBeta())]

    def combined(self, *traces: Trace) -> Trace:
        trace, relevance = traces
        return replace(trace, kept={**trace.kept, "R": relevance["G"]})

    def layer_map(self, trace: Trace, layer: int) -> Tensor:
        return (trace["G"][layer] * trace["R"][layer]).clamp(min=0).mean(1)


@method("partial_lrp", family="relevance", signed=False, paper="Voita et al. 2019")
@dataclass(kw_only=True)
class PartialLrp(Relevance, TraceMethod):
    """Relevance of the last block's attention, in the row that the head reads.

    ``protocol="authors"``: the published rule, whose total doubles at each linear layer.
    """

    protocol: Literal["default", "authors"] = "default"

    no_aggregation: ClassVar[str] = "partial LRP is defined for the last block only"

    def needs(self) -> Sequence[TraceSpec]:
        rule = PublishedAlphaBeta() if self.protocol == "authors" else AlphaBeta()
        return [TraceSpec.of({"G"}, [self.model.num_layers - 1], rule)]

    def read(self, *traces: Trace) -> Attribution:
        (trace,) = traces
        relevance = trace["G"][trace.num_layers - 1].clamp(min=0).mean(1)
        row = readout_row(trace, "head", self.model.name)
        return Attribution(self.on_grid(torch.einsum("bi,bij->bj", row, relevance)))


@dataclass(kw_only=True)
class PixelRelevance(TokenMethod):
    """Relevance carried back to the pixels by a rule."""

    no_aggregation: ClassVar[str] = "it explains pixels, not layers"
    precise: ClassVar[bool] = False

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        reason = super().unsupported(model)
        if reason is None and model.architecture().embedding.stem is not None:
            return "it has layers before its patches, for which its rules are not defined"
        return reason

    def pixel_rule(self) -> Plain:
        raise NotImplementedError

    def relevance(self, image: Tensor, gradient: Tensor) -> Tensor:
        """(3, H, W) each: the image, and what the rule carries back to it → (H, W)."""
        return gradient.sum(0)

    def ask(self, batch: Batch, target: Target) -> Asking[Attribution]:
        target = yield from resolved(batch, target, self.reduced)
        rule, output = self.pixel_rule(), getattr(self, "output", "logit")
        gradients = yield [
            PixelGradients(
                view=self.model,
                count=1,
                make=lambda _, i=i: batch.images[i : i + 1],  # type: ignore[misc]
                fold=lambda gradient, _: gradient[0],
                target=target.row(i),
                rule=rule,
                output=output,
                precise=self.precise,
                reduced=self.reduced,
                name=self.info.name,
            )
            for i in range(len(batch))
        ]
        maps = [self.relevance(image, gradient) for image, gradient in zip(batch.images, gradients, strict=True)]
        return Attribution(torch.stack(maps))


@method("lrp", family="relevance", signed=True, level="pixel", cost=(1, 2), paper="Chefer et al. 2021 (full LRP)")
@dataclass(kw_only=True)
class Lrp(Relevance, PixelRelevance):
    """Relevance carried back to the pixels, as Chefer's release does; its total is not conserved."""

    version: ClassVar[int] = 2
    precise: ClassVar[bool] = True  # shares of sums that all but cancel: in single precision they are rounding

    def pixel_rule(self) -> Plain:
        return PublishedAlphaBeta()


@method("epsilon_lrp", family="relevance", signed=True, level="pixel", paper="Bach et al. 2015")
@dataclass(kw_only=True)
class EpsilonLrp(PixelRelevance):
    """ε-LRP to the pixels on the frozen network: conserving but for the biases and ε."""

    bears_half: ClassVar[bool] = True

    epsilon: float = 1e-6
    output: Output = "logit"

    def pixel_rule(self) -> Plain:
        if self.epsilon < 0:
            raise VitrailError(f"epsilon must be at least 0, but got {self.epsilon}.")
        return Epsilon(self.epsilon)

    def relevance(self, image: Tensor, gradient: Tensor) -> Tensor:
        return (image * gradient).sum(0)


@method("conservative_lrp", family="relevance", signed=True, paper="Ali et al. 2022")
@dataclass(kw_only=True)
class ConservativeLrp(Layerwise):
    """Input × gradient with attention and the deviation of norms held constant."""

    start_layer: int = 0
    output: Output = "logit"

    rule: ClassVar[str] = "conservative"


@method("attn_lrp", family="relevance", signed=True, paper="Achtibat et al. 2024")
@dataclass(kw_only=True)
class AttnLrp(Layerwise):
    """Relevance with the uniform rule at the two products of attention and the softmax by its own derivative."""

    start_layer: int = 0
    output: Output = "logit"

    rule: ClassVar[str] = "attn_lrp"
