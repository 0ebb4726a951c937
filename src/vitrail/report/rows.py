"""From run folders to arrays: what was measured, in which setting, by which method and metric."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.bench.plan import Plan
from vitrail.bench.store import Store
from vitrail.calls import join_call, split_call
from vitrail.errors import VitrailError
from vitrail.metrics.base import Metric
from vitrail.report.statistics import Bools, Floats, Sample

if TYPE_CHECKING:
    import pandas as pd

UP, DOWN = "↑", "↓"
SETTING = ["data", "model", "model_hash", "explained"]
_CURVE_AXES = {
    "insertion": "probability of the class",
    "deletion": "probability of the class",
    "positive_auc": "share of images still right",
    "negative_auc": "share of images still right",
    "aopc": "fall of the probability",
    "log_odds": "change of the log-probability",
    "token_deletion_accuracy": "share of images still right",
    "token_insertion_accuracy": "share of images still right",
    "token_deletion_aopc": "fall of the probability",
    "token_insertion_aopc": "missing probability",
}


@dataclass(frozen=True)
class Column:
    """A metric with its parameters; ``metric`` is None where this process does not know it."""

    call: str
    metric: Metric | None = field(default=None, compare=False)

    @property
    def better(self) -> int:
        """1 where higher is better, −1 where lower is, 0 where nobody knows."""
        return 0 if self.metric is None else 1 if self.metric.higher_is_better else -1

    @property
    def arrow(self) -> str:
        return {1: UP, -1: DOWN, 0: ""}[self.better]

    @property
    def title(self) -> str:
        return f"{self.call} {self.arrow}".strip()

    @property
    def curve_axis(self) -> str:
        """What the height of a curve is."""
        return _CURVE_AXES.get(split_call(self.call)[0] if self.metric else "", "value")

    @property
    def removes(self) -> bool:
        """Whether the axis of a curve tells what was removed, not what is there."""
        name = self.metric.info.name if self.metric else ""
        return "insertion" not in name

    def shares(self, points: int) -> Floats:
        """(points,): which share of the image was changed at each point of a curve."""
        from vitrail.metrics.tokens import STEPS, TokenCurve

        if isinstance(self.metric, TokenCurve) and points == STEPS:
            return (np.arange(points) + (self.metric.way == "insertion")) / STEPS
        if getattr(self.metric, "protocol", None) == "tis":
            return np.arange(1, points + 1) / points
        return np.linspace(0, 1, points)


@dataclass
class Setting:
    """One model on one data set in one run, explained for one kind of class: what methods may be compared on."""

    run: str
    folder: Path
    data: str
    model: str
    model_hash: str
    explained: str
    images: list[str]
    classes: list[str]
    values: Floats  # (images, methods, metrics)
    seconds: Floats  # (methods,)
    parts: dict[tuple[int, int], Floats] = field(default_factory=dict)  # by method and metric: (images, numbers)
    curves: dict[tuple[int, int], Floats] = field(default_factory=dict)  # by method and metric: (images, points)
    label: str = ""

    @property
    def data_name(self) -> str:
        """The data, its paths shortened to their last part: a report is sent to others."""
        return ":".join(Path(part).name or part if "/" in part else part for part in self.data.split(":"))

    def sample(self, metric: int, column: Column, images: Bools | None = None) -> Sample:
        """What one metric found, on all images or on some."""
        chosen = slice(None) if images is None else images
        values = self.values[chosen, :, metric]
        parts = [self.parts.get((method, metric)) for method in range(values.shape[1])]
        if column.metric is None or all(own is None for own in parts):
            return Sample(values)
        rows = [np.full((len(values), 1), np.nan) if own is None else own[chosen] for own in parts]
        complete = all((np.isnan(values[:, m]) | ~np.isnan(own[:, 0])).all() for m, own in enumerate(rows))
        return Sample(values, rows, column.metric.combine) if complete else Sample(values)


@dataclass(frozen=True)
class Failure:
    """What went wrong, and how often."""

    run: str
    model: str
    method: str
    metric: str
    reason: str
    count: int
    example: str


@dataclass
class Results:
    """All settings of some runs, over the same methods and metrics."""

    settings: list[Setting]
    methods: list[str]
    metrics: list[Column]
    failures: list[Failure]
    environments: dict[str, dict[str, Any]]
    replaced: int  # rows that a later one stands for
    damaged: list[str] = field(default_factory=list)  # parts that could not be read

    @property
    def title(self) -> str:
        return ", ".join(dict.fromkeys(one.run for one in self.settings))


def read_results(folders: Sequence[Path]) -> Results:
    """Reads run folders as `vitrail bench` writes them."""
    if not folders:
        raise VitrailError("no run was given: expected at least one folder that `vitrail bench` has written.")
    names = _run_names(folders)
    runs = [_Run(folder, name) for folder, name in zip(folders, names, strict=True)]
    methods = list(dict.fromkeys(call for run in runs for call in run.methods()))
    metrics = list(dict.fromkeys(column for run in runs for column in run.metrics()))
    settings = [setting for run in runs for setting in run.settings(methods, metrics)]
    damaged = [f"{run.name}/{part}" for run in runs for part in run.store.damaged]
    if not settings:
        errors = sum(len(run.failed) for run in runs)
        what = f"{errors} rows, all errors" if errors or not damaged else "every part is damaged"
        raise VitrailError(f"nothing was measured in {', '.join(names)}: {what}.")
    for setting, label in zip(settings, _labels(settings), strict=True):
        setting.label = label
    failures = [failure for run in runs for failure in run.failures()]
    environments = {run.name: run.store.environment() for run in runs}
    replaced = sum(run.replaced for run in runs)
    return Results(settings, methods, metrics, failures, environments, replaced, damaged)


def normal_call(call: str) -> str:
    """A method as rows name it: by its own name, with parameters that are not at their default, sorted."""
    from vitrail.methods.registry import get_method

    try:
        name, params = split_call(call)
        method = get_method(name)
    except VitrailError:
        return call
    usual = method.parameters()
    given = {key: value for key, value in sorted(params.items()) if key not in usual or usual[key] != value}
    return join_call(method.info.name, given)


class _Run:
    """One folder, its rows with the columns ``call`` (of the method) and ``column`` (of the metric)."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.store = folder, name, Store(folder)
        rows = self._read()
        self.plan = self._plan()
        calls = {pair: _row_call(*pair) for pair in set(zip(rows["method"], rows["params"], strict=True))}
        planned = [as_column(call, self.plan.protocol) for call in self.plan.metrics] if self.plan else []
        found = {call: as_column(call) for call in rows["metric"].unique() if call}
        self.columns = list(dict.fromkeys([*planned, *found.values()]))
        rows["call"] = [calls[pair] for pair in zip(rows["method"], rows["params"], strict=True)]
        rows["column"] = [found[one].call if one else "" for one in rows["metric"]]
        self.failed = rows[rows["error"].notna()]
        good = rows[rows["error"].isna() & (rows["method"] != "") & (rows["metric"] != "")]
        # Another version of a method, or another image of the same name, has another key; the newest is what counts.
        self.good = good.drop_duplicates([*SETTING, "image", "call", "column"], keep="last")
        self.replaced = len(good) - len(self.good)

    def _read(self) -> pd.DataFrame:
        if not any((self.folder / "rows").glob("part-*.parquet")):
            raise VitrailError(f"{self.folder} holds no results: expected a folder that `vitrail bench` has written.")
        return self.store.rows()

    def _plan(self) -> Plan | None:
        if not (self.folder / "plan.toml").exists():
            return None
        try:
            return self.store.plan()
        except VitrailError as error:
            warnings.warn(f"the report goes on without its plan: {error}", stacklevel=2)
            return None

    def methods(self) -> list[str]:
        present = list(self.good["call"].unique())
        planned = [normal_call(call) for call in self.plan.methods] if self.plan else []
        return [*(one for one in planned if one in present), *(one for one in present if one not in planned)]

    def metrics(self) -> list[Column]:
        present = set(self.good["column"])
        return [column for column in self.columns if column.call in present]

    def settings(self, methods: list[str], metrics: list[Column]) -> list[Setting]:
        calls = [column.call for column in metrics]
        naming = _Naming(self.store.pictures())
        groups = self.good.groupby(SETTING, sort=False, dropna=False)
        return [self._setting(key, rows, methods, calls, naming) for key, rows in groups]

    def _setting(
        self, key: tuple[str, ...], rows: pd.DataFrame, methods: list[str], metrics: list[str], naming: _Naming
    ) -> Setting:
        import pandas as pd

        image, images = pd.factorize(rows["image"])
        method = pd.Index(methods).get_indexer(rows["call"])
        metric = pd.Index(metrics).get_indexer(rows["column"])
        values = np.full((len(images), len(methods), len(metrics)), np.nan)
        values[image, method, metric] = rows["value"]
        once = rows.drop_duplicates(["image", "call"])
        seconds = once.groupby("call")["seconds"].mean().reindex(methods).to_numpy(dtype=np.float64)
        places = list(zip(image, method, metric, strict=True))
        parts, curves = (_stacked(rows[name], places, len(images)) for name in ("parts", "curve"))
        classes = naming.classes(rows.drop_duplicates("image"), key[1])
        about = dict(zip(SETTING, key, strict=True))
        return Setting(
            self.name, self.folder, images=list(images), classes=classes, values=values, seconds=seconds, parts=parts,
            curves=curves, **about,
        )  # fmt: skip

    def failures(self) -> list[Failure]:
        keys = ["model", "call", "column", "error"]
        groups = self.failed.groupby(keys, sort=False, dropna=False)
        found = []
        for (model, method, metric, reason), rows in groups:
            found.append(Failure(self.name, model, method, metric, reason, len(rows), str(rows["image"].iloc[0])))
        return found


