"""The files that ship: half-precision weights and the card that says how to use them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def save_half(weights: dict[str, Tensor], path: Path) -> None:
    """Written beside and renamed, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: value.half().contiguous() for name, value in weights.items()}, part)
    part.chmod(0o644)
    part.replace(path)


def load_shipped(folder: Path, name: str) -> tuple[VisionTransformer, dict]:
    """The model `name` in single precision, and its card."""
    card = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    model = VisionTransformer(**card["architecture"])
    model.load_state_dict({key: value.float() for key, value in load_file(folder / card["weights"]).items()})
    return model.eval(), card
