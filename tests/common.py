"""What several tests share: pictures, class names, small budgets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from vitrail.methods.registry import get_method

LABELS = ["ant", "bee", "cat", "dog", "elk"]


def noise(width: int, height: int, seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def small_budget(method: str) -> dict[str, int]:
    """Parameters for few passes, where the budget is not the point."""
    budget = {"steps": 8, "samples": 64, "masks": 64}
    return {name: value for name, value in budget.items() if name in get_method(method).info.params}
