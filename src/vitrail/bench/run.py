"""Running a plan: missing rows are computed, existing ones kept, failures recorded."""

from __future__ import annotations

import hashlib
import io
import json
import math
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from vitrail.api import BATCH
from vitrail.bench.folders import Place
from vitrail.bench.plan import METRICS, ModelSpec, Plan
from vitrail.bench.shard import Shard
from vitrail.bench.store import Buffer, Store, environment
from vitrail.calls import split_call
from vitrail.data.annotations import annotated, known_class, own_class
from vitrail.data.base import DataSet, Example
from vitrail.data.images import image_hash
from vitrail.data.names import data_name
from vitrail.data.places import NoPlaceError, check_annotated
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.evaluation import (
    Evaluation,
    Explained,
    Failure,
    Finding,
    Ready,
    Sight,
    Task,
    build_methods,
    build_metrics,
    check_apply,
    check_places,
    explained_classes,
    map_for,
    open_examples,
    place_kind,
    read_ahead,
)
from vitrail.files import printable
from vitrail.methods.base import Method
from vitrail.metrics.base import Case, MapMetric
from vitrail.models.preprocessing import Preprocess
from vitrail.models.view import View
from vitrail.pipeline import BATCHES

EVERY = 3.0  # seconds between parts
CHEAP = 4  # most passes of a method that the metrics of Plan.cheap_only are measured on
FIXED_CHUNK = 64
THUMBNAIL = 192
CHECKED_IMAGES = 16
CHECKED_NEEDS = ("tokens", "label", "region", "mask", "boxes")  # depend on data or model alone

Loader = Callable[[ModelSpec], View]
Pair = tuple[str, str, str]  # method call, metric call, explained class


