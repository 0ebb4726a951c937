"""Evaluation: batches of a data set explained by several methods, and the maps measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from vitrail.calls import split_call, split_list
from vitrail.data.annotations import annotated, class_map, known_class, own_class
from vitrail.data.base import DataSet, Example, Object
from vitrail.data.images import decode
from vitrail.data.names import open_data
from vitrail.data.places import KINDS as PLACES
from vitrail.data.places import Kind, NoPlaceError, any_place, place_map, place_of
from vitrail.engine.modes import own_modes
from vitrail.engine.requests import Asking, Batch, Logits, check_finite
from vitrail.engine.scheduler import Job, Scheduler
from vitrail.engine.trace import TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.base import Attribution, Method
from vitrail.methods.registry import build_method
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Metric, Scored, ask_if_applicable, build_metric
from vitrail.models.view import View
from vitrail.pipeline import BATCHES, ahead, failed
from vitrail.progress import counted
from vitrail.targets import Target

T = TypeVar("T")
Explained = Literal["predicted", "label", "target", "region", "box"]
OF_EACH_IMAGE: tuple[Explained, ...] = ("predicted", "label", *PLACES)  # all but a target that is the same for all
Called = str | tuple[str, Mapping[str, Any]]

# Which class each paper explains and scores; both where its table has both.
EXPLAINED: dict[str, tuple[Explained, ...]] = {
    "tis": ("label",),
    "skipplus": ("label",),
    "vtranm": ("predicted", "label"),
    "vit_cx": ("predicted",),
    "rise": ("predicted",),
}


@dataclass(frozen=True)
class Task:
    """A method, and what its maps are measured by."""

    method: Method
    metrics: Sequence[Metric]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The scores of one image by one method, for one class."""

    method: Method
    explained: str
    sight: Sight
    map: Tensor
    seconds: float
    scores: Sequence[tuple[Metric, Scored]]

    @property
    def example(self) -> Example:
        return self.sight.example

    @property
    def metrics(self) -> list[Metric]:
        return [metric for metric, _ in self.scores]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per metric."""
        for metric, scored in self.scores:
            yield {
                "image": self.sight.example.id,
                "method": self.method.info.name,
                "params": json.dumps(self.method.given(), sort_keys=True),
                "metric": metric.call,
                "value": scored.value,
                "target": self.sight.target,
                "explained": self.explained,
                "seconds": self.seconds,
                "ties": scored.extras.get("ties", float("nan")),
                "curve": scored.curve,
                "parts": scored.parts,
                "scale": scored.scale,
            }


@dataclass(frozen=True)
class Failure:
    """A method that failed on an image, for some metrics."""

    example: Example
    method: Method
    metrics: Sequence[Metric]
    explained: str
    error: Exception


@dataclass(frozen=True, eq=False)
class Ready:
    """An image that has been read, and the model input made from it."""

    view: View
    example: Example
    pixels: Tensor | None = None  # None where they are not made yet

    @classmethod
    def of(cls, view: View, example: Example) -> Ready:
        """Preprocesses an image ahead of its turn."""
        try:
            return cls(view, example, view.preprocess(example.image))
        except Exception:
            return cls(view, example)  # raised again when its turn has come

    @property
    def input(self) -> Tensor:
        """The model input, (3, H, W)."""
        return self.view.preprocess(self.example.image) if self.pixels is None else self.pixels


@dataclass(frozen=True)
class Evaluation:
    """What is done with each batch of images: every method explains it, and its maps are measured as soon as they are
    there, before the next method's.
    """

    view: View
    tasks: Sequence[Task]
    explained: Sequence[Explained]
    remap: Callable[[int], int]  # from the data set's classes to the model's
    chunk_size: int | None = None
    plan: Sequence[TraceSpec] = ()  # traces of all methods of a plan, also of those that are done
    target: Target = field(default_factory=Target)  # of a single image, explained as "target" or at a place
    shown: Sequence[Object] | None = None  # what a place shows; None = what has the class that is explained

    def at_place(self, image: Ready) -> Evaluation:
        """What is asked about the annotated object of an image, by a view that this image alone has."""
        kind = place_kind(self.explained)
        assert kind is not None
        with own_modes():
            place = place_of(self.view, kind, image.example, image.input, self.remap)
        tasks = [Task(replace(task.method, model=place.view), task.metrics) for task in self.tasks]
        target = Target.of(place.view, place.target)
        return replace(self, view=place.view, tasks=tasks, target=target, shown=place.objects)

    def asked(self, images: Sequence[Ready], skipped: dict[str, str]) -> Iterator[tuple[Evaluation, Sequence[Ready]]]:
        """The images that are asked about together, and what is asked; those without a place are ``skipped``."""
        if place_kind(self.explained) is None:
            yield self, images
            return
        for image in images:
            try:
                evaluation = self.at_place(image)
            except NoPlaceError as error:
                skipped[image.example.id] = str(error)
            else:
                yield evaluation, [image]

    def measure(self, images: Sequence[Ready], check: bool = False) -> list[Finding]:
        """The findings of a batch; ``check`` refuses a metric that none of these images can be measured by."""
        findings: list[Finding] = []
        for results in self._measure(images, check, isolated=False):
            for result in results:
                assert isinstance(result, Finding)
                findings.append(result)
        methods = {id(task.method): place for place, task in enumerate(self.tasks)}
        places = {id(image.example): place for place, image in enumerate(images)}
        kinds: Sequence[str] = self.explained
        return sorted(
            findings,
            key=lambda finding: (
                kinds.index(finding.explained),
                methods[id(finding.method)],
                places[id(finding.sight.example)],
            ),
        )

    def attempt(self, images: Sequence[Ready]) -> Iterator[list[Finding | Failure]]:
        """What ``measure`` finds, as soon as a method has been measured on all images: method by method by the metrics
        of maps, then by each metric of methods. What fails is tried image by image and then yielded as a failure.
        """
        return self._measure(images, False, isolated=True)

    def _measure(self, images: Sequence[Ready], check: bool, isolated: bool) -> Iterator[list[Finding | Failure]]:
        view, scheduler = self.view, Scheduler(self.chunk_size, self.plan)
        examples = [image.example for image in images]
        with own_modes():
            pixels = view.stacked([image.input for image in images])
            batch = Batch(view, view.check_images(pixels, view.precision))
            labels = [own_class(view, example, self.remap) for example in examples]
            for kind in self.explained:
                if kind == "label" and None in labels:
                    raise VitrailError('target="label" explains the true class, which not every image has.')
                target = self._target(kind, labels)
                tasks = {Job(task.method.explained(batch, target)): task for task in self.tasks}
                sights: list[Sight] = []
                explained: list[Job[Attribution]] = []
                again: list[tuple[Task, Job[Attribution]]] = []  # what metrics of methods measure
                predicting = Job(_logits(batch))
                for job in scheduler.finished([*tasks, predicting], isolated):
                    if job is predicting:
                        sights = self._sights(examples, batch, predicting.result, target, labels)
                    else:
                        explained.append(job)
                    while sights and explained:
                        ended = explained.pop(0)
                        task = tasks[ended]
                        yield from self._measure_maps(scheduler, kind, sights, task, ended, check, isolated)
                        if ended.error is None and any(isinstance(metric, MethodMetric) for metric in task.metrics):
                            again.append((task, ended))
                yield from self._measure_methods(scheduler, kind, sights, again, isolated)

    def _target(self, kind: Explained, labels: list[int | None]) -> Target:
        if kind == "predicted":
            return Target()
        if kind == "label":
            return Target(torch.tensor([int(label or 0) for label in labels]))
        return self.target.repeated(len(labels))

    def _sights(
        self, examples: Sequence[Example], batch: Batch, logits: Tensor, target: Target, labels: list[int | None]
    ) -> list[Sight]:
        """What is known of each image."""
        view = self.view
        check_finite(view, logits)
        probabilities = view.probabilities(logits).cpu()
        predicted = view.predicted(logits).tolist()
        answers: dict[Hashable, Any] = {}
        targets = predicted if target.index is None else target.index.tolist()
        return [
            Sight(
                example=example,
                pixels=batch.images[i : i + 1],
                target=targets[i],
                predicted=predicted[i],
                label=None if view.output == "score" else known_class(labels[i]),
                probability=float(probabilities[i, targets[i]]),
                predicted_probability=float(probabilities[i, predicted[i]]),
                known=annotated(view, example, targets[i], labels[i], self.remap, self.shown),
                answers=answers,
            )
            for i, example in enumerate(examples)
        ]

    def _measure_maps(
        self,
        scheduler: Scheduler,
        kind: Explained,
        sights: list[Sight],
        task: Task,
        explaining: Job[Attribution],
        check: bool,
        isolated: bool,
    ) -> Iterator[list[Finding | Failure]]:
        method, metrics = task.method, task.metrics
        if explaining.error is not None:
            yield self._failed(method, metrics, sights, kind, explaining.error)
            return
        cases, seconds = self._cases(sights, explaining.result), explaining.seconds / len(sights)
        of_maps = [metric for metric in metrics if isinstance(metric, MapMetric)]
        if check:
            check_apply(of_maps, cases)

        def finding(i: int, scores: Sequence[tuple[Metric, Scored]]) -> Finding:
            return Finding(
                method=method, explained=kind, sight=sights[i], map=cases[i].map, seconds=seconds, scores=scores
            )

        map_jobs = [[(metric, Job(ask_if_applicable(metric, case))) for metric in of_maps] for case in cases]
        scheduler.run_jobs([job for jobs in map_jobs for _, job in jobs], isolated)
        results: list[Finding | Failure] = []
        for i, jobs in enumerate(map_jobs):
            failed = [(metric, job.error) for metric, job in jobs if job.error is not None]
            results += [Failure(sights[i].example, method, [metric], kind, error) for metric, error in failed]
            results.append(finding(i, [(metric, job.result) for metric, job in jobs if job.error is None]))
        yield results

    def _measure_methods(
        self,
        scheduler: Scheduler,
        kind: Explained,
        sights: list[Sight],
        explained: Sequence[tuple[Task, Job[Attribution]]],
        isolated: bool,
    ) -> Iterator[list[Finding | Failure]]:
        """Measures methods by each metric of methods: side by side, since they ask about the same images and models."""
        metrics = {metric.call: metric for task, _ in explained for metric in task.metrics}
        for call, metric in metrics.items():  # one after another: each may hold a copy of the model
            if not isinstance(metric, MethodMetric):
                continue
            jobs = {
                Job(metric.ask(task.method, self._cases(sights, explaining.result))): (task.method, explaining)
                for task, explaining in explained
                if call in {other.call for other in task.metrics}
            }
            for job in scheduler.finished([*jobs], isolated):
                method, explaining = jobs[job]
                if job.error is not None:
                    yield self._failed(method, [metric], sights, kind, job.error)
                    continue
                seconds, scores = explaining.seconds / len(sights), zip(explaining.result.map, job.result, strict=True)
                yield [
                    Finding(
                        method=method, explained=kind, sight=sight, map=map_, seconds=seconds, scores=[(metric, scored)]
                    )
                    for sight, (map_, scored) in zip(sights, scores, strict=True)
                ]
            for sight in sights:  # models and images that only this metric asks about
                sight.answers.clear()

    def _failed(
        self, method: Method, metrics: Sequence[Metric], sights: list[Sight], kind: Explained, error: Exception
    ) -> list[Finding | Failure]:
        """What failed for a batch is tried image by image."""
        if len(sights) == 1:
            return [Failure(sights[0].example, method, metrics, kind, error)]
        alone = replace(self, tasks=[Task(method, metrics)], explained=(kind,))
        return [
            result
            for sight in sights
            for results in alone.attempt([Ready(self.view, sight.example)])
            for result in results
        ]

    def _cases(self, sights: Sequence[Sight], attribution: Attribution) -> list[Case]:
        extras = {name: values.tolist() for name, values in attribution.extras.items()}
        return [
            Case(
                view=self.view,
                pixels=sight.pixels,
                map=attribution.map[i],
                target=sight.target,
                predicted=sight.predicted,
                label=sight.label,
                extras={name: values[i] for name, values in extras.items()},
                # with fixed chunks, what is asked must not depend on which methods came before
                answers=sight.answers if self.chunk_size is None else {},
                **sight.known,
            )
            for i, sight in enumerate(sights)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sight:
    """An image as the model sees it: pixels, classes, annotations."""

    example: Example
    pixels: Tensor  # (1, 3, H, W)
    target: int
    predicted: int
    label: int | None
    probability: float  # of the target
    predicted_probability: float
    known: dict[str, Any] = field(default_factory=dict)
    answers: dict[Hashable, Any] = field(default_factory=dict)  # of the metrics, to what does not depend on maps


def _logits(batch: Batch) -> Asking[Tensor]:
    return (yield Logits(batch))


def check_apply(metrics: Sequence[MapMetric], cases: Sequence[Case]) -> None:
    """Refuses a metric that none of the first images can be measured by."""
    for metric in metrics:
        lacking = [case.lacks(metric.info.needs) for case in cases]
        if all(lacking) and metric.info.needs not in ("completeness", "objects"):  # which not every image has
            raise VitrailError(
                f"{metric.info.name} needs {lacking[0]}, which none of the first {len(cases)} images offers: leave the "
                "metric out, or use data (or a model) that has it."
            )


def default_method(view: View) -> str:
    """The method that is used where none is named."""
    return "decompx.skipplus" if view.has_tokens else "vit_cx" if view.has_features else "occlusion"


def open_examples(data: Any, images: int | None, seed: int) -> DataSet:
    """The data set, or a sample of its images."""
    if images is not None and images < 1:
        raise VitrailError(f"images must be at least 1, but got {images}.")
    opened = open_data(data)
    if not len(opened):
        raise VitrailError(f"{opened.name} is empty: expected at least one image.")
    return opened if images is None or images >= len(opened) else opened.subset(images, seed)


def read_ahead(
    load: Callable[[int], Example],
    positions: Iterable[int],
    finish: Callable[[Example], T],
    most: int,
    concurrent: bool,
) -> Generator[Future[T], None, None]:
    """What ``finish`` makes of the images at these positions, up to ``most`` of them ahead, in threads.

    ``concurrent``: they are loaded in threads, too, which not every data set allows.
    """

    def read(position: int) -> Example:
        example = load(position)
        decode(example.image)  # which several examples may share
        return example

    def read_and_finish(position: int) -> T:
        return finish(read(position))

    def tasks() -> Iterator[Callable[[], T]]:
        for position in positions:
            if concurrent:
                yield partial(read_and_finish, position)
                continue
            try:
                example = read(position)
            except Exception as error:
                yield partial(failed, error)
            else:
                yield partial(finish, example)

    return ahead(tasks(), most)


def batches(
    view: View, data: DataSet, size: int, skipped: dict[str, str], strict: bool
) -> Generator[list[Ready], None, None]:
    """Images so many at a time; broken ones are noted in ``skipped``, or raised where ``strict``."""
    if size < 1:
        raise VitrailError(f"batch_size must be at least 1, but got {size}.")
    ids, batch = data.ids, list[Ready]()
    most = min(BATCHES * size, len(ids))
    images = read_ahead(data.__getitem__, range(len(ids)), partial(Ready.of, view), most, data.concurrent)
    with counted(len(ids), "evaluate", "image") as bar, closing(images):
        for position, (name, image) in enumerate(zip(ids, images, strict=True)):
            try:
                batch.append(image.result())
            except VitrailError as error:
                if strict:
                    raise
                skipped[name] = str(error)
                bar.update(1)
            if batch and (len(batch) == size or position == len(ids) - 1):
                yield batch
                bar.update(len(batch))
                batch = []


def build_methods(view: View, methods: Sequence[Called | Method] | str | None) -> list[Method]:
    """Methods from names, calls or methods."""
    asked = [default_method(view)] if methods is None else split_list(methods) if isinstance(methods, str) else methods
    if not len(asked):
        raise VitrailError("no method was given: name at least one, or give None for the model's default.")
    built = []
    for item in asked:
        if isinstance(item, Method):
            if item.model is not view:
                raise VitrailError(f"the method {item.info.name} was built for another model.")
            built.append(item)
        else:
            name, params = split_call(item) if isinstance(item, str) else item
            built.append(build_method(name, view, **params))
    return built


def build_metrics(metrics: Sequence[Called | Metric] | str | None, protocol: str | None = None) -> list[Metric]:
    """Metrics from names, calls or metrics; those that know the protocol get it unless they have one of their own."""
    asked = (
        ("insertion", "deletion") if metrics is None else split_list(metrics) if isinstance(metrics, str) else metrics
    )
    if not len(asked):
        raise VitrailError("no metric was given: name at least one, or give None for insertion and deletion.")
    if protocol is not None and protocol not in ("default", *EXPLAINED):
        raise VitrailError(f"there is no protocol {protocol!r}: expected default, {', '.join(EXPLAINED)}.")
    built = []
    for item in asked:
        if isinstance(item, Metric):
            built.append(item)
            continue
        name, params = split_call(item) if isinstance(item, str) else (item[0], dict(item[1]))
        metric = build_metric(name, **params)
        if protocol in metric.info.protocols and "protocol" not in params and protocol != "default":
            metric = build_metric(name, protocol=protocol, **params)
        built.append(metric)
    return built


def explained_classes(target: str | None, protocol: str | None) -> tuple[Explained, ...]:
    """Which classes are explained: as asked, else as the paper does, else the predicted one."""
    if target is None:
        return EXPLAINED.get(protocol or "", ("predicted",))
    asked = tuple(kind for kind in OF_EACH_IMAGE if kind == target)
    if not asked:
        raise VitrailError(f'target must be "predicted", "label", "region" or "box", but got {target!r}.')
    return asked


def place_kind(explained: Sequence[Explained]) -> Kind | None:
    """The kind of the places that are explained; None where classes of whole images are."""
    return next((kind for kind in PLACES if kind in explained), None)


def map_for(view: View, data: DataSet, explained: Sequence[Explained]) -> Callable[[int], int]:
    """From the data set's classes to the model's, for what is explained."""
    kind = place_kind(explained)
    return class_map(view, data) if kind is None else place_map(view, kind, data)


def check_places(view: View, explained: Sequence[Explained], methods: Iterable[Method]) -> None:
    """Refuses places that the model does not have, and methods that cannot explain them."""
    if kind := place_kind(explained):
        place = any_place(view, kind)
        for method in methods:
            replace(method, model=place)
