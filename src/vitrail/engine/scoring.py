"""Scores of many token subsets or masked images: the one loop behind every mask method and every curve.

Whoever wants scores is a generator that yields requests and is sent their answers; ``together`` runs several at once,
so that the variants of many images share their chunks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitrail.engine.modes import out_of_memory, too_large
from vitrail.engine.ops import Walk
from vitrail.models.view import View
from vitrail.models.vit import ViT, products_in, unchanged
from vitrail.progress import counted

# Sizes of a chunk. The start is chosen by free memory, never by timing; out of memory steps down and goes on.
LADDER = (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
# Beyond this a CPU gains nothing: the activations leave its caches.
CPU_CHUNK, CPU_TOKENS = 64, 3200
# Bytes that one token of one image holds at the widest point of a block, in units of its width × element size.
WIDEST = 14
# How much one chunk may hold: more does not make a GPU faster.
MOST_BYTES = 16 * 2**30

T = TypeVar("T")

_fixed: ContextVar[int | None] = ContextVar("_fixed", default=None)


@dataclass(frozen=True)
class Reading:
    """What is wanted of logits. Requests that read the same way are read together, whatever each is ``about``."""

    def __call__(self, view: View, logits: Tensor, about: Tensor) -> Tensor:
        """(m, C) logits and what each row is about (m, k) → (m, …)."""
        return logits


@dataclass(frozen=True)
class ClassScore(Reading):
    """y of a class; ``about`` holds it and, where it is ``opposed``, its rival."""

    output: str = "probability"
    opposed: bool = False

    def __call__(self, view: View, logits: Tensor, about: Tensor) -> Tensor:
        rival = about[:, 1] if self.opposed else None
        return view.score(at_least_single(logits), about[:, 0], rival, self.output)


@dataclass(kw_only=True)
class Request:
    """Variants of one image that the model is asked about.

    Requests of one key share chunks: their inputs are put one behind another.
    """

    view: View
    count: int
    length: int  # tokens of one variant
    reading: Reading = Reading()
    about: tuple[int, ...] = ()
    name: str = "masks"
    reduced: bool = False  # whether bf16 will do, where the device is faster with it

    @property
    def key(self) -> Hashable:
        return type(self), id(self.view), self.length, self.reading, self.reduced, self.name

    @staticmethod
    def inputs(pieces: Sequence[tuple[Any, slice]]) -> tuple[Tensor, ...]:
        """What ``logits`` takes, of some of the variants of some requests."""
        raise NotImplementedError

    def logits(self, *inputs: Tensor) -> Tensor:
        """(m, C)."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Pictures(Request):
    """Images (m, 3, H, W), made when they are asked for."""

    make: Callable[[slice], Tensor]

    @staticmethod
    def inputs(pieces: Sequence[tuple[Pictures, slice]]) -> tuple[Tensor, ...]:
        return (joined([request.make(part) for request, part in pieces]),)

    def logits(self, *inputs: Tensor) -> Tensor:
        return self.view.logits(*inputs)


@dataclass(kw_only=True)
class Subsets(Request):
    """x_0 ``tokens`` (1, n, d) with only the patches ``keep`` (M, k)."""

    tokens: Tensor
    keep: Tensor

    @staticmethod
    def inputs(pieces: Sequence[tuple[Subsets, slice]]) -> tuple[Tensor, ...]:
        view = pieces[0][0].view
        assert isinstance(view, ViT)
        tokens = joined([request.tokens.expand(size(part), -1, -1) for request, part in pieces])
        keep = joined([request.keep[part] for request, part in pieces])
        return view.present(tokens, keep), keep

    def logits(self, *inputs: Tensor) -> Tensor:
        assert isinstance(self.view, ViT)
        present, keep = inputs
        return Walk(self.view.architecture(), keep=keep).encode(present)


@dataclass(kw_only=True)
class Scorer:
    """Puts questions about one image: y of a class for many variants of it.

    Args:
        view: the model.
        target: the class.
        against: the class it is opposed to.
        output: "probability" or "logit".
        name: what the progress bar says.
        reduced: whether bf16 will do.
    """

    view: View
    target: int
    against: int | None = None
    output: str = "probability"
    name: str = "masks"
    reduced: bool = False

    def subsets(self, tokens: Tensor, keep: Tensor) -> Subsets:
        """The scores (M,) with only the patches ``keep`` (M, k) of x_0 ``tokens`` (1, n, d) present."""
        assert isinstance(self.view, ViT)
        length = keep.shape[1] + self.view.num_prefix
        return Subsets(**self._common(), count=len(keep), length=length, tokens=tokens, keep=keep)

    def images(self, count: int, make: Callable[[slice], Tensor]) -> Pictures:
        """The scores (M,) of the images that ``make`` gives chunk by chunk, (m, 3, H, W) each."""
        return Pictures(**self._common(), count=count, length=picture_length(self.view), make=make)

    def score(self, logits: Tensor) -> Tensor:
        """(m, C) → (m,)."""
        common = self._common()
        about = torch.tensor(common["about"], device=logits.device).expand(len(logits), -1)
        scores: Tensor = common["reading"](self.view, logits, about)
        return scores

    def _common(self) -> dict[str, Any]:
        opposed = self.against is not None
        return {
            "view": self.view,
            "reading": ClassScore(self.output, opposed),
            "about": (self.target, self.against) if opposed else (self.target,),
            "name": self.name,
            "reduced": self.reduced,
        }


# What is asked for, one request or several at once, and what comes back, one answer or one for each.
Asking = Generator[Request | list[Request], Any, T]


