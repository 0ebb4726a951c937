"""Work of a CUDA device as a graph: to launch small kernels one by one takes longer than to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from threading import Lock, RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

# (*state, *constants) → (*state, whether to go on); shapes stay the same.
Step = Callable[..., tuple[Tensor, ...]]
Like = tuple[torch.Size, torch.dtype, torch.device]
T = TypeVar("T")

# Elements that go into a captured step. Larger steps are not bound by launch overhead, and a graph holds memory.
SMALL = 2**22
# Held while a graph is captured, and by what waits for the whole device, as the beginning of a capture does: that would
# break the capture of another thread.
CAPTURING = RLock()


class Graph(Generic[T]):
    """What a device does with static tensors, captured once, to be done again with other values.

    Graphs of a device are captured on one stream and thus share a workspace of cuBLAS, so one of them runs at a time.
    Those that are ``pooled`` also share the memory of what they compute on the way.
    """

    def __init__(self, inputs: Sequence[Tensor], work: Callable[[], T], pooled: bool = False) -> None:
        self.inputs, self.device = inputs, inputs[0].device
        with CAPTURING, torch.cuda.device(self.device):
            self.running, stream = _shared(self.device)
            self.kernels = torch.cuda.CUDAGraph()
            torch.cuda.current_blas_handle()  # of this thread: it cannot be made during a capture
            pool: Any = _pool(self.device).id if pooled else None
            try:
                with torch.cuda.graph(self.kernels, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    self.result = work()
            except BaseException:
                _end_capture(self.device, stream)
                raise

    @contextmanager
    def filled(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the inputs have these values; the result must be copied before the end."""
        with self.running, torch.cuda.device(self.device):
            try:
                for static, value in zip(self.inputs, values, strict=True):
                    static.copy_(value)
                yield
            finally:
                synchronize(self.device)  # the next thread overwrites them from a stream of its own

    def replay(self) -> None:
        self.kernels.replay()


@cache
def _shared(device: torch.device) -> tuple[Lock, torch.cuda.Stream]:
    """What the graphs of a device have in common: the lock of whichever runs, and the stream to capture on."""
    return Lock(), torch.cuda.Stream(device)


def _end_capture(device: torch.device, stream: torch.cuda.Stream) -> None:
    """After a capture that failed: the device's random generator would still count as captured, and refuse to draw."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


@cache
def _pool(device: torch.device) -> torch.cuda.MemPool:
    """Held also while no graph uses it: a handle of a pool without users is invalid."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


def release_pools() -> None:
    """Gives the memory that graphs share back, as soon as none of them is left."""
    _pool.cache_clear()


def synchronize(device: torch.device) -> None:
    """Waits for what this thread has queued; to wait for the whole device would break a capture of another thread."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def repeated(step: Step, state: Sequence[Tensor], constants: Sequence[Tensor], most: int) -> Sequence[Tensor]:
    """A step until it converges: the state after ``most`` of them, or when one says that nothing is left to do."""
    if state[0].is_cuda and sum(tensor.numel() for tensor in (*state, *constants)) <= SMALL:
        return _captured(step, _like(state), _like(constants)).run(state, constants, most)
    for _ in range(most):
        *state, more = step(*state, *constants)
        if not more:
            break
    return state


class Captured:
    """A step as a graph that changes its state in place."""

    def __init__(self, step: Step, state: Sequence[Tensor], constants: Sequence[Tensor]) -> None:
        self.state = state
        step(*state, *constants)  # warm-up: what is allocated at the first use must not be captured

        def work() -> Tensor:
            *changed, more = step(*state, *constants)
            for static, new in zip(state, changed, strict=True):
                static.copy_(new)
            return more

        self.graph = Graph((*state, *constants), work)

    def run(self, state: Sequence[Tensor], constants: Sequence[Tensor], most: int) -> Sequence[Tensor]:
        with self.graph.filled((*state, *constants)):
            for _ in range(most):
                self.graph.replay()
                if not self.graph.result:
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
