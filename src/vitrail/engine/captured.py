"""Traces as CUDA graphs: for few images, to launch the kernels of a trace one by one takes longer than to run them.

A graph is captured when the same network is traced in the same way for the third time, so that nobody waits for it who
explains one image. It reads the weights where they are, as they are when it runs. What a graph gives is what the eager
trace gives, bit by bit; where a trace cannot be captured, it stays eager.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitrail.engine.trace import Trace, TraceSpec
from vitrail.models.view import View
from vitrail.progress import passed
from vitrail.targets import Target, on_device

EARLIER = 2  # uses before a graph is captured
KEPT = 4  # graphs of a view; each holds the memory of its trace
LARGEST = 64 * 3 * 224 * 224  # numbers in a batch: the kernels of larger ones take longer than their launches

Make = Callable[[Tensor, Sequence[Target]], list[Trace]]


class Capture:
    """The traces of a batch as a graph over static tensors."""

    def __init__(self, make: Make, images: Tensor, targets: Sequence[Target]) -> None:
        self.lock, self.graph = Lock(), torch.cuda.CUDAGraph()
        self.images = images.clone()
        self.targets = [replace(target, **{n: t.clone() for n, t in _classes(target)}) for target in targets]
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.traces = make(self.images, self.targets)

    def run(self, images: Tensor, targets: Sequence[Target]) -> list[Trace]:
        """The traces of other images and classes."""
        with self.lock:
            self.images.copy_(images)
            for static, target in zip(self.targets, targets, strict=True):
                for (_, old), (_, new) in zip(_classes(static), _classes(target), strict=True):
                    old.copy_(new)
            self.graph.replay()
            return [_copied(trace) for trace in self.traces]


class State:
    """What graphs take for granted of a network: how it is made, and where its weights are."""

    def __init__(self, things: list[Any], places: list[int]) -> None:
        self.things, self.places = things, places  # things are compared by identity

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, State)
            and self.places == other.places
            and len(self.things) == len(other.things)
            and all(map(operator.is_, self.things, other.things))
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, module: nn.Module) -> State:
        """That of a network now; in few steps, since every trace asks."""
        things: list[Any] = []
        places: list[int] = []
        waiting = [module]
        while waiting:
            part = waiting.pop()
            tensors = [*part._parameters.values(), *part._buffers.values()]
            things += (*part.__dict__.values(), *tensors, *part._modules.values())
            places += (tensor.data_ptr() for tensor in tensors if tensor is not None)
            places += (len(part._forward_hooks), len(part._forward_pre_hooks))
            waiting += (child for child in part._modules.values() if child is not None)
        return cls(things, places)


class Uses:
    """How often the traces of a view were made in each way, and those that were captured."""

    def __init__(self) -> None:
        self.counts: dict[Hashable, int] = {}
        self.captures: OrderedDict[Hashable, Capture | Exception] = OrderedDict()  # or why it cannot be captured
        self.state = State([], [])

    def check(self, state: State) -> None:
        """Forgets all captures where the network is no longer made as it was, or its weights are elsewhere."""
        if state != self.state:
            self.counts.clear()
            self.captures.clear()
        self.state = state  # holds what was compared, so that nothing else can have its address

    def get(self, key: Hashable, make: Make, images: Tensor, targets: Sequence[Target]) -> Capture | None:
        """The capture, made at the third use."""
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.counts[key] > EARLIER and key not in self.captures:
            try:
                self.captures[key] = Capture(make, images, targets)
            except Exception as error:  # whatever is wrong with the trace itself, the eager one tells
                self.captures[key] = error.with_traceback(None)
            while len(self.captures) > KEPT:
                self.counts.pop(self.captures.popitem(last=False)[0])
        if key in self.captures:
            self.captures.move_to_end(key)
        capture = self.captures.get(key)
        return capture if isinstance(capture, Capture) else None


_uses: WeakKeyDictionary[View, Uses] = WeakKeyDictionary()


def captured(view: View, images: Tensor, targets: Sequence[Target], spec: TraceSpec, make: Make) -> list[Trace] | None:
    """The traces from a graph; None where there is none."""
    if not images.is_cuda or images.numel() > LARGEST or spec.streamed:
        return None
    targets = [on_device(target, images.device) for target in targets]
    given = tuple(tuple(name for name, _ in _classes(target)) for target in targets)
    key = (images.shape, images.dtype, images.device, spec, given, view.output, view.groups)
    uses = _uses.setdefault(view, Uses())
    uses.check(State.of(view.module))
    capture = uses.get(key, make, images, targets)
    if capture is None:
        return None
    traces = capture.run(images, targets)
    passed(len(images))
    return traces


def forget() -> None:
    """Gives the memory of all graphs back."""
    _uses.clear()


def _classes(target: Target) -> list[tuple[str, Tensor]]:
    named = [("index", target.index), ("against", target.against)]
    return [(name, classes) for name, classes in named if classes is not None]


def _copied(trace: Trace) -> Trace:
    """The trace in memory of its own."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        return value.clone() if isinstance(value, Tensor) else value

    names = ("logits", "y", "readout", "kept", "bias", "pooled_bias")
    return replace(trace, **{name: copy(getattr(trace, name)) for name in names})
