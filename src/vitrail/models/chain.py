"""A plain ViT behind layers of one's own in an ``nn.Sequential``: a normalisation, or what makes its channels of RGB.

They are run as they are, like the convolutional stem of a hybrid: what is explained begins with the patches.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.models import huggingface, timm, torchvision
from vitrail.models.clone import evaluation_clone, widened
from vitrail.models.translation import opaque

ADAPTERS = ((timm, timm.is_timm), (torchvision, torchvision.is_torchvision), (huggingface, huggingface.is_huggingface))


def is_chain(module: Any) -> bool:
    """Whether it is a chain whose last part is a plain ViT with a head."""
    if type(module) is not nn.Sequential or len(module) < 2 or _adapter_of(module[-1]) is None:
        return False
    return _adapter(module).own_pool(module[-1]) is None


def describe(
    module: Any, size: tuple[int, int], head: nn.Module | None = None, pool: str | None = None
) -> parts.Architecture:
    """The canonical form, with the first parts as a stem."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise VitrailError("the Sequential has hooks: register them on its parts.")
    architecture = _adapter(module).describe(module[-1], size, head, pool)
    front, behind = evaluation_clone(module)[:-1], architecture.embedding.stem

    def run(images: Tensor) -> Tensor:
        images = widened(front, images)
        return images if behind is None else behind.run(images)

    stem = parts.Stem(run, architecture.embedding.patch)
    return replace(architecture, embedding=replace(architecture.embedding, stem=stem))


def logits(module: Any, images: Tensor, head: nn.Module | None, pool: str | None) -> Tensor:
    """The network's own logits."""
    result: Tensor = _adapter(module).logits(module[-1], module[:-1](images), head, pool)
    return result


def native_size(module: Any) -> tuple[int, int]:
    """(H, W) that the ViT was built for."""
    size: tuple[int, int] = _adapter(module).native_size(module[-1])
    return size


def check_front(module: Any, size: tuple[int, int]) -> None:
    """Whether the ViT gets images of the size that the chain gets, so that each patch stays in its place."""
    like = next(module.parameters())
    nothing = torch.zeros(1, 3, *size, device=like.device, dtype=like.dtype)
    with torch.no_grad():
        images = widened(evaluation_clone(module)[:-1], nothing)
    if not isinstance(images, Tensor) or images.shape[-2:] != nothing.shape[-2:]:
        raise opaque(module, f"its first parts change the size of images of {size[0]}×{size[1]} pixels")


def takes_other_sizes(module: Any) -> bool:
    return bool(_adapter(module).takes_other_sizes(module[-1]))


def adapts_to_input(module: Any) -> bool:
    return bool(_adapter(module).adapts_to_input(module[-1]))


def _adapter(chain: Any) -> Any:
    adapter = _adapter_of(chain[-1])
    assert adapter is not None
    return adapter


def _adapter_of(module: nn.Module) -> ModuleType | None:
    return next((a for a, is_own in ADAPTERS if is_own(module) and type(module).__name__ in a.NETWORKS), None)