class _Naming:
    """The names of classes, learned from the pictures that were kept."""

    def __init__(self, pictures: pd.DataFrame) -> None:
        self.pictures = pictures

    def classes(self, rows: pd.DataFrame, model: str) -> list[str]:
        """The true class of each image; where that is unknown, the one explained."""
        own = self.pictures[self.pictures["model"] == model]
        known = own.set_index("image") if "label" in own else None
        names: dict[int, str] = {}
        for image, label, target, explained in zip(
            rows["image"], rows["label"], rows["target"], rows["explained"], strict=True
        ):
            if known is None or image not in known.index:
                continue
            if not _missing(label) and known.at[image, "label"]:
                names[int(label)] = str(known.at[image, "label"])
            if explained == "predicted" and not _missing(target):
                names.setdefault(int(target), str(known.at[image, "predicted"]))
        return [
            _class_name(label, names) if not _missing(label) else _class_name(target, names) + " (explained)"
            for label, target in zip(rows["label"], rows["target"], strict=True)
        ]


def _class_name(number: Any, names: dict[int, str]) -> str:
    return "unknown" if _missing(number) else names.get(int(number), f"class {int(number)}")


def _missing(value: Any) -> bool:
    return value is None or bool(np.isnan(value))


def _row_call(method: str, params: str) -> str:
    try:
        given = json.loads(params or "{}")
    except ValueError:
        given = {"params": params}
    return join_call(method, given) if method else ""


