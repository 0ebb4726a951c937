"""One trace for all methods that ask the same kind of trace of the same images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vitrail.engine.trace import Trace

Kind = tuple[Any, str, bool]


@dataclass(frozen=True)
class Wish:
    """What is asked of a trace: how it is made, and what it must keep."""

    keep: frozenset[str]
    layers: frozenset[int]
    rule: Any = "plain"
    output: str = "logit"
    precise: bool = False

    @property
    def kind(self) -> Kind:
        """Wishes of one kind can be fulfilled by one trace."""
        return self.rule, self.output, self.precise

    def within(self, other: Wish) -> bool:
        return self.kind == other.kind and self.keep <= other.keep and self.layers <= other.layers


def united(wishes: Iterable[Wish]) -> dict[Kind, Wish]:
    """For each kind that more than one wish is of, the wish for all that they ask."""
    found: dict[Kind, list[Wish]] = {}
    for wish in wishes:
        found.setdefault(wish.kind, []).append(wish)
    return {
        kind: replace(
            own[0],
            keep=frozenset().union(*(one.keep for one in own)),
            layers=frozenset().union(*(one.layers for one in own)),
        )
        for kind, own in found.items()
        if len(own) > 1
    }


@dataclass
class Shared:
    """The trace of a batch, made when it is first asked for."""

    wish: Wish
    model: Any
    images: Tensor
    target: Tensor
    trace: Trace | None = None
    cost: float = 0.0  # seconds that making it took
    spared: float = 0.0  # seconds that finding it made has spared since ``taken``

    def answers(self, wish: Wish, model: Any, images: Tensor, target: Tensor | None, against: Tensor | None) -> bool:
        """Whether this trace is the one that is wished for, or holds it."""
        return (
            model is self.model
            and against is None
            and target is not None
            and wish.within(self.wish)
            and torch.equal(target, self.target.to(target.device))
            and images.shape == self.images.shape
            and torch.equal(images, self.images.to(images))
        )

    def found(self, make: Callable[[Wish], Trace]) -> Trace:
        if self.trace is not None:
            self.spared += self.cost
            return self.trace
        begin = time.perf_counter()
        self.trace = make(self.wish)
        if self.images.is_cuda:
            torch.cuda.synchronize(self.images.device)
        self.cost = time.perf_counter() - begin
        return self.trace

    def taken(self) -> float:
        """The seconds spared since this was asked last: what the readers of a made trace owe."""
        spared, self.spared = self.spared, 0.0
        return spared


_current: ContextVar[Shared | None] = ContextVar("shared", default=None)


def current() -> Shared | None:
    """The trace that is shared here, if one is."""
    return _current.get()


@contextmanager
def shared(wish: Wish | None, model: Any, images: Tensor, target: Tensor) -> Iterator[Shared | None]:
    """Inside, traces of these images that ``wish`` covers are one; without a wish nothing is shared."""
    own = None if wish is None else Shared(wish, model, images, target)
    token = _current.set(own)
    try:
        yield own
    finally:
        _current.reset(token)
