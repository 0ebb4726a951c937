"""A store that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Bounded(Generic[T]):
    """Values by key, at most ``most`` bytes of them; the newest stays even if it alone has more."""

    def __init__(self, most: int, forget: Callable[[Hashable], None] | None = None) -> None:
        self.most, self.bytes, self._forget = most, 0, forget
        self._kept: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> T | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: Hashable, value: T, size: int) -> None:
        if key in self._kept:
            self.bytes -= self._kept.pop(key)[1]
        self._kept[key] = (value, size)
        self.bytes += size
        while self.bytes > self.most and len(self._kept) > 1:
            oldest, (_, freed) = self._kept.popitem(last=False)
            self.bytes -= freed
            if self._forget is not None:
                self._forget(oldest)

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0
