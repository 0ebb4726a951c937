"""What a metric is: a class with parameters, registered under a name, that measures maps or methods."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.calls import Named, check_known, check_parameters, protocols_of
from vitrail.engine.maps import enlarged
from vitrail.engine.requests import Asking, Batch, Pictures
from vitrail.errors import VitrailError
from vitrail.geometry import Box
from vitrail.methods.base import Method
from vitrail.models.view import View
from vitrail.registry import Registry, first_line, matching
from vitrail.targets import Reading

Needs = Literal["map", "tokens", "label", "region", "mask", "boxes", "objects", "method", "completeness"]

SCALED = "scaled: empty image 0, full image 1"  # what is said of curves of scores that are no probabilities

MODULES = "perturbation imputation tokens agreement localization boxes complexity robustness sanity".split()


@dataclass(frozen=True)
class MetricInfo:
    """The description of a metric."""

    name: str
    family: str
    higher_is_better: bool
    needs: Needs
    protocols: tuple[str, ...]
    params: dict[str, Any]
    paper: str
    summary: str


@dataclass(frozen=True)
class Scored:
    """The score of one map: a value (NaN = not applicable), the curve it is the area under, and ``parts``.

    ``parts`` are the numbers from which the value of a data set is computed, where that is not the mean of values;
    ``extras["ties"]`` is the share of cells whose order only the seed decides, where a metric depends on the order.
    ``scale``: of a score that is no probability, those of the empty and the full image, where the curve has 0 and 1.
    """

    value: float
    curve: list[float] | None = None
    parts: list[float] | None = None
    extras: dict[str, float] = field(default_factory=dict)
    scale: list[float] | None = None


NOT_APPLICABLE = Scored(float("nan"))


@dataclass
class Case:
    """A map to measure, with its image, the explained class and annotations.

    ``region`` (H, W) shows the objects of the explained class at the model input, ``others`` those of other classes,
    ``ignore`` pixels of unknown class; ``boxes`` are the objects' boxes at the model input.
    """

    view: View
    pixels: Tensor  # (1, 3, H, W), normalised
    map: Tensor  # (rows, columns) or (H, W)
    target: int
    predicted: int
    label: int | None = None
    region: Tensor | None = None
    from_masks: bool = False  # whether the region comes from masks, not from boxes
    boxes: Sequence[Box] | None = None
    others: Tensor | None = None
    ignore: Tensor | None = None
    extras: dict[str, float] = field(default_factory=dict)
    answers: dict[Hashable, Any] = field(default_factory=dict)  # of a batch of images, for all their maps

    def __post_init__(self) -> None:
        if self.map.ndim != 2 or not self.map.numel() or not self.map.is_floating_point():
            raise VitrailError(
                f"a map must be (rows, columns) of floats, but got {tuple(self.map.shape)} of {self.map.dtype}."
            )
        broken = int((~self.map.isfinite()).sum())
        if broken:
            raise VitrailError(
                f"a map must hold finite numbers, but {broken} of {self.map.numel()} values are NaN or infinite."
            )
        for name in ("region", "others", "ignore"):
            mask = getattr(self, name)
            if mask is not None and tuple(mask.shape) != self.size:
                raise VitrailError(
                    f"{name} has shape {tuple(mask.shape)}, expected that of the model input {self.size}."
                )
        for name in ("target", "label"):
            index = getattr(self, name)
            if index is not None and not 0 <= index < self.view.num_classes:
                raise VitrailError(
                    f"{name} {index} is outside the {self.view.num_classes} classes of {self.view.name}: does the data "
                    "set number its classes as the model does?"
                )

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[-2], self.pixels.shape[-1]

    @cached_property
    def on_input(self) -> Tensor:
        """The map at the size of the model input, bilinear."""
        return self.map if tuple(self.map.shape) == self.size else enlarged(self.map, self.size)

    @cached_property
    def ties(self) -> float:
        """The share of cells that have the value of another, at the size of the model input."""
        return tie_fraction(self.on_input)

    @cached_property
    def batch(self) -> Batch:
        """The image alone."""
        return Batch(self.view, self.pixels)

    @property
    def asked(self) -> Hashable:
        """The image and the class: equal for all maps that explain one by the other."""
        return id(self.pixels), self.target

    @cached_property
    def on_grid(self) -> Tensor:
        """The map on the patches, or on the cells of a model that has none; a pixel map is averaged over each."""
        if tuple(self.map.shape) == self.view.cells:
            return self.map
        return F.adaptive_avg_pool2d(self.map[None, None], self.view.cells)[0, 0]

    def pictures(self, count: int, make: Callable[[slice], Tensor], reading: Reading, **options: Any) -> Pictures:
        """A request for what is read from ``count`` variants of the image; by default about the explained class."""
        options = {"about": (self.target,), **options}
        return Pictures(view=self.view, count=count, length=self.view.num_tokens, make=make, reading=reading, **options)

    def lacks(self, needs: Needs) -> str | None:
        """What is missing here for a metric with these needs; None if nothing is."""
        annotated = self.region is not None
        present: dict[str, tuple[bool, str]] = {
            "tokens": (self.view.has_tokens, "a model with tokens"),
            "label": (self.label is not None, "the true class"),
            "region": (annotated, "boxes or masks"),
            "mask": (annotated and self.from_masks, "masks"),
            "boxes": (bool(self.boxes), "boxes"),
            "objects": (annotated and self.others is not None, "objects of two classes"),
            "completeness": ("completeness_gap" in self.extras, "a method that promises to be complete"),
        }
        is_there, what = present.get(needs, (True, ""))
        return None if is_there else what


@dataclass(kw_only=True)
class Metric(Named):
    """Base of all metrics. Its fields are its parameters."""

    info: ClassVar[MetricInfo]
    version: ClassVar[int] = 1  # raised when its values change: stored results of an older one are computed again
    least: ClassVar[Mapping[str, int]] = {}  # the smallest values of parameters that have one

    def __post_init__(self) -> None:
        check_parameters(type(self), self.params)
        for name, least in self.least.items():
            value = getattr(self, name)
            if not value >= least:
                raise VitrailError(f"{name} must be at least {least}, but got {value}.")

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The parameters and their defaults."""
        return {f.name: f.default for f in fields(cls)}

    @property
    def higher_is_better(self) -> bool:
        """Direction of this metric with these parameters."""
        return self.info.higher_is_better

    @staticmethod
    def combine(parts: Tensor) -> Tensor:
        """(…, images, numbers) → (…,): the value of a data set from the ``parts`` of its images."""
        raise NotImplementedError


