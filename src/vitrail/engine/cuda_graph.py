"""A step taken again and again; on CUDA as one launch: the host takes longer to ask for small ones than they last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

# (*state, *given) → (*state, whether to go on); the shapes stay.
Step = Callable[..., tuple[Tensor, ...]]
Like = tuple[torch.Size, torch.dtype, torch.device]

# Numbers that go into a step. A larger one lasts longer than asking for it takes, and what is captured holds memory.
SMALL = 2**22


def repeated(step: Step, state: Sequence[Tensor], given: Sequence[Tensor], most: int) -> Sequence[Tensor]:
    """The state after the last step: after ``most`` of them, or when one says that nothing is left to do."""
    if state[0].is_cuda and sum(one.numel() for one in (*state, *given)) <= SMALL:
        return _captured(step, _like(state), _like(given)).run(state, given, most)
    for _ in range(most):
        *state, more = step(*state, *given)
        if not more:
            break
    return state


class Captured:
    """A step as a CUDA graph over tensors of its own."""

    def __init__(self, step: Step, state: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        self.lock, self.graph = Lock(), torch.cuda.CUDAGraph()
        self.state, self.given = state, given
        step(*state, *given)  # what is made at the first use must not be captured
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            *changed, self.more = step(*state, *given)
            for own, new in zip(state, changed, strict=True):
                own.copy_(new)

    def run(self, state: Sequence[Tensor], given: Sequence[Tensor], most: int) -> Sequence[Tensor]:
        with self.lock, torch.cuda.device(self.more.device):
            for own, one in zip((*self.state, *self.given), (*state, *given), strict=True):
                own.copy_(one)
            for _ in range(most):
                self.graph.replay()
                if not self.more:
                    break
            return [own.clone() for own in self.state]


def _like(tensors: Sequence[Tensor]) -> tuple[Like, ...]:
    return tuple((one.shape, one.dtype, one.device) for one in tensors)


@lru_cache(maxsize=4)
def _captured(step: Step, state: tuple[Like, ...], given: tuple[Like, ...]) -> Captured:
    def blank(likes: tuple[Like, ...]) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in likes]

    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(state[0][2]):
        return Captured(step, blank(state), blank(given))
