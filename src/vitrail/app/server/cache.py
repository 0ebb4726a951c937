"""A least recently used cache, bounded in bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from cachetools import LRUCache

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ByteCache(LRUCache[K, V]):
    """Evicts the least recently used values beyond ``maxsize`` bytes; a larger value is kept alone."""

    def __init__(self, maxsize: int, size: Callable[[V], int], on_evict: Callable[[K], None] | None = None) -> None:
        super().__init__(maxsize, getsizeof=lambda value: min(size(value), maxsize))
        self._on_evict = on_evict

    def popitem(self) -> tuple[K, V]:
        key, value = super().popitem()
        if self._on_evict is not None:
            self._on_evict(key)
        return key, value
