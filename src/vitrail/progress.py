"""Progress for work that takes longer than two seconds; silent where nobody watches (no terminal)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def shown(steps: Iterable[T], name: str, unit: str = "step") -> Iterable[T]:
    """The steps as they are; a bar with the time left appears if they take longer than two seconds."""
    bar: Iterable[T] = tqdm(steps, desc=name, unit=unit, delay=2, disable=None, leave=False)
    return bar


def counted(total: int, name: str, unit: str = "mask") -> Any:
    """The same bar, moved by hand: a context with ``update(n)``."""
    return tqdm(total=total, desc=name, unit=unit, delay=2, disable=None, leave=False)
