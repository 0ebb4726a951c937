"""What can be asked of a network. Whoever needs it is a generator that yields requests and is sent the answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.core.operations import Walk
from vitrail.core.parts import Architecture
from vitrail.core.precision import Scaling
from vitrail.core.rules import Plain
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.models.view import View
from vitrail.targets import Reading, Target

T = TypeVar("T")


@dataclass(eq=False)
class Batch:
    """Images that go through a model together, (B, 3, H, W). Requests about one batch object share its passes."""

    view: View
    images: Tensor
    logits: Tensor | None = None  # as soon as any request has made the forward pass in full precision
    reduced_logits: Tensor | None = None  # likewise in half precision

    def __len__(self) -> int:
        return len(self.images)


@dataclass(eq=False)
class Request:
    """The base of all requests."""


@dataclass(eq=False)
class Logits(Request):
    """The logits (B, C) of a batch: from a trace of it, if there is one, of half precision only if ``reduced``."""

    batch: Batch
    reduced: bool = False

    @property
    def known(self) -> Tensor | None:
        """The answer, where a forward pass has given it."""
        full = self.batch.logits
        return self.batch.reduced_logits if full is None and self.reduced else full


@dataclass(eq=False)
class Tokens(Request):
    """The embedded tokens x_0 (B, P + N, d) of a batch."""

    batch: Batch


@dataclass(eq=False)
class Traced(Request):
    """A trace of a batch. Traces of one batch that differ only in what they keep are one trace."""

    batch: Batch
    target: Target
    spec: TraceSpec


@dataclass(eq=False, kw_only=True)
class Variants(Request):
    """Variants of one image. Those with equal keys share chunks: their inputs are concatenated."""

    view: View
    count: int
    length: int  # tokens of one variant
    reading: Reading = field(default_factory=Reading)
    about: tuple[int, ...] = ()
    name: str = "masks"  # of the progress bar
    products: torch.dtype | None = None  # of matrix products, where it is not that of the network
    same: Hashable = None  # requests with an equal value that is not None have the same answer

    @property
    def key(self) -> Hashable:
        return type(self), id(self.view), self.length, self.reading, self.products, self.name

    @staticmethod
    def inputs(pieces: Sequence[tuple[Any, slice]]) -> tuple[Tensor, ...]:
        """The inputs of ``logits``, for some of the variants of some requests."""
        raise NotImplementedError

    def logits(self, parts: Architecture | None, *inputs: Tensor) -> Tensor:
        """(m, C), of the inputs alone; ``parts``: the network, None where the view has no tokens."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class Pictures(Variants):
    """Images (m, 3, H, W), made when they are needed."""

    make: Callable[[slice], Tensor]

    @staticmethod
    def inputs(pieces: Sequence[tuple[Pictures, slice]]) -> tuple[Tensor, ...]:
        return (joined([request.make(part) for request, part in pieces]),)

    def logits(self, parts: Architecture | None, *inputs: Tensor) -> Tensor:
        return forward(self.view, parts, inputs[0])


@dataclass(eq=False, kw_only=True)
class Subsets(Variants):
    """x_0 ``tokens`` (1, n, d) with only the patches ``keep`` (M, k)."""

    tokens: Tensor
    keep: Tensor

    @staticmethod
    def inputs(pieces: Sequence[tuple[Subsets, slice]]) -> tuple[Tensor, ...]:
        tokens = joined([request.tokens.expand(size(part), -1, -1) for request, part in pieces])
        keep = joined([request.keep[part] for request, part in pieces])
        return pieces[0][0].view.present(tokens, keep), keep

    def logits(self, parts: Architecture | None, *inputs: Tensor) -> Tensor:
        assert parts is not None
        present, keep = inputs
        return Walk(parts, keep=keep).encode(present)


@dataclass(eq=False, kw_only=True)
class PixelGradients(Request):
    """Gradients of the score at images (m, 3, H, W), or what a rule carries back to the pixels in their place.

    The answer is the sum over all images of what ``fold`` makes of their gradients.
    """

    view: View
    count: int
    make: Callable[[slice], Tensor]
    fold: Callable[[Tensor, slice], Tensor]
    target: Target  # of one image, its class known
    rule: Any = "plain"
    output: str = "logit"
    precise: bool = False  # in double precision
    reduced: bool = False  # in half precision
    name: str = "gradients"

    @property
    def key(self) -> Hashable:
        precision = self.precise, self.reduced
        return id(self.view), self.rule, self.output, precision, self.name, self.target.against is None


# What is asked for, one request or several at once, and what comes back: one answer, or one for each.
Asking = Generator[Request | list[Request], Any, T]


def concurrently(askers: Sequence[Asking[T]]) -> Asking[list[T]]:
    """Several askers as one, which asks for all that they ask for at a time; their results in order."""
    results: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(askers)))
    while answers:
        asked: dict[int, Request | list[Request]] = {}
        for i, answer in answers.items():
            try:
                asked[i] = askers[i].send(answer)
            except StopIteration as end:
                results[i] = end.value
        requests = [request for item in asked.values() for request in as_list(item)]
        received = iter((yield requests) if requests else [])
        answers = {
            i: list(islice(received, len(item))) if isinstance(item, list) else next(received)
            for i, item in asked.items()
        }
    return [results[i] for i in range(len(askers))]


def resolved(batch: Batch, target: Target, reduced: bool = False) -> Asking[Target]:
    """The target with the predicted classes filled in: free where a trace of the batch was made before.

    ``reduced``: these may be those of half precision.
    """
    if target.index is not None:
        return target
    logits = yield Logits(batch, reduced)
    check_finite(batch.view, logits)
    return target.resolved(batch.view, logits)


def forward(
    view: View, parts: Architecture | None, images: Tensor, rule: Plain | None = None, scaling: Scaling | None = None
) -> Tensor:
    """(B, 3, H, W) → logits (B, C); ``rule``: how relevance flows back; ``scaling``: of gradients."""
    if parts is None:
        return view.staged(images, ())[0]
    walk = Walk(parts, rule, scaling=scaling)
    return walk.encode(walk.embed(images))


def check_finite(view: View, logits: Tensor) -> None:
    """Refuses logits that are NaN or infinite, with the reason."""
    if logits.isfinite().all():
        return
    broken = [name for name, weight in view.module.named_parameters() if not weight.isfinite().all()]
    if broken:
        reason = f"its weights are broken ({', '.join(broken[:3])}{', …' if len(broken) > 3 else ''})"
    elif view.dtype in (torch.float16, torch.bfloat16):
        reason = f"values overflow in {view.dtype} (try dtype=float32)"
    else:
        reason = "its values overflow"
    raise VitrailError(f"the logits of {view.name} are NaN or infinite: {reason}.")


def as_list(item: Request | list[Request]) -> list[Request]:
    return item if isinstance(item, list) else [item]


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def size(part: slice) -> int:
    """The length of a slice with known ends."""
    length: int = part.stop - part.start
    return length