def as_column(call: str, protocol: str | None = None) -> Column:
    """The metric of a call; one of a plan gets the plan's protocol, as it does when it is measured."""
    from vitrail.evaluation import build_metrics

    try:
        metric = build_metrics([call], protocol)[0]
    except VitrailError:
        return Column(call)  # not registered here
    return Column(metric.call, metric)


def _stacked(lists: Any, places: list[tuple[int, int, int]], images: int) -> dict[tuple[int, int], Floats]:
    """Lists of numbers by method and metric, (images, longest); shorter curves are stretched to the longest."""
    groups: dict[tuple[int, int], list[tuple[int, Floats]]] = {}
    for (image, method, metric), own in zip(places, lists, strict=True):
        if own is not None and not isinstance(own, float) and len(own):
            groups.setdefault((method, metric), []).append((image, np.asarray(own, dtype=np.float64)))
    found = {}
    for key, members in groups.items():
        longest = max(len(own) for _, own in members)
        found[key] = np.full((images, longest), np.nan)
        for image, own in members:
            found[key][image] = own if len(own) == longest else _stretched(own, longest)
    return found


def _stretched(points: Floats, count: int) -> Floats:
    return np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(points)), points)


def _run_names(folders: Sequence[Path]) -> list[str]:
    """Folder names, with as much of their parents as tells them apart."""
    whole = [Path(folder).resolve() for folder in folders]
    if len(set(whole)) != len(whole):
        raise VitrailError("the same run was given twice.")
    depth = 1
    while len({path.parts[-depth:] for path in whole}) < len(whole):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in whole]


def _labels(settings: Sequence[Setting]) -> list[str]:
    """What tells each setting from the others, in few words; the run only where nothing else does."""
    tellers: list[Callable[[Setting], str]] = [
        lambda one: one.model,
        lambda one: one.data_name,
        lambda one: one.explained,
    ]
    chosen = [tell for tell in tellers if len({tell(one) for one in settings}) > 1]
    if_needed: list[Callable[[Setting], str]] = [lambda one: one.model_hash[:8], lambda one: one.run]
    for tell in if_needed:
        told = {tuple(own(one) for own in chosen) for one in settings}
        more = {tuple(own(one) for own in [*chosen, tell]) for one in settings}
        if len(more) > len(told):
            chosen.append(tell)
    return [" · ".join(own(one) for own in chosen) for one in settings]
