"""Class activation maps: on the tokens of a ViT, and on the features of other networks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, lacks, lacks_gradients
from vitrail.methods.layerwise import Layerwise, Output, Rule, check_layers
from vitrail.methods.registry import method
from vitrail.models.view import View


@dataclass(kw_only=True)
class Cam(Layerwise):
    """A map from the activations h (B, n, d) of a layer and their gradients g.

    ``layer`` counts blocks, the stages of a hierarchical model or the feature layers of a black box (their output);
    None = the last block, the second-to-last stage, the last feature layer. The default is that of pytorch-grad-cam
    (``protocol="authors"``): the output of the block's first norm, ReLU, min–max. ``protocol="signed"`` reads the
    block's input and keeps the sign, as the aggregated forms do; ``protocol="skipplus"`` also averages channel weights
    over the prefix tokens.
    """

    layer: int | None = None
    rule: Rule = "plain"
    output: Output = "logit"
    protocol: Literal["default", "authors", "signed", "skipplus"] = "default"

    version: ClassVar[int] = 2
    aggregated_version: ClassVar[int | None] = 1
    cancelling: ClassVar[bool] = False

    @classmethod
    def unsupported(cls, model: View) -> str | None:
        return lacks(cls.info, model) or lacks_gradients(cls.info, model)

    def cancels(self, layers: Iterable[int]) -> bool:
        return self.cancelling and len(list(layers)) == 1  # in a sum over layers the others weigh more

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        """(B, n): the map; channel weights come from the tokens ``context``."""
        raise NotImplementedError

    @property
    def published(self) -> bool:
        """Whether the map is made as pytorch-grad-cam makes it."""
        return self.protocol in ("default", "authors")

    def layers(self) -> range:
        layer = -1 if self.layer is None else self.layer
        layer = layer if layer >= 0 else self.model.num_layers + layer
        return range(layer, layer + 1)

    @property
    def stage(self) -> int:
        """The stage of a model without tokens."""
        stage = self.model.default_stage if self.layer is None else self.layer
        stages = self.model.num_stages
        if not -stages <= stage < stages:
            raise VitrailError(f"{self.model.name} has {stages} stages; there is no stage {stage}.")
        return stage % stages

    def needs(self) -> Sequence[TraceSpec]:
        if not self.model.has_tokens:
            return [TraceSpec.of({"features", "gfeatures"}, [self.stage], self.rule, self.output)]
        if not self.published:
            return super().needs()
        layers = check_layers(self.layers(), self.model.num_layers)
        return [TraceSpec.of({"u", "gu", "gx"}, layers, self.rule, self.output, self.cancelling, self.reduced)]

    def scores(self, trace: Trace, layer: int) -> Tensor:
        context = slice(None) if self.protocol == "skipplus" else slice(trace.num_prefix, None)
        return self.cam(trace["x"][layer], trace["gx"][layer], context)

    def read(self, *traces: Trace) -> Attribution:
        (trace,) = traces
        if not self.model.has_tokens:
            return self._on_features(trace["features"][self.stage], trace["gfeatures"][self.stage])
        if not self.published:
            return super().read(trace)
        (layer,) = self.layers()
        patches = slice(trace.num_prefix, None)
        values = self.cam(trace["u"][layer][:, patches], trace["gu"][layer][:, patches], slice(None))
        return Attribution(as_published(values).unflatten(1, self.model.grid))

    def _on_features(self, features: Tensor, gradients: Tensor) -> Attribution:
        h, g = (values.flatten(2).transpose(1, 2) for values in (features, gradients))
        values = self.cam(h, g, slice(None))
        values = as_published(values) if self.published else values
        return Attribution(values.unflatten(1, features.shape[2:]))


def as_published(values: Tensor) -> Tensor:
    """ReLU, then min–max with the release's 1e-7; (B, n)."""
    values = values.clamp(min=0)
    values = values - values.amin(1, keepdim=True)
    return values / (values.amax(1, keepdim=True) + 1e-7)


def _register(name: str, paper: str, signed: bool | None = None):  # type: ignore[no-untyped-def]
    return method(name, family="cam", needs="features", paper=paper, signed=signed)


@_register("grad_cam", "Selvaraju et al. 2017")
@dataclass(kw_only=True)
class GradCam(Cam):
    """Activations weighted by the mean gradient of each channel."""

    bears_half: ClassVar[bool] = False  # means of gradients that all but cancel

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        return (h * g[:, context].mean(1, keepdim=True)).sum(-1)


@_register("xgrad_cam", "Fu et al. 2020")
@dataclass(kw_only=True)
class XGradCam(Cam):
    """Activations weighted by the gradients in proportion to the activations, whose sum may all but cancel."""

    bears_half: ClassVar[bool] = False
    cancelling: ClassVar[bool] = True

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        inside = h[:, context]
        weights = (g[:, context] * inside).sum(1, keepdim=True) / (inside.sum(1, keepdim=True) + 1e-7)
        return (h * weights).sum(-1)


@_register("xgrad_cam_plus", "SkipPLUS")
@dataclass(kw_only=True)
class XGradCamPlus(Cam):
    """As ``xgrad_cam``, in proportion to the size of the activations, which cannot cancel."""

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        size = h[:, context].abs()
        weights = (g[:, context] * size).sum(1, keepdim=True) / (size.sum(1, keepdim=True) + 1e-7)
        return (h * weights).sum(-1)


@_register("grad_cam_pp", "Chattopadhyay et al. 2018")
@dataclass(kw_only=True)
class GradCamPlusPlus(Cam):
    """Activations weighted by positive gradients with second-order coefficients, whose divisor may all but cancel."""

    bears_half: ClassVar[bool] = False
    cancelling: ClassVar[bool] = True

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        inside, slope = h[:, context], g[:, context]
        below = 2 * slope**2 + inside.sum(1, keepdim=True) * slope**3
        coefficients = slope**2 / (below + 1e-6)
        weights = (coefficients * slope.clamp(min=0)).sum(1, keepdim=True)
        return (h * weights).sum(-1)


@_register("hires_cam", "Draelos & Carin 2020")
@dataclass(kw_only=True)
class HiResCam(Cam):
    """Activations times gradients; with ``protocol="signed"`` the same as input × gradient at that layer."""

    # what a token has only through a LayerNorm, which ignores its length, sums to nearly zero (Euler)
    cancelling: ClassVar[bool] = True

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        return (h * g).sum(-1)


@_register("grad_cam_elementwise", "pytorch-grad-cam", signed=False)
@dataclass(kw_only=True)
class GradCamElementwise(Cam):
    """The positive products of activations and gradients."""

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        return (h * g).clamp(min=0).sum(-1)


@_register("layer_cam", "Jiang et al. 2021")
@dataclass(kw_only=True)
class LayerCam(Cam):
    """Activations weighted by their own positive gradients.

    ``layer_cam.plus`` adds up the layers as SkipPLUS tells it, each map divided by its largest absolute value.
    """

    def cam(self, h: Tensor, g: Tensor, context: slice) -> Tensor:
        return (h * g.clamp(min=0)).sum(-1)

    def term(self, trace: Trace, layer: int) -> Tensor:
        scores = self.scores(trace, layer)
        peak = scores[:, trace.num_prefix :].abs().amax(1, keepdim=True)
        return scores / torch.where(peak == 0, torch.ones_like(peak), peak)
