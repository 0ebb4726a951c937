"""Traces and scores as CUDA graphs: for few images, to launch kernels one by one takes longer than to run them.

A graph is captured when the same network is run in the same way for the third time, so that nobody waits for it who
explains one image. It reads the weights where they are, as they are when it runs. What a graph gives is what eager work
gives, bit by bit; what cannot be captured stays eager.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitrail.engine.cuda_graph import CAPTURING, Graph, release_pools
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.models.view import View
from vitrail.progress import passed, uncounted
from vitrail.targets import Target, on_device

EARLIER = 2  # uses before a graph is captured
KEPT = 4  # traces of a view; each holds its memory
KEPT_SCORES = 16  # scores of a view; their inputs are held, the rest of their memory is shared
LARGEST = 64 * 3 * 224 * 224  # numbers in a batch: the kernels of larger ones take longer than their launches
MOST_SCORED = 2**25  # numbers in the stream of inputs that are scored: likewise

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


class Scores:
    """The logits of some inputs as a graph."""

    def __init__(self, make: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad(), uncounted():
            inputs = [tensor.clone() for tensor in inputs]
            self.graph = Graph(inputs, partial(make, *inputs), pooled=True)

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """The logits of others."""
        with self.graph.filled(inputs):
            self.graph.replay()
            return self.graph.result.clone()


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
        """That of some networks now; in few steps, since every answer asks."""
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
    """When work of a view was done in each way, and what of it was captured: at most so many."""

    def __init__(self, kept: int = KEPT) -> None:
        self.kept, self.total = kept, 0
        self.times: dict[Hashable, deque[int]] = {}  # of the last uses, by the count of all uses
        self.captures: OrderedDict[Hashable, Capture | Scores] = OrderedDict()  # by last use
        self.failed: set[Hashable] = set()  # what cannot be captured
        self.state = State([], [])

    def check(self, state: State) -> None:
        """Forgets all captures where the network is no longer made as it was, or its weights are elsewhere."""
        if state != self.state:
            self.times.clear()
            self.captures.clear()
            self.failed.clear()
        self.state = state  # holds what was compared, so that nothing else can have its address

    def get(self, key: Hashable, make: Callable[[], Capture | Scores]) -> Any:
        """The capture, made at the third use if there is room for it; None where there is none."""
        self.total += 1
        times = self.times.setdefault(key, deque(maxlen=EARLIER + 1))
        times.append(self.total)
        if key in self.captures:
            self.captures.move_to_end(key)
        elif len(times) > EARLIER and key not in self.failed and self._has_room(since=times[0]):
            try:
                self.captures[key] = make()
            except Exception:  # whatever is wrong with the work itself, the eager one tells
                self.failed.add(key)
        return self.captures.get(key)

    def _has_room(self, since: int) -> bool:
        """Whether another graph can be kept: one that was not used ``since`` then gives way.

        So graphs that are used in turn with others keep their places: nothing is captured again and again.
        """
        if len(self.captures) < self.kept:
            return True
        oldest = next(iter(self.captures))
        if self.times[oldest][-1] > since:
            return False
        del self.captures[oldest], self.times[oldest]
        return True


_traces: WeakKeyDictionary[View, Uses] = WeakKeyDictionary()
_scores: WeakKeyDictionary[View, Uses] = WeakKeyDictionary()


def captured(
    view: View, state: Callable[[], State], images: Tensor, targets: Sequence[Target], spec: TraceSpec, make: Make
) -> list[Trace] | None:
    """The traces from a graph; None where there is none. ``state``: that of the network now."""
    if not images.is_cuda:
        with CAPTURING:
            for uses in (_traces, _scores):
                uses.pop(view, None)  # the network may have been moved
        return None
    if images.numel() > LARGEST or spec.streamed:
        return None
    targets = [on_device(target, images.device) for target in targets]
    named_classes = tuple(tuple(name for name, _ in _classes(target)) for target in targets)
    key = (images.shape, images.dtype, images.device, spec, named_classes, view.output, view.groups, _settings())
    with CAPTURING:
        capture = _present(_traces, view, state(), KEPT).get(key, lambda: Capture(make, images, targets))
    if capture is None:
        return None
    traces: list[Trace] = capture.run(images, targets)
    passed(len(images))
    return traces


def captured_logits(
    view: View, state: Callable[[], State], kind: Hashable, inputs: Sequence[Tensor], make: Callable[..., Tensor]
) -> Tensor | None:
    """What ``make`` makes of the inputs, from a graph; None where there is none.

    Args:
        view: whose network makes it.
        state: that of the network now.
        kind: what tells it from other work for the view with inputs of the same shapes.
        inputs: tensors on the device.
        make: what is captured.
    """
    if not inputs[0].is_cuda or len(inputs[0]) * view.num_tokens * view.width > MOST_SCORED:
        return None
    key = (kind, *((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs), _settings())
    with CAPTURING:
        scores = _present(_scores, view, state(), KEPT_SCORES).get(key, lambda: Scores(make, inputs))
    return None if scores is None else cast(Tensor, scores.run(inputs))


def _present(kind: WeakKeyDictionary[View, Uses], view: View, state: State, kept: int) -> Uses:
    """The uses of the network in this state."""
    uses = kind.setdefault(view, Uses(kept))
    uses.check(state)
    return uses


def forget() -> None:
    """Gives the memory of all graphs back."""
    with CAPTURING:
        _traces.clear()
        _scores.clear()
        release_pools()


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