@dataclass
class Outcome:
    """Counts of a run."""

    images: int = 0  # measured now
    known: int = 0  # measured before
    rows: int = 0
    errors: int = 0
    failed_before: int = 0  # rows of the plan that failed in an earlier call and were not retried
    first_error: str | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        """All rows of the plan without a value, whenever they failed."""
        return self.errors + self.failed_before

    def add(self, other: Outcome) -> None:
        """Adds the counts of another part of the same run."""
        for name in ("images", "known", "rows", "errors", "failed_before"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first_error = self.first_error or other.first_error


@dataclass(frozen=True)
class Identified:
    """An image that has been read, its hash, and the keys of its rows."""

    ready: Ready
    digest: str
    keys: Mapping[Pair, str]


@dataclass(frozen=True)
class Step:
    """Progress of a run, with the rows since the step before."""

    model: str
    done: int
    total: int
    rows: Sequence[Mapping[str, Any]]


def load_model(spec: ModelSpec) -> View:
    """The model of a plan, with the plan's preprocessing."""
    from vitrail.models.loading import load

    view = load(spec.name, **spec.options)
    if spec.preprocessing:
        try:
            view.preprocessing = Preprocess.from_dict(view.preprocessing.to_dict() | spec.preprocessing)
        except TypeError:
            defaults = view.preprocessing.to_dict()
            raise VitrailError(
                f"the model {spec.name} has preprocessing = {spec.preprocessing}, expected values as in {defaults}."
            ) from None
    return view


def run(
    plan: Plan,
    out: Place,
    *,
    load: Loader = load_model,
    watch: Callable[[Step], None] | None = None,
    positions: Sequence[int] | None = None,
    retry: bool = False,
    data: DataSet | None = None,
    shard: Shard | None = None,
) -> Outcome:
    """Measures everything in the plan that ``out`` does not hold yet.

    Args:
        plan: the plan.
        out: the run folder, new or started; or an address of an object store, as "s3://bucket/run".
        load: builds the view of a model.
        watch: called after every step.
        positions: measure only these images of the data.
        retry: retry what failed before.
        data: the images of the plan, if they are open already.
        shard: measure only every n-th image, while other processes measure the others into the same folder.
    """
    store, outcome, start = Store(out), Outcome(), time.perf_counter()
    with store.locked(None if shard is None else str(shard)):
        data = open_plan_data(plan) if data is None else data
        if shard is not None:
            positions = shard.of(range(len(data)) if positions is None else positions)
        for spec in plan.models:
            view = load(spec)
            model_run = ModelRun(plan, spec.name, view, data, store=store, outcome=outcome, watch=watch, retry=retry)
            model_run.check_metrics()
            store.begin(plan, environment(view))  # only now: everything that the plan names exists
            model_run.measure(positions, store.done(plan.maps))
            del view, model_run
    outcome.seconds = time.perf_counter() - start
    return outcome


def open_plan_data(plan: Plan) -> DataSet:
    """The images of a plan."""
    data = open_examples(plan.data, None if plan.indices else plan.images, plan.seed)
    return data.subset(indices=plan.indices) if plan.indices else data


@dataclass
class ModelRun:
    """A plan's methods and metrics for one model; without a store, the results stay in the buffer."""

    plan: Plan
    name: str
    view: View
    data: DataSet
    _: KW_ONLY
    store: Store | None = None
    outcome: Outcome = field(default_factory=Outcome)
    watch: Callable[[Step], None] | None = None
    retry: bool = False
    buffer: Buffer = field(default_factory=Buffer)
    new_rows: list[dict[str, Any]] = field(default_factory=list)  # since the last step
    checked: dict[int, Example] = field(default_factory=dict)  # images read by check_metrics

    def __post_init__(self) -> None:
        plan, view = self.plan, self.view
        self.explained = explained_classes(plan.target, plan.protocol)
        self.place = place_kind(self.explained)
        self.remap = map_for(view, self.data, self.explained)
        # by normalised call: tis and tis(masks=1024) are the same work
        self.methods = {method.call: method for method in build_methods(view, plan.methods)}
        check_places(view, self.explained, self.methods.values())
        # of the whole plan, not of what is missing: a resumed run computes the same traces
        self.traces = traces_of(self.methods.values())
        self.metrics = {metric.call: metric for metric in build_metrics(plan.metrics, plan.protocol)}
        self.model_hash = model_hash(view)
        self.data_name = data_name(plan.data)
        alone = plan.deterministic or self.place is not None  # at a place each image has a view of its own
        self.batch_size = 1 if alone else plan.batch_size or BATCH.get(view.device.type, 4)
        pairs = product(self.methods, self.metrics, self.explained)
        self.pairs: dict[Pair, str] = {pair: self._work(pair) for pair in pairs if self._is_affordable(*pair)}
        self.written = -math.inf  # the first results are written at once

    def check_metrics(self) -> None:
        """Refuses a metric that applies to none of the first images, as ``evaluate`` does.

        The default metrics are meant for all data and not checked. Of several models only the first is checked, and
        not for tokens: what another model lacks is a gap in a table of both.
        """
        plan = self.plan
        if self.place:
            check_annotated(self.place, self.data, self._first())
        if self.name != plan.models[0].name or [split_call(call)[0] for call in plan.metrics] == METRICS:
            return
        needs = [need for need in CHECKED_NEEDS if need != "tokens" or len(plan.models) == 1]
        metrics = self.metrics.values()
        unmet = [metric for metric in metrics if isinstance(metric, MapMetric) and metric.info.needs in needs]
        cases: list[Case] = []
        examples = self._first()
        while unmet and (example := next(examples, None)):
            with suppress(Exception):  # an image that the model fails on becomes a row of the run
                cases.append(self._case(example))
                unmet = [metric for metric in unmet if cases[-1].lacks(metric.info.needs)]
        if cases:
            check_apply(unmet, cases)

    def _first(self) -> Iterator[Example]:
        """The first images, read once; a broken one becomes a row of the run."""
        for position in range(min(CHECKED_IMAGES, len(self.data))):
            if position not in self.checked:
                try:
                    self.checked[position] = self.data[position]
                except Exception:
                    continue
            yield self.checked[position]

    def _case(self, example: Example) -> Case:
        """An image with its annotations and an empty map."""
        view = self.view
        pixels = view.check_images(view.preprocess(example.image)[None])
        own = own_class(view, example, self.remap)
        label = known_class(own)
        target = label if self.place or "label" in self.explained else None
        if target is None:
            with torch.no_grad():
                target = int(view.predicted(view.logits(pixels)))
        annotations = annotated(view, example, target, own, self.remap)
        empty = torch.zeros(view.size)
        return Case(view=view, pixels=pixels, target=target, predicted=target, label=label, map=empty, **annotations)

    def measure(self, positions: Sequence[int] | None, done: Mapping[str, str | None]) -> None:
        """Measures images in order, except for rows in ``done`` (key → error); images that lack the same rows are
        batched together.
        """
        waiting = dict[tuple[Pair, ...], list[Identified]]()
        positions = range(len(self.data)) if positions is None else positions

        def load(position: int) -> Example:
            return self.checked.pop(position, None) or self.data[position]

        def identify(example: Example) -> Identified:
            """Hashes an image, and preprocesses it if any of its rows is missing."""
            digest = hash_of(example.id, image_hash(example.image), _annotation_hash(example))
            keys = {pair: hash_of(digest, self.model_hash, work) for pair, work in self.pairs.items()}
            is_known = not any(self._is_missing(key, done) for key in keys.values())
            image = Ready(self.view, example) if is_known else Ready.of(self.view, example)
            return Identified(image, digest, keys)

        most = min(BATCHES * self.batch_size, len(positions))
        images = read_ahead(load, positions, identify, most, self.data.concurrent)
        with closing(images):
            try:
                for count, (position, reading) in enumerate(zip(positions, images, strict=True), 1):
                    image = self._read(position, reading, done)
                    if image is not None:
                        pairs = [pair for pair in self.pairs if self._is_within_limit(pair, position)]
                        missing = tuple(pair for pair in pairs if self._is_missing(image.keys[pair], done))
                        for pair in pairs:
                            self._count_failed(image.keys[pair], done)
                        if missing:
                            waiting.setdefault(missing, []).append(image)
                        else:
                            self.outcome.known += 1
                    for pairs_of_group, group in list(waiting.items()):
                        if len(group) == self.batch_size or count == len(positions):
                            self._measure(waiting.pop(pairs_of_group), pairs_of_group, count - 1, len(positions))
                    self._report(count, len(positions))
            finally:
                self._flush()

    def _read(self, position: int, reading: Future[Identified], done: Mapping[str, str | None]) -> Identified | None:
        """An image; None if it cannot be read, which becomes a row, or is known to have no place to ask about."""
        try:
            image = reading.result()
        except Exception as error:
            name = self.data.ids[position]
            if self._is_missing(key := self._reading_key(name), done):
                self._add([{"image": name, "error": _message(error), "key": key}])
            self._count_failed(key, done)
            return None
        name = image.ready.example.id
        place_key = self._place_key(image.digest)
        if done.get(place_key) and not self.retry:
            self._count_failed(place_key, done)
            return None
        for key in (self._reading_key(name), place_key):
            if done.get(key):  # it could not be read, or asked about, before
                self._buffer([{"image": name, "key": key}])
        return image

    def _is_missing(self, key: str, done: Mapping[str, str | None]) -> bool:
        """Whether a row is to be computed; a failed one only if ``retry``."""
        return key not in done or (self.retry and done[key] is not None)

    def _count_failed(self, key: str, done: Mapping[str, str | None]) -> None:
        """Counts a row that failed in an earlier call and is not retried."""
        if not self.retry and (reason := done.get(key)) is not None:
            self.outcome.failed_before += 1
            self.outcome.first_error = self.outcome.first_error or reason

    def _measure(self, group: list[Identified], pairs: tuple[Pair, ...], done: int, total: int) -> None:
        """Adds the rows of a batch of images, method by method; ``done`` images of ``total`` came before."""
        images = [image.ready for image in group]
        digests = {id(image.ready.example): image.digest for image in group}
        kept: set[str] = set()
        if self.view.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.view.device)
        for kind in self.explained:
            calls: dict[str, list[str]] = {}
            for method, metric, explained in pairs:
                if explained == kind:
                    calls.setdefault(method, []).append(metric)
            tasks = [Task(self.methods[call], [self.metrics[name] for name in names]) for call, names in calls.items()]
            tasks.sort(key=lambda task: sum(task.method.passes()))  # cheap methods are safe before costly ones start
            try:
                for results in self._attempt(images, tasks, kind):
                    for result in results:
                        if isinstance(result, Finding) and self.plan.maps:
                            self._keep(result, kept)
                    self._add([row for result in results for row in self._rows(result, digests)])
                    self._report(done, total)
            except NoPlaceError as error:
                (image,) = group
                left_out = {"explained": kind, "error": _message(error), "key": self._place_key(image.digest)}
                self._add([{"image": image.ready.example.id, **left_out}])
                return
        self.outcome.images += len(group)

    def _attempt(
        self, images: Sequence[Ready], tasks: Sequence[Task], kind: Explained
    ) -> Iterator[list[Finding | Failure]]:
        """The results of a batch, as they come; images that fail as a batch are tried alone."""
        chunk_size = FIXED_CHUNK if self.plan.deterministic else None
        measured: set[tuple[str, str]] = set()
        try:
            evaluation = Evaluation(self.view, tasks, (kind,), self.remap, chunk_size, self.traces)
            if self.place:
                (image,) = images
                evaluation = evaluation.at_place(image)
            for results in evaluation.attempt(images):
                measured |= {(result.method.call, metric.call) for result in results for metric in result.metrics}
                yield results
        except NoPlaceError:
            raise
        except Exception as error:  # of the images or the model itself, not of a method
            rest = []
            for task in tasks:
                missing = [metric for metric in task.metrics if (task.method.call, metric.call) not in measured]
                rest += [Task(task.method, missing)] if missing else []
            if len(images) > 1:
                for image in images:
                    yield from self._attempt([image], rest, kind)
            else:
                yield [Failure(images[0].example, task.method, task.metrics, kind, error) for task in rest]

    def _rows(self, result: Finding | Failure, digests: Mapping[int, str]) -> Iterator[dict[str, Any]]:
        """The rows of a result, with their keys."""
        common: dict[str, Any] = {"image_hash": digests[id(result.example)]}
        if isinstance(result, Finding):
            common["label"] = result.sight.label
        for row in result.rows() if isinstance(result, Finding) else _failed_rows(result):
            pair = (result.method.call, row["metric"], result.explained)
            yield {**row, **common, "key": hash_of(common["image_hash"], self.model_hash, self.pairs[pair])}

    def _keep(self, finding: Finding, kept: set[str]) -> None:
        """Keeps a map, and the picture of its image, unless they are ``kept`` already."""
        name = f"{self.name}|{finding.example.id}|{finding.method.call}|{finding.explained}"
        if name in kept:
            return
        values = finding.map.float()
        if tuple(values.shape) != self.view.cells:
            values = F.adaptive_avg_pool2d(values[None, None], self.view.cells)[0, 0]
        largest = values.abs().max()  # scaled to 1: small values would underflow in fp16
        scaled = values / largest if largest > 0 else values
        self.buffer.maps[name] = scaled.detach().to("cpu", torch.float16)
        if finding.example.id not in kept:
            self.buffer.pictures.append(self._picture(finding.sight))
        kept |= {name, finding.example.id}

    def _add(self, rows: list[dict[str, Any]]) -> None:
        """Stores rows, counts them, and keeps them for the next step."""
        self._buffer(rows)
        errors = [row["error"] for row in rows if row.get("error")]
        self.outcome.rows += len(rows)
        self.outcome.errors += len(errors)
        self.outcome.first_error = self.outcome.first_error or next(iter(errors), None)
        self.new_rows += rows

    def _buffer(self, rows: list[dict[str, Any]]) -> None:
        """Puts rows into the buffer, which becomes a part every few seconds."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.view.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.view.device)
        common = {"model": self.name, "model_hash": self.model_hash, "data": self.data_name, "memory": peak}
        empty = {"method": "", "params": "{}", "metric": "", "value": float("nan"), "explained": ""}
        now = datetime.now(UTC)
        self.buffer.rows += [{**empty, **row, **common, "time": now} for row in rows]

    def _report(self, done: int, total: int) -> None:
        if time.monotonic() - self.written > EVERY:
            self._flush()
        if self.watch is not None:
            self.watch(Step(self.name, done, total, self.new_rows))
        self.new_rows = []

    def _flush(self) -> None:
        if self.store is not None:
            self.buffer.flush(self.store)
        self.written = time.monotonic()

    def _picture(self, sight: Sight) -> dict[str, Any]:
        """A thumbnail of the model input, with the prediction."""
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

    def _is_affordable(self, method: str, metric: str, explained: str) -> bool:
        restricted = self.metrics[metric].info.name in self.plan.cheap_only
        return not restricted or sum(self.methods[method].passes()) <= CHEAP

    def _is_within_limit(self, pair: Pair, position: int) -> bool:
        limit = self.plan.limits.get(self.metrics[pair[1]].info.name)
        return limit is None or position < limit

    def _reading_key(self, name: str) -> str:
        """Key of the row for an image that cannot be read: its content is unknown, so the key uses its name."""
        return hash_of(self.model_hash, self.data_name, name)

    def _place_key(self, digest: str) -> str:
        """Key of the row for an image that has no place to ask about."""
        return hash_of(digest, self.model_hash, f"no {self.place}")

    def _work(self, pair: Pair) -> str:
        """What is done for a pair: with the hashes of image and model, the key of its row."""
        method, metric = self.methods[pair[0]], self.metrics[pair[1]]
        asked = (method.info.name, method.version, method.params), (metric.info.name, metric.version, metric.params)
        return work_of(*asked, pair[2])


def traces_of(methods: Iterable[Method]) -> list[TraceSpec]:
    """The traces that methods will request; a method that refuses its parameters does so when it runs."""
    specs: list[TraceSpec] = []
    for method in methods:
        with suppress(VitrailError):
            specs += method.needs()
    return specs


Versioned = tuple[str, int, Mapping[str, Any]]  # name, version and parameters of a method or metric


# The methods whose rows have told their precision from the first; all others got the parameter later.
PRECISION_STORED = frozenset({"lime", "pami", "posterior", "rise", "score_cam", "tis", "vit_cx"})
# Parameters that metrics got later; None stands for what they did before.
ADDED_TO_METRICS = frozenset({"cells"})


def work_of(method: Versioned, metric: Versioned, explained: str) -> str:
    """What is done with an image, as text: with the hashes of image and model, the key of a row."""
    # What was added at its default is left out, so that rows stored before stay valid.
    name, version, params = method
    if name not in PRECISION_STORED and params.get("precision") == "auto":
        params = {parameter: value for parameter, value in params.items() if parameter != "precision"}
    of_metric = {
        parameter: value
        for parameter, value in metric[2].items()
        if value is not None or parameter not in ADDED_TO_METRICS
    }
    return json.dumps([(name, version, params), (*metric[:2], of_metric), explained], sort_keys=True, default=str)


def model_hash(view: View) -> str:
    """A hash of a model and its preprocessing."""
    return hash_of(view.fingerprint(), json.dumps(view.preprocessing.to_dict(), sort_keys=True))


def _failed_rows(failure: Failure) -> Iterator[dict[str, Any]]:
    method = failure.method
    for metric in failure.metrics:
        yield {
            "image": failure.example.id,
            "method": method.info.name,
            "params": json.dumps(method.given(), sort_keys=True),
            "metric": metric.call,
            "explained": failure.explained,
            "error": _message(failure.error),
        }


def _message(error: Exception) -> str:
    return printable(str(error) if isinstance(error, VitrailError) else f"{type(error).__name__}: {error}")


def _annotation_hash(example: Example) -> str:
    """A hash of an image's annotations: with other annotations the results differ."""
    digest = hashlib.blake2b(repr(example.label).encode(), digest_size=16)
    for item in example.objects:
        digest.update(repr((item.label, item.box)).encode())
        if item.mask is not None:
            digest.update(item.mask.tobytes())
    if example.ignore is not None:
        digest.update(example.ignore.tobytes())
    return digest.hexdigest()


def hash_of(*parts: str) -> str:
    """Equal hashes are equal parts: of the same work, of the same image."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
