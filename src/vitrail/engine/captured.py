"""Traces as CUDA graphs: for few images, to launch the kernels of a trace one by one takes longer than to run them.

A graph is captured when the same network is traced in the same way for the third time, so that nobody waits for it who
explains one image. It reads the weights where they are, as they are when it runs. What a graph gives is what the eager
trace gives, bit by bit; where a trace cannot be captured, it stays eager.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitrail.engine.cuda_graph import CAPTURING, Graph
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.models.view import View
from vitrail.progress import passed, uncounted
from vitrail.targets import Target, on_device

EARLIER = 2  # uses before a graph is captured
KEPT = 4  # graphs of a view; each holds the memory of its trace
LARGEST = 64 * 3 * 224 * 224  # numbers in a batch: the kernels of larger ones take longer than their launches

Make = Callable[[Tensor, Sequence[Target]], list[Trace]]


class Capture:
    """The traces of a batch as a graph."""

    def __init__(self, make: Make, images: Tensor, targets: Sequence[Target]) -> None:
        images = images.clone()
        targets = [replace(target, **{n: t.clone() for n, t in _classes(target)}) for target in targets]
        with uncounted():
            self.graph = Graph(_inputs(images, targets), partial(make, images, targets))

    def run(self, images: Tensor, targets: Sequence[Target]) -> list[Trace]:
        """The traces of other images and classes."""
        with self.graph.filled(_inputs(images, targets)):
            self.graph.replay()
            return [_copied(trace) for trace in self.graph.result]


class State:
    """What graphs take for granted of networks: how they are made, and where their weights are."""

    def __init__(self, parts: list[Any], addresses: list[int]) -> None:
        self.parts, self.addresses = parts, addresses  # parts are compared by identity

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, State)
            and self.addresses == other.addresses
            and len(self.parts) == len(other.parts)
            and all(map(operator.is_, self.parts, other.parts))
        )

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, modules: Iterable[nn.Module]) -> State:
        """That of some networks now; in few steps, since every trace asks."""
        parts: list[Any] = []
        addresses: list[int] = []
        waiting = [*modules]
        while waiting:
            module = waiting.pop()
            tensors = [*module._parameters.values(), *module._buffers.values()]
            parts += (*module.__dict__.values(), *tensors, *module._modules.values())
            addresses += (tensor.data_ptr() for tensor in tensors if tensor is not None)
            addresses += (len(module._forward_hooks), len(module._forward_pre_hooks))
            waiting += (child for child in module._modules.values() if child is not None)
        return cls(parts, addresses)


class Uses:
    """When the traces of a view were made in each way, and those that were captured."""

    def __init__(self) -> None:
        self.total = 0
        self.times: dict[Hashable, deque[int]] = {}  # of the last uses, by the count of all uses
        self.captures: OrderedDict[Hashable, Capture] = OrderedDict()  # by last use
        self.failed: set[Hashable] = set()  # what cannot be captured
        self.state = State([], [])

    def check(self, state: State) -> None:
        """Forgets all captures where the network is no longer made as it was, or its weights are elsewhere."""
        if state != self.state:
            self.times.clear()
            self.captures.clear()
            self.failed.clear()
        self.state = state  # holds what was compared, so that nothing else can have its address

    def get(self, key: Hashable, make: Make, images: Tensor, targets: Sequence[Target]) -> Capture | None:
        """The capture, made at the third use if there is room for it."""
        self.total += 1
        times = self.times.setdefault(key, deque(maxlen=EARLIER + 1))
        times.append(self.total)
        if key in self.captures:
            self.captures.move_to_end(key)
        elif len(times) > EARLIER and key not in self.failed and self._has_room(since=times[0]):
            try:
                self.captures[key] = Capture(make, images, targets)
            except Exception:  # whatever is wrong with the trace itself, the eager one tells
                self.failed.add(key)
        return self.captures.get(key)

    def _has_room(self, since: int) -> bool:
        """Whether another graph can be kept: one that was not used ``since`` then gives way.

        So graphs that are used in turn with others keep their places: nothing is captured again and again.
        """
        if len(self.captures) < KEPT:
            return True
        oldest = next(iter(self.captures))
        if self.times[oldest][-1] > since:
            return False
        del self.captures[oldest], self.times[oldest]
        return True


_uses: WeakKeyDictionary[View, Uses] = WeakKeyDictionary()


def captured(view: View, images: Tensor, targets: Sequence[Target], spec: TraceSpec, make: Make) -> list[Trace] | None:
    """The traces from a graph; None where there is none."""
    if not images.is_cuda:
        with CAPTURING:
            _uses.pop(view, None)  # the network may have been moved
        return None
    if images.numel() > LARGEST or spec.streamed:
        return None
    targets = [on_device(target, images.device) for target in targets]
    named_classes = tuple(tuple(name for name, _ in _classes(target)) for target in targets)
    key = (images.shape, images.dtype, images.device, spec, named_classes, view.output, view.groups, _settings())
    state = State.of(view.modules)
    with CAPTURING:
        uses = _uses.setdefault(view, Uses())
        uses.check(state)
        capture = uses.get(key, make, images, targets)
    if capture is None:
        return None
    traces = capture.run(images, targets)
    passed(len(images))
    return traces


def forget() -> None:
    """Gives the memory of all graphs back."""
    with CAPTURING:
        _uses.clear()


def _settings() -> Hashable:
    """What the process has set that decides which kernels are captured."""
    # unlike allow_tf32, these can be read whichever of torch's ways they were set in
    products = torch.backends.cuda.matmul.fp32_precision
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
    return products, convolutions, deterministic


def _classes(target: Target) -> list[tuple[str, Tensor]]:
    named = [("index", target.index), ("against", target.against)]
    return [(name, classes) for name, classes in named if classes is not None]


def _inputs(images: Tensor, targets: Sequence[Target]) -> list[Tensor]:
    return [images, *(classes for target in targets for _, classes in _classes(target))]


def _copied(trace: Trace) -> Trace:
    """The trace in memory of its own."""

    def copy(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: copy(item) for key, item in value.items()}
        return value.clone() if isinstance(value, Tensor) else value

    names = ("logits", "y", "readout", "kept", "bias", "pooled_bias")
    return replace(trace, **{name: copy(getattr(trace, name)) for name in names})