class MapMetric(Metric):
    """A metric of one map: ``ask`` where it needs the network, else ``score``."""

    def ask(self, case: Case) -> Asking[Scored]:
        """Measures one case; yields what it needs of the network."""
        return self.score(case)
        yield  # makes this a generator

    def score(self, case: Case) -> Scored:
        raise NotImplementedError


class MethodMetric(Metric):
    """A metric of a method: it explains other inputs or other models."""

    def ask(self, method: Method, cases: Sequence[Case]) -> Asking[list[Scored]]:
        """Measures a method on the cases of a batch; yields what it needs of the network.

        Methods are measured side by side: what is asked about one batch object, as ``shared`` keeps it, is shared.
        """
        raise NotImplementedError


M = TypeVar("M", bound=type[Metric])
T = TypeVar("T")

METRICS: Registry[type[Metric]] = Registry(
    "metric",
    [f"vitrail.metrics.{module}" for module in MODULES],
    listing="vitrail metrics",
    group="vitrail.metrics",
)


def metric(
    name: str,
    *,
    family: str = "custom",
    higher_is_better: bool,
    needs: Needs = "map",
    protocols: tuple[str, ...] | None = None,
    paper: str = "",
) -> Callable[[M], M]:
    """Registers a metric: a dataclass derived from ``MapMetric`` or ``MethodMetric``.

    ``protocols``: None = the values of the parameter ``protocol``, a ``Literal``.
    """

    def register(cls: M) -> M:
        cls.info = MetricInfo(
            name,
            family=family,
            higher_is_better=higher_is_better,
            needs=needs,
            protocols=protocols or protocols_of(cls),
            params=cls.parameters(),
            paper=paper,
            summary=first_line(cls),
        )
        METRICS.add(name, cls, cls.__module__)
        return cls

    return register


def list_metrics(pattern: str = "*") -> dict[str, MetricInfo]:
    """Every metric whose name matches the glob."""
    return {name: METRICS[name].info for name in matching(METRICS.every_entry(), pattern)}


def get_metric(name: str) -> type[Metric]:
    """The class of a metric, by name."""
    return METRICS[name.strip().lower()]


def build_metric(name: str, /, **params: Any) -> Metric:
    """A metric ready to use; unknown parameters are an error that lists the known ones."""
    cls = get_metric(name)
    check_known(name, params, cls.parameters())
    return cls(**params)


def ask_if_applicable(metric: MapMetric, case: Case) -> Asking[Scored]:
    """Measures one case; NaN where the case lacks what the metric needs."""
    return NOT_APPLICABLE if case.lacks(metric.info.needs) else (yield from metric.ask(case))


def shared(cases: Sequence[Case], key: Hashable, make: Callable[[], T]) -> T:
    """What does not depend on maps is made once for all maps of these images and classes."""
    answers, place = cases[0].answers, (key, *(case.asked for case in cases))
    if place not in answers:
        answers[place] = make()
    result: T = answers[place]
    return result


def known(case: Case, key: Hashable, asking: Asking[Tensor]) -> Asking[Tensor]:
    """What does not depend on the map is asked once for all maps of an image and class."""
    place = (key, case.asked)
    if place not in case.answers:
        case.answers[place] = yield from asking
    answer: Tensor = case.answers[place]
    return answer


def check_maps(method: Method, case: Case, maps: Tensor) -> None:
    """Refuses a case whose map has another shape than those of the method."""
    if maps.shape[1:] != case.map.shape:
        raise VitrailError(
            f"the given maps are {tuple(case.map.shape)}, those of {method.info.name} {tuple(maps.shape[1:])}: give "
            "the maps that this method made."
        )


def tie_fraction(values: Tensor) -> float:
    """The share of cells whose value another cell has too."""
    _, counts = values.flatten().unique(return_counts=True)
    return int(counts[counts > 1].sum()) / values.numel()


def check_seed(seed: int) -> int:
    if not 0 <= seed < 2**63:
        raise VitrailError(f"seed must be between 0 and 2^63, but got {seed}.")
    return seed


def average(values: Tensor) -> float:
    return float(values.double().mean())


def trapezoid(values: Tensor) -> float:
    """The area under points of equal distance over an axis of length 1."""
    return float(torch.trapezoid(values.double()) / (len(values) - 1)) if len(values) > 1 else float(values[0])
