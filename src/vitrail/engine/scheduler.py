"""The scheduler: it answers what methods, metrics and predictions ask of networks.

Requests of one kind are batched across methods, metrics and images; traces of one batch that differ only in what they
keep are one trace. Chunk sizes, precision, out of memory and progress live here and nowhere else.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from vitrail.core.memory import out_of_memory
from vitrail.core.operations import Walk
from vitrail.core.parts import Architecture, converted
from vitrail.core.precision import HALF, Scaling, lowered
from vitrail.core.rules import get_rule
from vitrail.engine.captured import State, captured, captured_logits, forget
from vitrail.engine.cuda_graph import CAPTURING, synchronize
from vitrail.engine.modes import own_modes, too_large
from vitrail.engine.requests import (
    Asking,
    Logits,
    PixelGradients,
    Request,
    Tokens,
    Traced,
    Variants,
    as_list,
    forward,
    joined,
    size,
)
from vitrail.engine.trace import Lazy, Trace, TraceSpec, join_traces, make_traces, read_parts
from vitrail.errors import VitrailError
from vitrail.models.view import View
from vitrail.progress import counted
from vitrail.targets import Target

# Chunk sizes. The first is chosen by free memory, never by timing; out of memory steps down and goes on.
LADDER = (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
# Larger chunks gain nothing on a CPU: the activations leave its caches.
CPU_CHUNK, CPU_TOKENS, CPU_GRADIENTS = 64, 3200, 8
# Bytes that one token of one image holds at the widest point of a block, in units of its width × element size.
WIDEST = 14
# Bytes that one chunk may hold: more does not make a GPU faster.
MOST_BYTES = 16 * 2**30
# Bytes of attention and its gradients that a trace may store; beyond, each block is computed again when they are read.
MOST_STORED = 4 * 2**30
SHARED = (Traced, Logits, Tokens)  # requests that jobs may have in common
TARGETS_AT_ONCE = 8  # whose traces share one forward pass; each holds its own gradients

T = TypeVar("T")


@dataclass(eq=False)
class Job(Generic[T]):
    """An asker that the scheduler runs: its result or its error, and the seconds it took.

    A trace that jobs share counts for each of them; chunks that they share count by their share of the variants.
    """

    asker: Asking[T]
    seconds: float = 0.0
    error: Exception | None = None
    _result: T | None = None
    requests: list[Request] = field(default_factory=list)
    _several: bool = False
    _answers: dict[int, Any] = field(default_factory=dict)  # by place in requests

    @property
    def result(self) -> T:
        """What the asker returned; raises what it raised."""
        if self.error is not None:
            raise self.error
        return cast(T, self._result)

    def advance(self, answers: Any) -> bool:
        """Sends the answers; whether it asks for more."""
        begin = time.perf_counter()
        try:
            item = self.asker.send(answers)
        except StopIteration as end:
            self._result = end.value
            return False
        except Exception as error:
            self.error = error
            return False
        finally:
            self.seconds += time.perf_counter() - begin
        self.requests, self._several, self._answers = as_list(item), isinstance(item, list), {}
        return True

    @property
    def open(self) -> list[tuple[int, Request]]:
        """The requests that have no answer yet."""
        return [(place, request) for place, request in enumerate(self.requests) if place not in self._answers]

    @property
    def answers(self) -> Any:
        ordered = [self._answers[place] for place in range(len(self.requests))]
        return ordered if self._several else ordered[0]


Waiting = tuple[Job[Any], int, Any]  # a job, the place of one of its requests, and that request


class Scheduler:
    """Runs jobs and answers their requests.

    Args:
        chunk_size: variants per chunk; None = by free memory. A fixed size gives the same bits whatever memory is free.
        plan: traces that will be asked for. What they keep is made together from the start, so that results do not
            depend on which of the methods are still to be run.
    """

    def __init__(self, chunk_size: int | None = None, plan: Iterable[TraceSpec] = ()) -> None:
        self.chunk_size = chunk_size
        self.plan = merged(plan)
        self.host = next(iter(self.plan), None)  # the kind of trace that requests without gradients join
        self.smallest_chunk: int | None = None  # that was used
        self._parts: dict[tuple[int, torch.dtype | None], Architecture | None] = {}
        self._states: dict[int, State] = {}

    def run(self, askers: Sequence[Asking[T]]) -> list[T]:
        """The results in order; the first error ends everything."""
        jobs = [Job(asker) for asker in askers]
        self.run_jobs(jobs, isolated=False)
        return [job.result for job in jobs]

    def run_jobs(self, jobs: Sequence[Job[Any]], isolated: bool = True) -> None:
        """Runs jobs side by side. If ``isolated``, a job that fails keeps its error and the others go on."""
        for _ in self._run(jobs, isolated, apart=False):
            pass

    def finished(self, jobs: Sequence[Job[Any]], isolated: bool = True) -> Iterator[Job[Any]]:
        """As ``run_jobs``, but yields each job as soon as it ends.

        Jobs share traces, logits and tokens; variants and gradients are answered job by job, so that the first results
        do not wait for the last, and the chunks of a job do not depend on what other jobs there are.
        """
        return self._run(jobs, isolated, apart=True)

    def _run(self, jobs: Sequence[Job[Any]], isolated: bool, apart: bool) -> Iterator[Job[Any]]:
        with own_modes():
            waiting = self._advance([(job, None) for job in jobs], isolated)
            yield from (job for job in jobs if job not in waiting)
            while waiting:
                shared = any(isinstance(request, SHARED) for job in waiting for _, request in job.open)
                if not shared and not waiting[0].requests:  # it asked for nothing: it works on its own
                    ready = waiting[:1]
                else:
                    self._answer_next(waiting, isolated, apart)
                    ready = [job for job in waiting if job.requests and not job.open and job.error is None]
                asking = self._advance([(job, job.answers) for job in ready], isolated)
                ended = [job for job in waiting if job.error is not None or (job in ready and job not in asking)]
                waiting = [job for job in waiting if job not in ended]
                yield from ended

    def _advance(self, jobs: Sequence[tuple[Job[Any], Any]], isolated: bool) -> list[Job[Any]]:
        """Sends each job its answers; those that ask for more."""
        asking = []
        for job, answers in jobs:
            if job.advance(answers):
                asking.append(job)
            elif job.error is not None and not isolated:
                raise job.error
        return asking

    def _answer_next(self, jobs: Sequence[Job[Any]], isolated: bool, apart: bool) -> None:
        """Answers one group of requests: a trace, else logits or tokens, else gradients or variants.

        A trace goes to its jobs before the next is made, so that few are held at a time. Gradients and variants are
        those of all jobs together, or of the first that has any where jobs are kept ``apart``.
        """
        requests: list[Waiting] = [(job, place, request) for job in jobs for place, request in job.open]
        self._parts, self._states = {}, {}  # weights may have changed since the last answer
        traced = [item for item in requests if isinstance(item[2], Traced)]
        known = [item for item in requests if isinstance(item[2], Logits) and item[2].known is not None]
        if known:
            for job, place, request in known:
                job._answers[place] = request.known
        elif traced:
            self._try(self._trace, self._together(traced), isolated)
        elif logits := [item for item in requests if isinstance(item[2], Logits)]:
            self._try(self._logits, [item for item in logits if item[2].batch is logits[0][2].batch], isolated)
        elif tokens := [item for item in requests if isinstance(item[2], Tokens)]:
            self._try(self._tokens, [item for item in tokens if item[2].batch is tokens[0][2].batch], isolated)
        else:
            selected = [item for item in requests if not apart or item[0] is requests[0][0]]
            gradients = [item for item in selected if isinstance(item[2], PixelGradients)]
            self._try(*((self._gradients, gradients) if gradients else (self._variants, selected)), isolated)
        self._parts, self._states = {}, {}  # nor are copies of them held while results are used

    def _try(self, answer: Callable[[list[Waiting]], None], items: list[Waiting], isolated: bool) -> None:
        """Answers a group; if that fails, each job on its own, so that it fails alone."""
        try:
            answer(items)
        except Exception as error:
            jobs = list(dict.fromkeys(job for job, _, _ in items))
            if not isolated:
                raise
            if len(jobs) == 1:
                jobs[0].error = error
                return
            for job in jobs:
                self._try(answer, [item for item in items if item[0] is job and item[1] not in job._answers], isolated)

    def _together(self, items: list[Waiting]) -> list[Waiting]:
        """Those of the trace requests that one forward pass answers along with the first.

        Requests for several targets have a backward pass each. Requests without gradients join the first trace of their
        batch: forward values know no rule. Where traces are planned that is the first of the plan, whoever is still to
        be run.
        """
        backward = [item for item in items if item[2].spec.backward]
        lead: Traced = (backward or items)[0][2]
        hosts = not backward or self.host is None or lead.spec.kind == self.host
        alike = [
            item
            for item in items
            if item[2].batch is lead.batch
            and lead.spec.serves(item[2].spec)
            and (item[2].spec.kind == lead.spec.kind if item[2].spec.backward else hosts)
        ]
        targets = list(dict.fromkeys(item[2].target for item in alike if item[2].spec.backward))[:TARGETS_AT_ONCE]
        return [item for item in alike if item[2].target in targets or not item[2].spec.backward]

    def _trace(self, items: list[Waiting]) -> None:
        begin = time.perf_counter()
        requests: list[Traced] = [item[2] for item in items]
        lead = next((request for request in requests if request.spec.backward), requests[0])
        spec = lead.spec
        for request in requests:
            spec = spec.united(request.spec)
        kind = spec.kind if spec.backward else self.host
        if kind in self.plan and self.plan[kind].serves(spec):
            spec = self.plan[kind].united(spec)
        batch, view = lead.batch, lead.batch.view
        targets = dict.fromkeys([lead.target, *(request.target for request in requests if request.spec.backward)])
        spec = replace(spec, streamed=len(targets) * stored_bytes(view, len(batch), spec) > MOST_STORED)

        def make(images: Tensor, part: slice) -> list[Trace]:
            rows = [target.rows(part) for target in targets]
            if spec.reduced:
                made = self._traces(view, images, rows, spec)
                if all(is_finite(trace) for trace in made):
                    return made
            return self._traces(view, images, rows, replace(spec, reduced=False))

        traces = dict(zip(targets, halved(view, batch.images, make, join_each), strict=True))
        first = traces[lead.target]
        logits = first.logits.to(batch.images.dtype)
        if spec.reduced:
            batch.reduced_logits = logits if batch.reduced_logits is None else batch.reduced_logits
        else:
            batch.logits = logits if batch.logits is None else batch.logits
        synchronize(batch.images.device)
        seconds = time.perf_counter() - begin
        for job, place, request in items:
            job._answers[place] = traces.get(request.target, first)
        for job in dict.fromkeys(job for job, _, _ in items):
            job.seconds += seconds

    def _traces(self, view: View, images: Tensor, targets: Sequence[Target], spec: TraceSpec) -> list[Trace]:
        """From a graph, where there is one; the parts that they tell are those in full precision."""
        dtype = HALF if spec.reduced else None

        def make(images: Tensor, targets: Sequence[Target]) -> list[Trace]:
            return make_traces(view, present_parts(view, dtype), images, targets, spec)

        made = captured(view, partial(self.state, view), images, targets, spec, make)
        if made is None:
            made = make_traces(view, self.parts(view, dtype), images, targets, spec)
            if dtype is None:
                return made
        width = torch.float64 if spec.precise else view.precision
        network = cache(lambda: cast(Architecture, converted(self.parts(view), width)))
        return [replace(trace, parts=network) for trace in made]

    def _logits(self, items: list[Waiting]) -> None:
        begin = time.perf_counter()
        batch = items[0][2].batch
        view = batch.view
        with torch.no_grad():
            batch.logits = halved(view, batch.images, lambda images, _: self._forward(view, images), torch.cat)
        synchronize(batch.images.device)
        seconds = time.perf_counter() - begin
        for job, place, _ in items:
            job._answers[place] = batch.logits
            job.seconds += seconds

    def _forward(self, view: View, images: Tensor) -> Tensor:
        """The logits of images in full precision, from a graph where there is one."""
        if (parts := self.parts(view)) is None:
            return forward(view, parts, images)

        def make(static: Tensor) -> Tensor:
            return forward(view, present_parts(view), static)

        made = captured_logits(view, partial(self.state, view), "forward", [images], make)
        return forward(view, parts, images) if made is None else made

    def _tokens(self, items: list[Waiting]) -> None:
        batch = items[0][2].batch
        parts = self.parts(batch.view)
        if parts is None:
            raise VitrailError(f"{batch.view.name} has no tokens to embed: it is hierarchical.")
        with torch.no_grad():
            embedded = halved(batch.view, batch.images, lambda images, _: Walk(parts).embed(images), torch.cat)
        for job, place, _ in items:
            job._answers[place] = embedded

    def _variants(self, items: list[Waiting]) -> None:
        """All requests; those with one name move one progress bar."""
        first_of: dict[Hashable, int] = {}  # requests with the same answer → the one that is computed
        groups: dict[str, dict[Hashable, list[int]]] = {}
        for i, (_, _, request) in enumerate(items):
            if first_of.setdefault(i if request.same is None else request.same, i) == i:
                groups.setdefault(request.name, {}).setdefault(request.key, []).append(i)
        answers: dict[int, Tensor] = {}
        seconds: dict[int, float] = {}
        for name, group in groups.items():
            with counted(sum(items[i][2].count for places in group.values() for i in places), name) as bar:
                for places in group.values():
                    begin, requests = time.perf_counter(), [items[i][2] for i in places]
                    for i, answer in zip(places, self._in_chunks(requests, bar), strict=True):
                        answers[i] = answer
                    spent, total = time.perf_counter() - begin, max(sum(request.count for request in requests), 1)
                    seconds.update({i: spent * items[i][2].count / total for i in places})
        for i, (job, place, request) in enumerate(items):
            source = i if request.same is None else first_of[request.same]
            job._answers[place] = answers[source]
            job.seconds += seconds[source]

    def _in_chunks(self, requests: list[Any], bar: Any) -> list[Tensor]:
        """Requests of one key, answered in chunks from the ladder; nothing is computed twice."""
        lead: Variants = requests[0]
        parts = self.parts(lead.view, lead.products)
        autocast = lead.products is not None and parts is None  # of networks without tokens

        def answer(pieces: list[tuple[Any, slice]]) -> Tensor:
            sizes = torch.tensor([size(part) for _, part in pieces])
            about = torch.tensor([request.about for request, _ in pieces]).repeat_interleave(sizes, dim=0)
            inputs = lead.inputs(pieces)
            with torch.autocast(lead.view.device.type, lead.products, enabled=autocast):
                logits = self._scores(lead, parts, inputs)
            return lead.reading(lead.view, logits, about.to(logits.device))

        with torch.inference_mode():
            chunk = self.first_chunk(lead.view, lead.length)
            read = torch.cat(self._chunked(requests, chunk, answer, bar))
            if lead.products is not None and not read.isfinite().all():  # beyond the range of half precision
                parts, autocast = self.parts(lead.view), False
                read = torch.cat(self._chunked(requests, chunk, answer, counted(0, "")))
        rows = read.clone()  # no longer of inference mode
        return list(rows.split([request.count for request in requests]))

    def _scores(self, lead: Variants, parts: Architecture | None, inputs: tuple[Tensor, ...]) -> Tensor:
        """The logits of a chunk, from a graph where there is one."""
        if parts is None:
            return lead.logits(parts, *inputs)
        view, dtype = lead.view, None if parts is self.parts(lead.view) else lead.products

        def make(*static: Tensor) -> Tensor:
            return lead.logits(present_parts(view, dtype), *static)

        made = captured_logits(view, partial(self.state, view), (type(lead), dtype), inputs, make)
        return lead.logits(parts, *inputs) if made is None else made

    def _gradients(self, items: list[Waiting]) -> None:
        groups: dict[Hashable, list[Waiting]] = {}
        for item in items:
            groups.setdefault(item[2].key, []).append(item)
        for group in groups.values():
            begin, requests = time.perf_counter(), [item[2] for item in group]
            with counted(sum(request.count for request in requests), requests[0].name, "step") as bar:
                sums = self._gradient_sums(requests, bar)
            share = (time.perf_counter() - begin) / len(group)
            for (job, place, _), answer in zip(group, sums, strict=True):
                job._answers[place] = answer
                job.seconds += share

    def _gradient_sums(self, requests: list[PixelGradients], bar: Any) -> list[Tensor]:
        lead = requests[0]
        parts, view = self.parts(lead.view), lead.view
        dtype = torch.float64 if lead.precise and view.device.type != "mps" else view.precision
        parts = parts if parts is None or dtype == view.precision else converted(parts, dtype)
        rule = get_rule(lead.rule) if isinstance(lead.rule, str) else lead.rule
        reading = lead.target.reading(lead.output)
        half = self.parts(view, HALF) if lead.reduced and not lead.precise else None
        sums: dict[int, Tensor] = {}

        def gradient_at(images: Tensor, about: Tensor, parts: Architecture | None) -> Tensor:
            scaling = Scaling() if parts is not None and parts is half else None
            score = reading(view, forward(view, parts, images, rule, scaling), about).sum()
            (gradient,) = torch.autograd.grad(score, images)
            return gradient if scaling is None else scaling.leave(gradient)

        def answer(pieces: list[tuple[Any, slice]]) -> list[tuple[int, Tensor]]:
            sizes = [size(part) for _, part in pieces]
            abouts = torch.tensor([request.target.about for request, _ in pieces])
            about = abouts.repeat_interleave(torch.tensor(sizes), dim=0).to(view.device)
            with torch.enable_grad():
                images = joined([request.make(part) for request, part in pieces]).detach().clone()
                images = images.to(dtype).requires_grad_()
                gradient = gradient_at(images, about, half or parts)
                if half is not None and not gradient.sum().isfinite():
                    gradient = gradient_at(images, about, parts)
            split = zip(pieces, gradient.split(sizes), strict=True)
            return [(id(request), request.fold(piece, part)) for (request, part), piece in split]

        depth = 1 if parts is None else len(parts.blocks)
        chunk = self.first_chunk(view, view.num_tokens * depth, CPU_GRADIENTS)
        for folded in self._chunked(requests, chunk, answer, bar):
            for key, value in folded:
                sums[key] = sums[key] + value if key in sums else value
        return [sums[id(request)] for request in requests]

    def _chunked(
        self, requests: Sequence[Any], chunk: int, answer: Callable[[list[tuple[Any, slice]]], Any], bar: Any
    ) -> list[Any]:
        """What ``answer`` makes of each chunk of all variants in a row; out of memory halves the chunk."""
        total, done = sum(request.count for request in requests), 0
        answers = []
        while done < total:
            stop = min(done + chunk, total)
            try:
                answers.append(answer(pieces_of(requests, done, stop)))
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if chunk == 1:
                    raise too_large(requests[0].view.name) from None
                failed = True
            else:
                failed = False
            if failed:  # only here is what the failed chunk held free again
                chunk = max(1, chunk // 2)
                empty_cache()
                continue
            self.smallest_chunk = min(chunk, self.smallest_chunk or chunk)
            bar.update(stop - done)
            done = stop
        return answers

    def first_chunk(self, view: View, length: int, most_on_cpu: int = CPU_CHUNK) -> int:
        """The chunk to start with: what fits into half of the free memory."""
        if self.chunk_size is not None:
            return self.chunk_size
        number = torch.finfo(view.precision).bits // 8
        fits = min(free_memory(view.device) // 2, MOST_BYTES) // (length * view.width * number * WIDEST)
        most = min(most_on_cpu, max(CPU_TOKENS // length, 1)) if view.device.type == "cpu" else LADDER[0]
        return next((rung for rung in LADDER if rung <= min(fits, most)), 1)

    def parts(self, view: View, dtype: torch.dtype | None = None) -> Architecture | None:
        """The network's parts, read once per answer; with the blocks' products in ``dtype`` where it is given."""
        key = (id(view), dtype)
        if key not in self._parts:
            self._parts[key] = present_parts(view, dtype)
        return self._parts[key]

    def state(self, view: View) -> State:
        """How the network is made, looked at once per answer."""
        if id(view) not in self._states:
            self._states[id(view)] = State.of(view.modules)
        return self._states[id(view)]


def present_parts(view: View, dtype: torch.dtype | None = None) -> Architecture | None:
    """The network's parts as they are now, with the blocks' products in ``dtype`` where it is given."""
    with torch.inference_mode(False), torch.no_grad():
        parts = read_parts(view)
        return parts if dtype is None or parts is None else lowered(parts, dtype)


def merged(specs: Iterable[TraceSpec]) -> dict[Hashable, TraceSpec]:
    """One trace specification per kind, which keeps what all of that kind keep; the first also what has no gradient."""
    by_kind: dict[Hashable, TraceSpec] = {}
    forward_only: list[TraceSpec] = []
    for spec in specs:
        if spec.backward:
            by_kind[spec.kind] = by_kind[spec.kind].united(spec) if spec.kind in by_kind else spec
        else:
            forward_only.append(spec)
    for kind in list(by_kind)[:1]:
        for spec in forward_only:
            if by_kind[kind].serves(spec):
                by_kind[kind] = by_kind[kind].united(spec)
    return by_kind


def halved(
    view: View, images: Tensor, make: Callable[[Tensor, slice], T], join: Callable[[Any], T], first: int = 0
) -> T:
    """What ``make`` makes of images and their places in the batch; in halves where memory runs out."""
    try:
        return make(images, slice(first, first + len(images)))
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        if len(images) == 1:
            raise too_large(view.name) from None
    empty_cache()
    half = len(images) // 2
    return join(
        [
            halved(view, images[:half], make, join, first),
            halved(view, images[half:], make, join, first + half),
        ]
    )


def join_each(parts: Sequence[list[Trace]]) -> list[Trace]:
    """Traces of parts of a batch for several targets, as one of the whole for each target."""
    return [join_traces(traces) for traces in zip(*parts, strict=True)]


def pieces_of(requests: Sequence[Any], start: int, stop: int) -> list[tuple[Any, slice]]:
    """Rows start…stop of all requests in a row, as slices of each."""
    pieces, first = [], 0
    for request in requests:
        part = slice(max(start - first, 0), min(stop - first, request.count))
        if part.start < part.stop:
            pieces.append((request, part))
        first += request.count
    return pieces


def is_finite(trace: Trace) -> bool:
    """Whether no value of a trace is beyond the range of its precision."""
    stored = [layers for layers in trace.kept.values() if not isinstance(layers, Lazy)]  # these check themselves
    values = [t for layers in (*stored, trace.bias) for t in layers.values()]
    return bool(torch.stack(torch._foreach_norm([trace.logits, trace.y, *values], 1)).isfinite().all())


def stored_bytes(view: View, images: int, spec: TraceSpec) -> int:
    """Bytes of attention and its gradients that a trace stores unless it is streamed."""
    if not view.has_tokens:
        return 0
    heads = sum(view.heads[layer] for _, layer in spec.matrices(view.num_layers))
    number = 8 if spec.precise else torch.finfo(view.precision).bits // 8
    return images * heads * math.prod(view.grid) ** 2 * number


def empty_cache() -> None:
    with CAPTURING:
        forget()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device; what torch holds but does not use counts."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not Linux
        return 4 * 2**30
