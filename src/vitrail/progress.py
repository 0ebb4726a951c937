"""Progress bars for work that takes longer than two seconds; none without a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
Watcher = Callable[[str, int, int], None]

_watcher: ContextVar[Watcher | None] = ContextVar("_watcher", default=None)
_passes: ContextVar[Any] = ContextVar("_passes", default=None)  # the bar of ``passes_counted``


@contextmanager
def watched(callback: Watcher) -> Iterator[None]:
    """Inside, ``callback(name, done, total)`` is called at every step instead of drawing bars.

    An exception raised by the callback ends the work.
    """
    token = _watcher.set(callback)
    try:
        yield
    finally:
        _watcher.reset(token)


def shown(steps: Iterable[T], name: str, unit: str = "step") -> Iterable[T]:
    """Iterates over the steps; a bar with the remaining time appears after two seconds."""
    watcher = _watcher.get()
    if watcher is not None:
        return _reported(steps, name, watcher)
    bar: Iterable[T] = tqdm(steps, desc=name, unit=unit, delay=2, disable=None, leave=False)
    return bar


def counted(total: int, name: str, unit: str = "mask") -> Any:
    """The same bar, updated manually: a context manager with ``update(n)``.

    Without a name it is part of work that has a bar already, and nothing is shown.
    """
    if not name:
        return tqdm(total=total, disable=True)
    watcher = _watcher.get()
    if watcher is not None:
        return _Count(total, name, watcher)
    return tqdm(total=total, desc=name, unit=unit, delay=2, disable=None, leave=False)


@contextmanager
def passes_counted(expected: int, name: str) -> Iterator[None]:
    """Inside, a bar counts the forward passes that ``passed`` reports; past the expected number its end is unknown.

    If none is expected, none is counted.
    """
    if not expected:
        yield
        return
    with counted(expected, name, "pass") as bar:
        token = _passes.set(bar)
        try:
            yield
        finally:
            _passes.reset(token)


@contextmanager
def uncounted() -> Iterator[None]:
    """Inside, forward passes are not counted."""
    token = _passes.set(None)
    try:
        yield
    finally:
        _passes.reset(token)


def passed(images: int) -> None:
    """A network has made a forward pass of so many images."""
    bar = _passes.get()
    if bar is not None:
        if bar.n + images > bar.total:
            bar.total = 0
        bar.update(images)


def _reported(steps: Iterable[T], name: str, watcher: Watcher) -> Iterator[T]:
    total = len(steps) if isinstance(steps, Sized) else 0
    for done, step in enumerate(steps):
        watcher(name, done, total)
        yield step


class _Count:
    """The bar of ``counted`` inside ``watched``: the part of tqdm's interface that vitrail uses."""

    def __init__(self, total: int, name: str, watcher: Watcher) -> None:
        self.total, self.name, self.watcher, self.n = total, name, watcher, 0

    def __enter__(self) -> _Count:
        self.watcher(self.name, 0, self.total)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        self.n += n
        self.watcher(self.name, self.n, self.total)

    def close(self) -> None:
        """Nothing was drawn."""
