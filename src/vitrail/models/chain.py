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
PROBES = 4  # random images that tell whether patches keep their places


def network_of(module: Any) -> Any:
    """The ViT of a chain; any other module itself."""
    return module[-1] if is_chain(module) else module


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


def patch_size(module: Any) -> tuple[int, int]:
    """(H, W) of a patch of the ViT."""
    size: tuple[int, int] = _adapter(module).describe(module[-1], native_size(module)).embedding.patch
    return size


def check_front(module: Any, size: tuple[int, int], patch: tuple[int, int]) -> None:
    """Refuses first parts after which the patches of an image are no longer in their places."""
    try:
        fault = _fault_of(module, size, patch)
    except Exception as error:  # they may be anything
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise opaque(module, f"its first parts fail on images of {size[0]}×{size[1]} pixels ({reason})") from error
    if fault is not None:
        raise opaque(module, f"its first parts {fault} of images of {size[0]}×{size[1]} pixels")


@torch.no_grad()
def _fault_of(module: Any, size: tuple[int, int], patch: tuple[int, int]) -> str | None:
    """What the first parts do to patches: where single ones of random images change, the ViT must see it."""
    front, like = evaluation_clone(module)[:-1], next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    # values that pixels have, whether the front or the preprocessing normalises them
    values = torch.empty(2, PROBES, 3, *size, device="cpu").uniform_(0.1, 0.9, generator=generator)
    images, others = values.to(like)

    def seen(images: Tensor) -> Any:
        with torch.random.fork_rng([like.device] if like.is_cuda else []):  # what is drawn is the same each time
            return widened(front, images)

    before = seen(images)
    if not isinstance(before, Tensor) or before.shape[-2:] != images.shape[-2:]:
        return "change the size"
    rows, columns = size[0] // patch[0], size[1] // patch[1]
    for row, column in {(0, 0), (0, columns - 1), (rows - 1, 0), (rows // 2, columns // 3)}:
        top, left = row * patch[0], column * patch[1]
        place = (..., slice(top, top + patch[0]), slice(left, left + patch[1]))
        changed = images.clone()
        changed[place] = others[place]
        change = (seen(changed) - before).abs().float().mean((0, 1)).cpu()
        centre = ((change > change.max() / 2).nonzero() + 0.5).mean(0).tolist()
        expected = top + patch[0] / 2, left + patch[1] / 2
        shifts = [(abs(a - b), edge) for a, b, edge in zip(centre, expected, patch, strict=True)]
        if not all(shift <= max(edge / 6, 1) for shift, edge in shifts):  # nor where nothing has changed
            return "move the patches"
    return None


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
