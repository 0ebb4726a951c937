"""What the tests of loading share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vitrail
from vitrail.models.view import View

NAME = "vit_tiny_patch16_224"
TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
HEADLESS = [
    "vit_base_patch16_siglip_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch16_dinov3",
    "eva02_base_patch14_224",
]


def load_tiny(checkpoint: Path, **options: Any) -> View:
    return vitrail.load(NAME, checkpoint=checkpoint, **{**TINY, **options})


def picture() -> Tensor:
    return torch.linspace(-2, 2, 3 * 32 * 32).view(1, 3, 32, 32)
