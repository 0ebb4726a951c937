"""The view of a hierarchical transformer (Swin): logits and spatial features, no tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitrail.models import huggingface, timm, torchvision
from vitrail.models.black_box import BlackBox
from vitrail.models.clone import widened

FIRST_STAGE_TOKENS = 4096


def is_hierarchical(module: nn.Module) -> bool:
    """Whether the module is a supported Swin classifier."""
    name = type(module).__name__
    return (
        (timm.is_timm(module) and name in timm.HIERARCHICAL)
        or (torchvision.is_torchvision(module) and name in torchvision.HIERARCHICAL)
        or (huggingface.is_huggingface(module) and name in huggingface.HIERARCHICAL)
    )


@dataclass(eq=False, repr=False)
class Hierarchical(BlackBox):
    """Windows shift and patches merge, so there is no fixed token grid: only black-box methods and CAMs apply.

    Its stages and its head are known: their weights are read from the module, whatever replaced them.
    """

    structure: ClassVar[str] = "hierarchical"

    def __post_init__(self) -> None:
        """Refuses an unsupported network now, not at the first call."""
        self.check_channels()
        if self.device.type == "meta":  # no weights: it can be described, but not run
            return
        images = torch.zeros(1, 3, *self.size, device=self.device)
        with torch.no_grad():
            self.tried(lambda: self.staged(self.check_images(images), [-1]))

    @property
    def num_outputs(self) -> int:
        owner, name = _head_place(self.module)
        linears = [m for m in getattr(owner, name).modules() if isinstance(m, nn.Linear)]
        if not linears:
            raise self.refuse("it has no classification head; build it with one, or replace its head by an nn.Linear")
        return linears[-1].out_features

    @property
    def stages(self) -> list[nn.Module]:
        """The stages, each with its blocks."""
        return _stages(self.module)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def default_stage(self) -> int:
        """The second-to-last, whose features are finer than those of the last."""
        return self.num_stages - 2

    @property
    def num_tokens(self) -> int:
        """Roughly that of the first stage."""
        return FIRST_STAGE_TOKENS

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

    def watched(self, module: Any) -> dict[str, nn.Module]:
        """The last block of each stage."""
        blocks = [stage.blocks if hasattr(stage, "blocks") else stage for stage in _stages(module)]
        return {str(number): parts[-1] for number, parts in enumerate(blocks)}

    def called(self, module: nn.Module, images: Tensor) -> Any:
        """The output of the clone; under autocast its head keeps the precision of the images."""
        if torch.is_autocast_enabled(images.device.type):  # fp16 is too coarse for differences of scores
            owner, name = _head_place(module)
            setattr(owner, name, _FullPrecision(getattr(owner, name), images.dtype))
        return module(images) if images.dtype == self.dtype else widened(module, images)

    def as_map(self, out: Tensor) -> Tensor:
        if out.ndim == 3:
            rows = round((out.shape[1] * self.size[0] / self.size[1]) ** 0.5)
            out = out.unflatten(1, (rows, -1))
        return out.permute(0, 3, 1, 2)


class _FullPrecision(nn.Module):
    """A head that computes in the precision of its weights under autocast too."""

    def __init__(self, head: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.head, self.dtype = head, dtype

    def forward(self, pooled: Tensor) -> Tensor:
        with torch.autocast(pooled.device.type, enabled=False):
            return self.head(pooled.to(self.dtype))


def _stages(module: Any) -> list[Any]:
    if huggingface.is_huggingface(module):
        return list(module.base_model.encoder.layers)
    return list(module.layers if timm.is_timm(module) else module.features[1::2])


def _head_place(module: Any) -> tuple[nn.Module, str]:
    """The module that holds the head, and under which name: what maps the pooled features to logits."""
    if huggingface.is_huggingface(module):
        return module, "classifier"
    return (module.head, "fc") if hasattr(module.head, "fc") else (module, "head")
