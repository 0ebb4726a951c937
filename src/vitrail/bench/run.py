"""Running a plan: what is missing is computed, what is there is kept, what fails is noted."""

from __future__ import annotations

import hashlib
import io
import json
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.api import BATCH
from vitrail.bench.applicability import check_metrics_apply
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.store import Keeper, Store, environment
from vitrail.data.annotations import class_map
from vitrail.data.base import DataSet, Example
from vitrail.data.images import image_hash
from vitrail.data.names import data_name
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.evaluation import (
    Evaluation,
    Explained,
    Failure,
    Finding,
    Sight,
    Task,
    build_methods,
    build_metrics,
    explained_classes,
    open_examples,
)
from vitrail.files import printable
from vitrail.methods.base import Method
from vitrail.models.preprocessing import Preprocess
from vitrail.models.view import View

EVERY = 3.0  # seconds between parts
CHEAP = 4  # passes of a method that is explained again where a plan spares the dear ones
FIXED_CHUNK = 64
THUMBNAIL = 192

Loader = Callable[[ModelSpec], View]
Pair = tuple[str, str, str]  # method call, metric call, explained class


@dataclass
class Outcome:
    """What a run did."""

    images: int = 0  # measured now
    known: int = 0  # measured before
    rows: int = 0
    errors: int = 0
    failed_before: int = 0  # rows of the plan that an earlier call could not measure, and this one did not try again
    first_error: str | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """All rows of the plan that have no value, whenever they failed."""
        return self.errors + self.failed_before


@dataclass(frozen=True)
class Step:
    """What a run has just done, for whoever watches."""

    model: str
    done: int
    total: int
    rows: Sequence[Mapping[str, Any]]


def load_model(spec: ModelSpec) -> View:
    """The model of a plan, seen through the plan's preprocessing."""
    from vitrail.models.loading import load

    view = load(spec.name, **spec.options)
    if spec.preprocessing:
        try:
            view.preprocessing = Preprocess.from_dict(view.preprocessing.to_dict() | spec.preprocessing)
        except TypeError:
            usual = view.preprocessing.to_dict()
            raise VitrailError(
                f"the model {spec.name} has preprocessing = {spec.preprocessing}, expected values as in {usual}."
            ) from None
    return view


def run(
    plan: Plan,
    out: str | Path,
    *,
    load: Loader = load_model,
    watch: Callable[[Step], None] | None = None,
    positions: Sequence[int] | None = None,
    retry: bool = False,
) -> Outcome:
    """Measures all that the plan asks for and ``out`` does not hold yet.

    Args:
        plan: what to do.
        out: the run folder, new or begun.
        load: makes the view of a model.
        watch: is told of every step.
        positions: only these images of the data, for a share of the work.
        retry: tries again what failed before.
    """
    store, outcome, begin = Store(out), Outcome(), time.perf_counter()
    with store.locked():
        data = open_plan_data(plan)
        for spec in plan.models:
            view = load(spec)
            worker = ModelRun(plan, spec.name, view, data, store, outcome, watch, retry)
            check_metrics_apply(worker)
            store.begin(plan, environment(view.device))  # only now: what the plan names is known to be there
            worker.go(positions, store.done(plan.maps))
            del view, worker
    outcome.seconds = time.perf_counter() - begin
    return outcome


def open_plan_data(plan: Plan) -> DataSet:
    """The images of a plan."""
    data = open_examples(plan.data, None if plan.indices else plan.images, plan.seed)
    return data.subset(indices=plan.indices) if plan.indices else data