def together(jobs: Sequence[Asking[T]], chunks: list[int] | None = None) -> list[T]:
    """Runs generators of requests side by side, each answered as soon as all have asked; their results in order.

    ``chunks`` gets the sizes that were used.
    """
    asking, answers = side_by_side(jobs), None
    while True:
        try:
            asked = asking.send(answers)
        except StopIteration as end:
            found: list[T] = end.value
            return found
        answers = score(asked, chunks)


def side_by_side(jobs: Sequence[Asking[T]]) -> Generator[list[Request], Any, list[T]]:
    """Several generators of requests as one, which asks for all that they ask for at a time."""
    found: dict[int, T] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(jobs)))
    while answers:
        asked: dict[int, Request | list[Request]] = {}
        for i, answer in answers.items():
            try:
                asked[i] = jobs[i].send(answer)
            except StopIteration as end:
                found[i] = end.value
        each = [one if isinstance(one, list) else [one] for one in asked.values()]
        scores = iter((yield [request for own in each for request in own]))
        answers = {
            i: list(islice(scores, len(one))) if isinstance(one, list) else next(scores) for i, one in asked.items()
        }
    return [found[i] for i in range(len(jobs))]


def score(requests: Sequence[Request], chunks: list[int] | None = None) -> list[Tensor]:
    """What each request reads, (M, …). All that have one name move one bar."""
    groups: dict[str, dict[Hashable, list[int]]] = {}
    for i, request in enumerate(requests):
        groups.setdefault(request.name, {}).setdefault(request.key, []).append(i)
    found: dict[int, Tensor] = {}
    for name, own in groups.items():
        total = sum(requests[i].count for members in own.values() for i in members)
        with counted(total, name) as bar:
            for members in own.values():
                run = Run([requests[i] for i in members])
                found.update(zip(members, run.answers(bar), strict=True))
                if chunks is not None:
                    chunks.append(run.chunk)
    return [found[i] for i in range(len(requests))]


@dataclass
class Run:
    """Requests of one key, answered in chunks from the ladder; nothing is computed twice."""

    requests: list[Request]
    chunk: int = field(default=0, init=False)

    def answers(self, bar: Any) -> list[Tensor]:
        first = self.requests[0]
        total, done = sum(request.count for request in self.requests), 0
        self.chunk = first_chunk(first.view, first.length)
        parts: list[Tensor] = []
        with torch.inference_mode(), unchanged():
            while done < total:
                stop = min(done + self.chunk, total)
                read = self._try(self._pieces(done, stop))
                if read is None:  # only now is what the failed chunk held free
                    self.chunk = max(1, self.chunk // 2)
                    torch.cuda.empty_cache()
                    continue
                parts.append(read)
                bar.update(stop - done)
                done = stop
        found = torch.cat(parts).clone()  # no longer of inference mode
        return list(found.split([request.count for request in self.requests]))

    def _pieces(self, start: int, stop: int) -> list[tuple[Request, slice]]:
        """Rows start…stop of all requests in a row, as slices of each."""
        pieces, first = [], 0
        for request in self.requests:
            part = slice(max(start - first, 0), min(stop - first, request.count))
            if part.start < part.stop:
                pieces.append((request, part))
            first += request.count
        return pieces

    def _try(self, pieces: list[tuple[Request, slice]]) -> Tensor | None:
        """What is read of these rows; None if memory ran out."""
        first = self.requests[0]
        sizes = torch.tensor([size(part) for _, part in pieces])
        about = torch.tensor([request.about for request, _ in pieces]).repeat_interleave(sizes, dim=0)
        try:
            inputs = first.inputs(pieces)
            reduced = first.reduced and gains(first.view)
            with (
                torch.autocast(first.view.device.type, torch.bfloat16, enabled=reduced),
                products_in(torch.bfloat16 if reduced else None),
            ):
                logits = first.logits(*inputs)
            return first.reading(first.view, logits, about.to(logits.device))
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if self.chunk == 1:
                raise too_large(1) from None
            return None


def joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def size(part: slice) -> int:
    count: int = part.stop - part.start
    return count


def gains(view: View) -> bool:
    """Whether bf16 is faster than the precision the model is in. Head and logits stay in that precision."""
    return view.device.type == "cuda" and view.dtype == torch.float32 and torch.cuda.is_bf16_supported()


@contextmanager
def fixed_chunks(size: int) -> Iterator[None]:
    """While it lasts chunks have this size, whatever memory is free: the same batches, hence the same bits."""
    token = _fixed.set(size)
    try:
        yield
    finally:
        _fixed.reset(token)


def first_chunk(view: View, length: int) -> int:
    """The chunk to start with: what fits into half of the free memory."""
    fixed = _fixed.get()
    if fixed is not None:
        return fixed
    width = view.blocks[0].norm1.width if isinstance(view, ViT) else 1024
    number = torch.finfo(view.dtype).bits // 8
    fits = min(free_memory(view.device) // 2, MOST_BYTES) // (length * width * number * WIDEST)
    most = min(CPU_CHUNK, CPU_TOKENS // length) if view.device.type == "cpu" else LADDER[0]
    return next((rung for rung in LADDER if rung <= min(fits, most)), 1)


def picture_length(view: View) -> int:
    """Tokens of a whole image; of a hierarchical model those of its first stage, about."""
    return view.grid[0] * view.grid[1] + view.num_prefix if isinstance(view, ViT) else 4096


def at_least_single(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def free_memory(device: torch.device) -> int:
    """Bytes that are free where the model is; what torch holds but does not use counts."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not Linux
        return 4 * 2**30
