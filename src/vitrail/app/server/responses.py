"""What clients receive: JSON, and errors with an HTTP status."""

from __future__ import annotations

import json
import math
from typing import Any

from vitrail.errors import VitrailError

MAX_MESSAGE = 2000  # characters: a message may quote what the client sent


class RequestError(VitrailError):
    """A request that cannot be served; ``retry_after`` is the number of seconds to wait before the next attempt."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…")
        self.status, self.retry_after = status, retry_after


def to_json(value: Any) -> bytes:
    """Compact ASCII: text from a client may contain what UTF-8 cannot encode (half of a surrogate pair)."""
    return json.dumps(_finite(value), default=str, separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
