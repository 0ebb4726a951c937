"""Answers as JSON can hold them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def rounded(values: Tensor) -> list[list[float]]:
    """Rows of numbers with six significant digits."""
    return [[float(f"{value:.6g}") for value in row] for row in values.tolist()]


def finite(value: Any) -> Any:
    """The same with null for NaN and infinity, which JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def as_json(answer: Any) -> bytes:
    """Only ASCII: a text from a client may hold what UTF-8 cannot (half of a surrogate pair)."""
    return json.dumps(finite(answer), default=str, separators=(",", ":"), allow_nan=False).encode()
