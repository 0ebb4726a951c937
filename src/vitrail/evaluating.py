"""``evaluate``: explain a data set by several methods and measure the maps."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from vitrail.data.base import DataSet, Example
from vitrail.engine.modes import memory_for, own_modes
from vitrail.engine.scoring import together
from vitrail.engine.sharing import Kind, Wish, shared, united
from vitrail.engine.trace import fits
from vitrail.errors import VitrailError
from vitrail.explaining import as_view, check_finite, images_at_once
from vitrail.methods.base import Method
from vitrail.methods.registry import build_method
from vitrail.metrics.annotations import annotated, class_map, own_class
from vitrail.metrics.base import Case, MapMetric, MethodMetric, Metric, Scored, asked_all, build_metric
from vitrail.metrics.calls import split_call, split_list
from vitrail.models.view import View, at_least
from vitrail.models.vit import ViT, unchanged
from vitrail.progress import counted

if TYPE_CHECKING:
    import pandas as pd

Explained = Literal["predicted", "label"]
Called = str | tuple[str, Mapping[str, Any]]

# Which class each paper explains and scores; both where its table has both.
EXPLAINED: dict[str, tuple[Explained, ...]] = {
    "tis": ("label",),
    "skipplus": ("label",),
    "vtranm": ("predicted", "label"),
    "vit_cx": ("predicted",),
    "rise": ("predicted",),
}


def evaluate(
    model: View | nn.Module | str,
    data: Any,
    methods: Sequence[Called | Method] | str | None = None,
    metrics: Sequence[Called | Metric] | str | None = None,
    *,
    target: Explained | None = None,
    protocol: str | None = None,
    images: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    curves: bool = False,
    strict: bool = False,
) -> pd.DataFrame:
    """Explains every image by every method and measures every map: one row per image, method and metric.

    Args:
        model: a view, a module that ``wrap`` takes, or a name that ``load`` takes.
        data: a data set, what ``vitrail.data.open_data`` reads ("scenes:100", "imagenet:DIR", a folder), or images.
        methods: names, names with parameters ("rise(masks=256)" or ("rise", {"masks": 256})), or methods; None = the
            model's default method.
        metrics: likewise; None = insertion and deletion.
        target: the class that is explained and scored, "predicted" (the default) or "label".
        protocol: a paper ("tis", "vit_cx", "vtranm", "skipplus", "rise"), for all metrics that know it; it also says
            which class is explained. A metric with a protocol of its own, "insertion(protocol=tis)", does not say that.
        images: so many images, drawn by ``seed``; None = all.
        batch_size: images at a time; None = by device.
        curves: adds a column with the curves.
        strict: a broken image is an error; otherwise it is left out, counted and told.

    The columns are image, method, params, metric, value (NaN where a metric does not apply), target, explained, seconds
    (of the explanation; a trace that methods share counts for each), ties (the share of cells whose order the seed had
    to draw), and parts where the value of a data set is made of more than values; ``summarise`` makes means and
    intervals of them. What was left out is in ``attrs["skipped"]``.
    """
    import pandas as pd

    view, found, skipped = as_view(model), list[dict[str, Any]](), dict[str, str]()
    chosen = open_examples(data, images, seed)
    measures = build_metrics(metrics, protocol)
    tasks = [Task(method, measures) for method in build_methods(view, methods)]
    common = common_wishes([task.method for task in tasks])
    work = Work(view, tasks, explained_classes(target, protocol), class_map(view, chosen), common)
    for batch in batches(chosen, images_at_once(view, batch_size), skipped, strict):
        found += [row for finding in work.measure(batch, check=not found) for row in finding.rows()]
    if not found:
        told = f": {len(skipped)} were broken ({next(iter(skipped.values()))})" if skipped else ""
        raise VitrailError(f"{chosen.name} has no image that could be measured{told}.")
    if skipped:
        first = next(iter(skipped.values()))
        warnings.warn(f"{len(skipped)} of {len(chosen)} images were left out; the first: {first}", stacklevel=2)
    frame = pd.DataFrame(found)
    dropped = [name for name, wanted in (("curve", curves), ("parts", frame["parts"].notna().any())) if not wanted]
    frame = frame.drop(columns=dropped)
    frame.attrs["skipped"] = skipped
    return frame


@dataclass(frozen=True)
class Task:
    """A method, and what its maps are measured by."""

    method: Method
    metrics: Sequence[Metric]


@dataclass(frozen=True)
class Finding:
    """What was found out about one image by one method, for one class."""

    example: Example
    method: Method
    explained: str
    target: int
    predicted: int
    probability: float  # of the target
    label: int | None
    map: Tensor
    seconds: float
    scores: Sequence[tuple[Metric, Scored]]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per metric."""
        for metric, scored in self.scores:
            yield {
                "image": self.example.id,
                "method": self.method.info.name,
                "params": json.dumps(self.method.given(), sort_keys=True),
                "metric": metric.call,
                "value": scored.value,
                "target": self.target,
                "explained": self.explained,
                "seconds": self.seconds,
                "ties": scored.extras.get("ties", float("nan")),
                "curve": scored.curve,
                "parts": scored.parts,
            }


