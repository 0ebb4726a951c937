"""The view of a hierarchical transformer (Swin): logits and spatial features, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.errors import VitrailError
from vitrail.models import huggingface, timm, torchvision
from vitrail.models.clone import evaluation_clone
from vitrail.models.view import View
from vitrail.progress import passed


def is_hierarchical(module: nn.Module) -> bool:
    """Whether the module is a supported Swin classifier."""
    name = type(module).__name__
    return (
        (timm.is_timm(module) and name in timm.HIERARCHICAL)
        or (torchvision.is_torchvision(module) and name in torchvision.HIERARCHICAL)
        or (huggingface.is_huggingface(module) and name in huggingface.HIERARCHICAL)
    )


@dataclass(eq=False, repr=False)
class Hierarchical(View):
    """Windows shift and patches merge, so there is no fixed token grid: only black-box methods and CAMs apply.

    Every forward pass runs on a clone of the module in evaluation mode that shares its weights, so the view uses the
    current weights, never changes the module and is thread-safe.
    """

    def __post_init__(self) -> None:
        """Refuses an unsupported network now, not at the first call."""
        stem = next((m for m in self.module.modules() if isinstance(m, nn.Conv2d)), None)
        if stem is not None and stem.in_channels != 3:
            raise self._refuse(f"it takes {stem.in_channels} colour channels, but only RGB models can be explained")
        if self.device.type == "meta":  # no weights: it can be described, but not run
            return
        height, width = self.size
        try:
            with torch.no_grad():
                self.staged(self.check_images(torch.zeros(1, 3, height, width, device=self.device)), [-1])
        except VitrailError:
            raise
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise self._refuse(f"its forward pass fails on an image of {height}×{width} pixels ({why})") from error

    @property
    def num_outputs(self) -> int:
        owner, name = _head_place(self.module)
        linears = [m for m in getattr(owner, name).modules() if isinstance(m, nn.Linear)]
        if not linears:
            raise self._refuse("it has no classification head; build it with one, or replace its head by an nn.Linear")
        return linears[-1].out_features

    @property
    def stages(self) -> list[nn.Module]:
        """The stages, each with its blocks."""
        return _stages(self.module)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def layers(self) -> list[list[Tensor]]:
        """The weights of each stage, with what merges its patches before it, then all that follows the last."""
        layers: list[list[Tensor]] = [[] for _ in range(self.num_stages + 1)]
        stages = [{id(p) for p in stage.parameters()} for stage in self.stages]
        stage = -1  # before the first, where the patches are embedded
        for parameter in self.module.parameters():
            index = next((i for i, inside in enumerate(stages) if id(parameter) in inside), None)
            if index is not None:
                stage = index
            if index is not None or stage >= 0:
                layers[stage if index is not None else stage + 1].append(parameter.detach())
        return layers

    def logits(self, images: Tensor) -> Tensor:
        return self.staged(self.check_images(images), ())[0]

    def features(self, images: Tensor, stage: int = -2) -> Tensor:
        """Output of the last block of a stage, (B, C, h, w); the default is the second-to-last stage."""
        return self.as_map(self.staged(self.check_images(images), [stage])[1][0])

    def staged(self, images: Tensor, stages: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        wrong = [stage for stage in stages if not -self.num_stages <= stage < self.num_stages]
        if wrong:
            raise VitrailError(f"{self.name} has {self.num_stages} stages; there is no stage {wrong[0]}.")
        module = evaluation_clone(self.module)
        outputs: dict[int, Tensor] = {}
        for stage in stages:
            self._watch(_stages(module)[stage], stage, outputs)
        if torch.is_autocast_enabled(images.device.type):  # bf16 logits are too coarse for differences of scores
            owner, name = _head_place(module)
            setattr(owner, name, _FullPrecision(getattr(owner, name), images.dtype))
        result = module(images) if images.dtype == self.dtype else _widened(module, images)
        logits = result if isinstance(result, Tensor) else result[0]
        if tuple(logits.shape) != (len(images), self.num_outputs):
            raise self._refuse(
                f"for a batch of {len(images)} its output has shape {tuple(logits.shape)}; expected one row of "
                f"logits per image, {self.num_outputs} as from the last linear layer of its head"
            )
        if len(outputs) < len(stages):
            raise self._refuse("its forward method was replaced by a function that does not call its stages")
        passed(len(images))
        return logits, [outputs[stage] for stage in stages]

    @staticmethod
    def _watch(stage: Any, number: int, outputs: dict[int, Tensor]) -> None:
        """Records the output of the last block of a stage of the clone."""

        def record(_: nn.Module, __: Any, out: Any) -> None:
            outputs[number] = out[0] if isinstance(out, tuple) else out

        (stage.blocks if hasattr(stage, "blocks") else stage)[-1].register_forward_hook(record)

    def as_map(self, out: Tensor) -> Tensor:
        if out.ndim == 3:
            rows = round((out.shape[1] * self.size[0] / self.size[1]) ** 0.5)
            out = out.unflatten(1, (rows, -1))
        return out.permute(0, 3, 1, 2)

    def _refuse(self, why: str) -> VitrailError:
        return VitrailError(f"{type(self.module).__name__} cannot be explained: {why}.")


def _widened(module: nn.Module, images: Tensor) -> Any:
    """The output of a module whose weights have another precision than the images."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    wider = {name: tensor.detach().to(images.dtype) for name, tensor in tensors if tensor.is_floating_point()}
    return torch.func.functional_call(module, wider, (images,))


class _FullPrecision(nn.Module):
    """A head that computes in the precision of its weights under autocast too."""

    def __init__(self, head: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self.dtype = head, dtype

    def forward(self, pooled: Tensor) -> Tensor:
        with torch.autocast(pooled.device.type, enabled=False):
            return self.head(pooled.to(self.dtype))


def _stages(module: Any) -> list[nn.Module]:
    if huggingface.is_huggingface(module):
        return list(module.base_model.encoder.layers)
    return list(module.layers if timm.is_timm(module) else module.features[1::2])


def _head_place(module: Any) -> tuple[nn.Module, str]:
    """The module that holds the head, and under which name: what maps the pooled features to logits."""
    if huggingface.is_huggingface(module):
        return module, "classifier"
    return (module.head, "fc") if hasattr(module.head, "fc") else (module, "head")