@dataclass
class ModelRun:
    """One model over the data."""

    plan: Plan
    name: str
    view: View
    data: DataSet
    keeper: Keeper
    outcome: Outcome
    watch: Callable[[Step], None] | None = None
    retry: bool = False
    buffer: list[dict[str, Any]] = field(default_factory=list)
    maps: dict[str, Tensor] = field(default_factory=dict)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    fresh: list[dict[str, Any]] = field(default_factory=list)  # what whoever watches has not been told

    def __post_init__(self) -> None:
        plan, view = self.plan, self.view
        self.remap = class_map(view, self.data)
        self.explained = explained_classes(plan.target, plan.protocol)
        # by what they are, not by how the plan spells them: tis and tis(masks=1024) are the same work
        built = build_methods(view, plan.methods)
        self.methods = {method.call: method for method in built}
        # of the plan, not of what is missing: a run that was stopped goes on with the same traces
        self.traces = traces_of(self.methods.values())
        self.metrics = {metric.call: metric for metric in build_metrics(plan.metrics, plan.protocol)}
        about = json.dumps(view.preprocessing.to_dict(), sort_keys=True)
        self.model_hash = _hash(view.fingerprint(), about)
        self.data_name = data_name(plan.data)
        self.size = 1 if plan.deterministic else plan.batch_size or BATCH.get(view.device.type, 4)
        self.pairs: list[Pair] = [
            (method, metric, kind)
            for method in self.methods
            for metric in self.metrics
            if self._affordable(method, metric)
            for kind in self.explained
        ]
        self.written = time.monotonic()

    def go(self, positions: Sequence[int] | None, done: Mapping[str, str | None]) -> None:
        """Images in order, but for what is done (key → error); those that lack the same go together."""
        waiting = dict[tuple[Pair, ...], list[tuple[Example, str]]]()
        places = range(len(self.data)) if positions is None else positions
        with ExitStack() as stack:
            stack.callback(self._flush)
            for count, place in enumerate(places, 1):
                read = self._read(place, done)
                if read is not None:
                    waiting.setdefault(read[0], []).append(read[1:])
                for pairs, group in list(waiting.items()):
                    if len(group) == self.size or count == len(places):
                        self._measure(waiting.pop(pairs), pairs)
                self._tell(count, len(places))

    def _read(self, place: int, done: Mapping[str, str | None]) -> tuple[tuple[Pair, ...], Example, str] | None:
        """What an image lacks, the image and its hash; None if nothing, or if it is broken."""
        try:
            example = self.data[place]
        except Exception as error:
            name = self.data.ids[place]
            if self._lacks(key := self._reading_key(name), done):
                self._note([{"image": name, "error": _told(error), "key": key}], errors=1)
            return None
        if done.get(key := self._reading_key(example.id)):  # it could not be read before
            self._keep([{"image": example.id, "key": key}])
        content = image_hash(example.image)
        about = _hash(example.id, content, _annotations(example))
        lacking = tuple(pair for pair in self.pairs if self._lacks(self._key(about, pair), done))
        if not lacking:
            self.outcome.known += 1
            return None
        return lacking, example, about

    def _lacks(self, key: str, done: Mapping[str, str | None]) -> bool:
        """Whether a row is still to be made; one that failed is not, unless it shall be tried again."""
        if key not in done:
            return True
        reason = done[key]
        if reason is None or self.retry:
            return reason is not None
        self.outcome.failed_before += 1
        self.outcome.first_error = self.outcome.first_error or reason
        return False

    def _measure(self, group: list[tuple[Example, str]], pairs: tuple[Pair, ...]) -> None:
        """All rows of some images, put into the buffer together."""
        hashes = {id(example): about for example, about in group}
        rows: list[dict[str, Any]] = []
        errors, sights = 0, dict[int, Sight]()
        if self.view.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.view.device)
        for kind in self.explained:
            wanted: dict[str, list[str]] = {}
            for method, metric, explained in pairs:
                if explained == kind:
                    wanted.setdefault(method, []).append(metric)
            for result in self._results([example for example, _ in group], wanted, kind):
                if isinstance(result, Failure):
                    errors += 1
                    example, made = result.example, self._failed(result)
                else:
                    example, made = result.sight.example, self._rows(result)
                    sights[id(example)] = result.sight
                about = hashes[id(example)]
                for pair, row in made:
                    rows.append({**row, "metric": pair[1], "key": self._key(about, pair), "image_hash": about})
        self._note(rows, errors)
        self.outcome.images += len(group)
        if self.plan.maps:
            self.pictures += [self._picture(sights[id(example)]) for example, _ in group if id(example) in sights]

    def _results(
        self, examples: list[Example], wanted: dict[str, list[str]], kind: Explained
    ) -> list[Finding | Failure]:
        """What is measured; what fails was tried image by image and metric by metric."""
        tasks = [
            Task(self.methods[method], [self.metrics[name] for name in metrics]) for method, metrics in wanted.items()
        ]
        chunk = FIXED_CHUNK if self.plan.deterministic else None
        evaluation = Evaluation(self.view, tasks, (kind,), self.remap, chunk, self.traces)
        try:
            return evaluation.attempt(examples)
        except Exception as error:  # of the images or the model itself, not of a method
            if len(examples) > 1:
                return [result for example in examples for result in self._results([example], wanted, kind)]
            return [
                Failure(examples[0], task.method, [metric], kind, error) for task in tasks for metric in task.metrics
            ]

    def _rows(self, finding: Finding) -> Iterator[tuple[Pair, dict[str, Any]]]:
        call, example = finding.method.call, finding.sight.example
        if self.plan.maps:
            values = finding.map.float()
            if tuple(values.shape) != self.view.cells:
                values = F.adaptive_avg_pool2d(values[None, None], self.view.cells)[0, 0]
            largest = values.abs().max()  # to 1, or what is small would be nothing in fp16
            key = f"{self.name}|{example.id}|{call}|{finding.explained}"
            self.maps[key] = values / largest if largest > 0 else values
        for (metric, _), row in zip(finding.scores, finding.rows(), strict=True):
            yield (call, metric.call, finding.explained), {**row, "label": finding.sight.label}

    def _failed(self, failure: Failure) -> Iterator[tuple[Pair, dict[str, Any]]]:
        method = failure.method
        about = {"method": method.info.name, "params": json.dumps(method.given(), sort_keys=True)}
        reason = failure.error
        message = str(reason) if isinstance(reason, VitrailError) else f"{type(reason).__name__}: {reason}"
        row = {**about, "image": failure.example.id, "explained": failure.explained, "error": message}
        for metric in failure.metrics:
            yield (method.call, metric.call, failure.explained), row

    def _note(self, rows: list[dict[str, Any]], errors: int) -> None:
        """Keeps rows, counts them, and has them told to whoever watches."""
        self._keep(rows)
        self.outcome.rows += len(rows)
        self.outcome.errors += errors
        if errors and self.outcome.first_error is None:
            self.outcome.first_error = next(row["error"] for row in rows if row.get("error"))
        self.fresh += rows

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        """Puts rows into the buffer, which becomes a part every few seconds."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.view.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.view.device)
        common = {"model": self.name, "model_hash": self.model_hash, "data": self.data_name, "memory": peak}
        empty = {"method": "", "params": "{}", "metric": "", "value": float("nan"), "explained": ""}
        now = datetime.now(UTC)
        self.buffer += [{**empty, **row, **common, "time": now} for row in rows]

    def _tell(self, done: int, total: int) -> None:
        if time.monotonic() - self.written > EVERY:
            self._flush()
        if self.watch is not None:
            self.watch(Step(self.name, done, total, self.fresh))
        self.fresh = []

    def _flush(self) -> None:
        """Writes what is in the buffer; rows last, so that what they speak of is there.

        What is interrupted is still there for the next call, and what was just written is there twice at worst.
        """
        if self.maps:
            self.keeper.add_maps(self.maps)
            self.maps = {}
        if self.pictures:
            self.keeper.add_pictures(self.pictures)
            self.pictures = []
        if self.buffer:
            self.keeper.add_rows(self.buffer)
            self.buffer = []
        self.written = time.monotonic()

    def _picture(self, sight: Sight) -> dict[str, Any]:
        """A thumbnail of what the model saw, with what it said."""
        thumbnail = self.view.preprocessing.denormalise(sight.pixels[0])
        thumbnail.thumbnail((THUMBNAIL, THUMBNAIL))
        buffer = io.BytesIO()
        thumbnail.save(buffer, "JPEG", quality=85)
        return {
            "image": sight.example.id,
            "model": self.name,
            "jpeg": buffer.getvalue(),
            "label": "" if sight.label is None else self.view.label(sight.label),
            "predicted": self.view.label(sight.predicted),
            "probability": sight.predicted_probability,
        }

    def _affordable(self, method: str, metric: str) -> bool:
        spared = self.metrics[metric].info.name in self.plan.cheap_only
        return not spared or sum(self.methods[method].passes()) <= CHEAP

    def _reading_key(self, name: str) -> str:
        """Of the row that says that an image cannot be read: without its content its name must do."""
        return _hash(self.model_hash, self.data_name, name)

    def _key(self, about: str, pair: Pair) -> str:
        method, metric = self.methods[pair[0]], self.metrics[pair[1]]
        how = [method.info.name, method.version, method.params]
        what: list[Any] = [metric.info.name, metric.version, metric.params]
        return _hash(about, self.model_hash, json.dumps([how, what, pair[2]], sort_keys=True, default=str))


def _told(error: Exception) -> str:
    return printable(str(error) if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}")


def traces_of(methods: Iterable[Method]) -> list[TraceSpec]:
    """The traces that methods will ask for; a method that refuses its parameters does so when it runs."""
    specs: list[TraceSpec] = []
    for method in methods:
        with suppress(VitrailError):
            specs += method.needs()
    return specs


def _annotations(example: Example) -> str:
    """A hash of what is known about an image: other annotations are other results."""
    digest = hashlib.blake2b(repr(example.label).encode(), digest_size=16)
    for item in example.objects:
        digest.update(repr((item.label, item.box)).encode())
        if item.mask is not None:
            digest.update(item.mask.tobytes())
    if example.ignore is not None:
        digest.update(example.ignore.tobytes())
    return digest.hexdigest()


def _hash(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