@dataclass(frozen=True)
class Work:
    """What is done with each batch of images."""

    view: View
    tasks: Sequence[Task]
    explained: Sequence[Explained]
    remap: Callable[[int], int]  # from the data set's classes to the model's
    common: Mapping[Kind, Wish] = field(default_factory=dict)  # traces that several methods share

    def measure(self, examples: Sequence[Example], check: bool = False) -> Iterator[Finding]:
        """The findings of a batch; ``check`` refuses a metric that none of these images can be measured by."""
        view = self.view
        with own_modes(view.device), memory_for(len(examples)):
            with at_least(torch.float32):  # as methods see them
                pixels = view.check_images(torch.stack([view.preprocess(one.image) for one in examples]))
            with torch.no_grad():
                logits = view.logits(pixels)
            check_finite(view, logits)
            probabilities = view.probabilities(logits)
            predicted = view.class_scores(logits).argmax(1).tolist()
        labels = [own_class(view, one, self.remap) for one in examples]
        for kind in self.explained:
            if kind == "label" and None in labels:
                raise VitrailError('target="label" explains the true class, which not every image has.')
            targets = predicted if kind == "predicted" else [int(label or 0) for label in labels]
            with own_modes(view.device), memory_for(len(examples)), unchanged():
                known = [
                    {
                        "view": view,
                        "pixels": pixels[i : i + 1],
                        "target": targets[i],
                        "predicted": predicted[i],
                        "label": labels[i],
                        **annotated(view, one, targets[i], labels[i], self.remap),
                    }
                    for i, one in enumerate(examples)
                ]
                found = self._measure(examples, pixels, known, check)
            for example, about, method, case, seconds, scores in found:
                probability = float(probabilities[about, case.target])
                yield Finding(
                    example,
                    method,
                    kind,
                    case.target,
                    case.predicted,
                    probability,
                    case.label,
                    case.map,
                    seconds,
                    scores,
                )

    def _measure(
        self, examples: Sequence[Example], pixels: Tensor, known: list[dict[str, Any]], check: bool
    ) -> list[tuple[Example, int, Method, Case, float, list[tuple[Metric, Scored]]]]:
        """Explains by each method; then all maps of the batch are measured together."""
        waiting = []
        for task, (cases, seconds) in zip(self.tasks, self._explain_all(pixels, known, check), strict=True):
            of_maps = _of_maps(task)
            again = [(one, one.measure(task.method, cases)) for one in task.metrics if isinstance(one, MethodMetric)]
            for i, case in enumerate(cases):
                own = [(metric, scored[i]) for metric, scored in again]
                waiting.append((i, task.method, case, seconds, of_maps, own))
        measured = together([asked_all(of_maps, case) for _, _, case, _, of_maps, _ in waiting])
        return [
            (examples[i], i, method, case, seconds, [*zip(of_maps, scores, strict=True), *own])
            for (i, method, case, seconds, of_maps, own), scores in zip(waiting, measured, strict=True)
        ]

    def _explain_all(self, pixels: Tensor, known: list[dict[str, Any]], check: bool) -> list[tuple[list[Case], float]]:
        """The cases of each task, and the seconds per image; methods that share a trace go together."""
        target = torch.tensor([one["target"] for one in known])
        groups: dict[Any, list[int]] = {}
        for place, task in enumerate(self.tasks):
            wish = task.method.wish() if self.common else None
            groups.setdefault(wish.kind if wish and wish.kind in self.common else place, []).append(place)
        found: dict[int, tuple[list[Case], float]] = {}
        for kind, places in groups.items():
            with shared(self.common.get(kind), self.view, pixels, target) as trace:
                for place in places:
                    cases, seconds = self._explain(self.tasks[place].method, pixels, known)
                    if check:
                        check_apply(_of_maps(self.tasks[place]), cases)
                    found[place] = cases, seconds + (trace.taken() / len(known) if trace else 0)
        return [found[place] for place in range(len(self.tasks))]

    def _explain(self, method: Method, pixels: Tensor, known: list[dict[str, Any]]) -> tuple[list[Case], float]:
        begin = time.perf_counter()
        found = method.explain(pixels, [one["target"] for one in known])
        seconds = (time.perf_counter() - begin) / len(known)
        extras = {name: values.tolist() for name, values in found.extras.items()}
        cases = [
            Case(map=found.map[i], extras={name: values[i] for name, values in extras.items()}, **one)
            for i, one in enumerate(known)
        ]
        return cases, seconds


