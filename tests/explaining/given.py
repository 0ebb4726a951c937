"""What the tests of ``explain`` share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

LABELS = ["ant", "bee", "cat", "dog", "elk"]


def noise(width: int, height: int, seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
