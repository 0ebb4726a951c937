"""Masks stored as images of numbers: trimaps (1 object, 2 background, 3 border) and two-valued masks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitrail.data.base import Mask
from vitrail.data.paths import broken

_OBJECT, _BACKGROUND, _BORDER = 1, 2, 3


def read_trimap(values: NDArray[np.generic], path: Path) -> tuple[Mask, Mask]:
    """(object, border) of a trimap."""
    if not np.isin(values, (_OBJECT, _BACKGROUND, _BORDER)).all():
        numbers = ", ".join(map(str, np.unique(values)[:6]))
        raise broken("trimap", path, f"it holds {numbers}; expected 1 (object), 2 (background) and 3 (border)")
    return values == _OBJECT, values == _BORDER


def read_mask(values: NDArray[np.generic], path: Path) -> tuple[Mask, Mask | None]:
    """(object, border) of a trimap, or (object, None) of a mask: 0 and one other number, the object's."""
    numbers = np.unique(values)
    if numbers[0] != 0 and np.isin(numbers, (_OBJECT, _BACKGROUND, _BORDER)).all():
        return read_trimap(values, path)
    if len(numbers) > 2 or (len(numbers) == 2 and numbers[0] != 0):
        first = ", ".join(map(str, numbers[:6]))
        raise broken("mask", path, f"it holds {first}; expected 0 and one other number, or a trimap of 1, 2 and 3")
    return values != 0, None