def check_apply(metrics: Sequence[MapMetric], cases: Sequence[Case]) -> None:
    """Refuses a metric that none of the first images can be measured by."""
    for metric in metrics:
        lacking = [case.lacks(metric.info.needs) for case in cases]
        if all(lacking) and metric.info.needs not in ("completeness", "objects"):  # which not every image has
            raise VitrailError(
                f"{metric.info.name} needs {lacking[0]}, which none of the first {len(cases)} images offers: leave the "
                "metric out, or use data (or a model) that has it."
            )


def _of_maps(task: Task) -> list[MapMetric]:
    return [one for one in task.metrics if isinstance(one, MapMetric)]


def common_wishes(methods: Sequence[Method]) -> dict[Kind, Wish]:
    """The traces that several of these methods can share."""
    wishes = [(one.model, one.wish()) for one in methods]
    return united(
        wish for model, wish in wishes if wish is not None and isinstance(model, ViT) and fits(wish, model.num_layers)
    )


def open_examples(data: Any, images: int | None, seed: int) -> DataSet:
    """The data set, or so many images of it."""
    from vitrail.data.opening import open_data

    if images is not None and images < 1:
        raise VitrailError(f"images must be at least 1, but got {images}.")
    found = open_data(data)
    if not len(found):
        raise VitrailError(f"{found.name} is empty: expected at least one image.")
    return found if images is None or images >= len(found) else found.subset(images, seed)


def batches(data: DataSet, size: int, skipped: dict[str, str], strict: bool) -> Iterator[list[Example]]:
    """Examples so many at a time; broken ones are noted in ``skipped``, or raised where ``strict``."""
    if size < 1:
        raise VitrailError(f"batch_size must be at least 1, but got {size}.")
    ids, batch = data.ids, list[Example]()
    with counted(len(ids), "evaluate", "image") as bar:
        for position, name in enumerate(ids):
            try:
                batch.append(data[position])
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
    from vitrail.explaining import default_method

    asked = [default_method(view)] if methods is None else split_list(methods) if isinstance(methods, str) else methods
    if not len(asked):
        raise VitrailError("no method was given: name at least one, or give None for the model's default.")
    built = []
    for one in asked:
        if isinstance(one, Method):
            if one.model is not view:
                raise VitrailError(f"the method {one.info.name} was built for another model.")
            built.append(one)
        else:
            name, params = split_call(one) if isinstance(one, str) else one
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
    for one in asked:
        if isinstance(one, Metric):
            built.append(one)
            continue
        name, params = split_call(one) if isinstance(one, str) else (one[0], dict(one[1]))
        metric = build_metric(name, **params)
        if protocol in metric.info.protocols and "protocol" not in params and protocol != "default":
            metric = build_metric(name, protocol=protocol, **params)
        built.append(metric)
    return built


def explained_classes(target: str | None, protocol: str | None) -> tuple[Explained, ...]:
    """Which classes are explained: as asked, else as the paper does, else the predicted one."""
    if target is None:
        return EXPLAINED.get(protocol or "", ("predicted",))
    if target == "predicted":
        return ("predicted",)
    if target == "label":
        return ("label",)
    raise VitrailError(f'target must be "predicted" or "label", but got {target!r}.')
