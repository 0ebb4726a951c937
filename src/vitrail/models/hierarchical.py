"""The view of a hierarchical transformer (Swin): logits and spatial features, no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import huggingface, timm, torchvision
from vitrail.models.view import View


def is_hierarchical(module: nn.Module) -> bool:
    """Whether the module is one of the Swin classifiers known here."""
    name = type(module).__name__
    return (
        (timm.is_timm(module) and name in timm.HIERARCHICAL)
        or (torchvision.is_torchvision(module) and name in torchvision.HIERARCHICAL)
        or (huggingface.is_huggingface(module) and name in huggingface.HIERARCHICAL)
    )


@dataclass(eq=False, repr=False)
class Hierarchical(View):
    """Windows move and patches merge: there is no fixed token grid, so only black-box methods and CAMs apply."""

    @property
    def _head(self) -> nn.Linear:
        """The last linear map."""
        module: Any = self.module
        head = module.classifier if huggingface.is_huggingface(module) else module.head
        return getattr(head, "fc", head)

    @property
    def num_outputs(self) -> int:
        return int(self._head.out_features)

    @property
    def stages(self) -> list[nn.Module]:
        """The stages, each with its blocks."""
        module: Any = self.module
        if huggingface.is_huggingface(module):
            return list(module.base_model.encoder.layers)
        return list(module.layers if timm.is_timm(module) else module.features[1::2])

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def layers(self) -> list[list[Tensor]]:
        """The weights of each stage, with what merges its patches before it, then all that follows the last."""
        layers: list[list[Tensor]] = [[] for _ in range(self.num_stages + 1)]
        stages = [{id(p) for p in stage.parameters()} for stage in self.stages]
        stage = -1  # before the first, where the patches are embedded
        for parameter in self.module.parameters():
            own = next((i for i, inside in enumerate(stages) if id(parameter) in inside), None)
            if own is not None:
                stage = own
            if own is not None or stage >= 0:
                layers[stage if own is not None else stage + 1].append(parameter.detach())
        return layers

    def logits(self, images: Tensor) -> Tensor:
        pooled: list[Tensor] = []
        hook = self._head.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0]))
        try:
            with evaluating(self.module):
                out = self._forward(self.check_images(images))
        finally:
            hook.remove()
        if torch.is_autocast_enabled(images.device.type):  # bf16 logits are too coarse for differences of scores
            with torch.autocast(images.device.type, enabled=False):
                weight, bias = (t if t is None else t.to(self.dtype) for t in (self._head.weight, self._head.bias))
                return F.linear(pooled[0].to(self.dtype), weight, bias)
        return out.logits if hasattr(out, "logits") else out

    def _forward(self, images: Tensor) -> Any:
        """What the module gives for images in the precision that the view computes in."""
        if self.dtype == self.weight_dtype:
            return self.module(images)
        tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
        wider = {name: t.detach().to(self.dtype) for name, t in tensors if t.is_floating_point()}
        return torch.func.functional_call(self.module, wider, (images,))

    def features(self, images: Tensor, stage: int = -2) -> Tensor:
        """Output of the last block of a stage, (B, C, h, w); the default is the second-to-last stage."""
        with self._watching(stage) as seen:
            self.logits(images)
        return self._as_map(seen[0])

    def features_and_gradient(
        self,
        images: Tensor,
        target: Tensor | None,
        against: Tensor | None = None,
        output: str = "logit",
        stage: int = -2,
    ) -> tuple[Tensor, Tensor]:
        """The features of a stage and the gradient of the score there, (B, C, h, w) each."""
        with torch.inference_mode(False), torch.enable_grad(), self._watching(stage) as seen:
            logits = self.logits(images.detach().clone().requires_grad_())
            (gradient,) = torch.autograd.grad(self.score(logits, target, against, output).sum(), seen[0])
        return self._as_map(seen[0].detach()), self._as_map(gradient)

    @contextmanager
    def _watching(self, stage: int) -> Iterator[list[Tensor]]:
        """Collects what the last block of a stage gives; the hook goes away again, also after an error."""
        if not -self.num_stages <= stage < self.num_stages:
            raise VitrailError(f"{self.name} has {self.num_stages} stages; there is no stage {stage}.")
        last: Any = self.stages[stage]
        block = (last.blocks if hasattr(last, "blocks") else last)[-1]
        seen: list[Tensor] = []
        hook = block.register_forward_hook(lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out))
        try:
            yield seen
        finally:
            hook.remove()

    def _as_map(self, out: Tensor) -> Tensor:
        """(B, h, w, C) or (B, h·w, C) → (B, C, h, w)."""
        if out.ndim == 3:
            rows = round((out.shape[1] * self.size[0] / self.size[1]) ** 0.5)
            out = out.unflatten(1, (rows, -1))
        return out.permute(0, 3, 1, 2)

    def embed(self, images: Tensor) -> NoReturn:
        raise self._no("embed tokens")

    def encode(self, tokens: Tensor, keep: Tensor | None = None) -> NoReturn:
        raise self._no("encode tokens")

    @property
    def blocks(self) -> NoReturn:
        raise self._no("list canonical blocks")

    def _no(self, what: str) -> VitrailError:
        from vitrail.methods.registry import supported_methods

        names = ", ".join(supported_methods(self)) or "none yet"
        return VitrailError(
            f"cannot {what}: {self.name} ({type(self.module).__name__}) is hierarchical and has no fixed tokens. "
            f"Methods that work on it: {names}."
        )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every submodule's own mode comes back, also after an error."""
    modes = [(m, m.training) for m in module.modules()]
    for m, _ in modes:
        m.training = False
    try:
        yield
    finally:
        for m, mode in modes:
            m.training = mode
