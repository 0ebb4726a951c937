"""A step repeated until it converges, on CUDA as a captured graph: small kernels are bound by launch overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor

# (*state, *constants) → (*state, whether to go on); shapes stay the same.
Step = Callable[..., tuple[Tensor, ...]]
Like = tuple[torch.Size, torch.dtype, torch.device]

# Elements that go into a captured step. Larger steps are not bound by launch overhead, and a graph holds memory.
SMALL = 2**22


def repeated(step: Step, state: Sequence[Tensor], constants: Sequence[Tensor], most: int) -> Sequence[Tensor]:
    """The state after the last step: after ``most`` of them, or when one says that nothing is left to do."""
    if state[0].is_cuda and sum(tensor.numel() for tensor in (*state, *constants)) <= SMALL:
        return _captured(step, _like(state), _like(constants)).run(state, constants, most)
    for _ in range(most):
        *state, more = step(*state, *constants)
        if not more:
            break
    return state


class Captured:
    """A step as a CUDA graph over static tensors."""

    def __init__(self, step: Step, state: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        self.lock, self.graph = Lock(), torch.cuda.CUDAGraph()
        self.state, self.constants = state, constants
        step(*state, *constants)  # warm-up: what is allocated at the first use must not be captured
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            *changed, self.more = step(*state, *constants)
            for static, new in zip(state, changed, strict=True):
                static.copy_(new)

    def run(self, state: Sequence[Tensor], constants: Sequence[Tensor], most: int) -> Sequence[Tensor]:
        with self.lock, torch.cuda.device(self.more.device):
            for static, value in zip((*self.state, *self.constants), (*state, *constants), strict=True):
                static.copy_(value)
            for _ in range(most):
                self.graph.replay()
                if not self.more:
                    break
            return [static.clone() for static in self.state]


def _like(tensors: Sequence[Tensor]) -> tuple[Like, ...]:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)


@lru_cache(maxsize=4)
def _captured(step: Step, state: tuple[Like, ...], constants: tuple[Like, ...]) -> Captured:
    def blank(likes: tuple[Like, ...]) -> list[Tensor]:
        return [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in likes]

    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(state[0][2]):
        return Captured(step, blank(state), blank(constants))
