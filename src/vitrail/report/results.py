"""The results of run folders as arrays: by setting, image, method and metric."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.bench.folders import Place, is_remote
from vitrail.bench.plan import Plan
from vitrail.bench.run import hash_of, work_of
from vitrail.bench.store import Store
from vitrail.calls import call_name, join_call, split_call
from vitrail.errors import VitrailError
from vitrail.files import parse_json
from vitrail.methods.base import MethodFactory
from vitrail.metrics.base import SCALED, Metric
from vitrail.metrics.statistics import Floats
from vitrail.report.statistics import Bools, Sample

if TYPE_CHECKING:
    import pandas as pd

UP, DOWN = "↑", "↓"
SETTING = ["data", "model", "model_hash", "explained"]
STALE = " (stale)"  # after a method or metric that is not in the plan
_CURVE_AXES = {
    "insertion": "class probability",
    "deletion": "class probability",
    "positive_auc": "accuracy",
    "negative_auc": "accuracy",
    "aopc": "drop in probability",
    "log_odds": "change in log-probability",
    "token_deletion_accuracy": "accuracy",
    "token_insertion_accuracy": "accuracy",
    "token_deletion_aopc": "drop in probability",
    "token_insertion_aopc": "missing probability",
}


@dataclass(frozen=True)
class Column:
    """A metric with its parameters; ``metric`` is None if it is not registered in this process."""

    call: str
    metric: Metric | None = field(default=None, compare=False)
    stale: bool = field(default=False, compare=False)
    scaled: bool = field(default=False, compare=False)  # of scores in place of probabilities: empty image 0, full 1

    @property
    def better(self) -> int:
        """1 where higher is better, −1 where lower is, 0 where unknown."""
        return 0 if self.metric is None else 1 if self.metric.higher_is_better else -1

    @property
    def arrow(self) -> str:
        return {1: UP, -1: DOWN, 0: ""}[self.better]

    @property
    def name(self) -> str:
        """The call, marked if it is stale."""
        return self.call + STALE * self.stale

    @property
    def title(self) -> str:
        return f"{self.name} {self.arrow}".strip()

    @property
    def curve_axis(self) -> str:
        """The quantity on the vertical axis of a curve."""
        return SCALED if self.scaled else _CURVE_AXES.get(self.metric.info.name if self.metric else "", "value")

    @property
    def removes(self) -> bool:
        """Whether the horizontal axis of a curve counts what was removed, not what was inserted."""
        return self.metric is None or "insertion" not in self.metric.info.name

    def shares(self, points: int) -> Floats:
        """(points,): the share of the image, or with ``cells=`` of the squares, that was changed at each point."""
        from vitrail.metrics.tokens import STEPS, TokenCurve

        if isinstance(self.metric, TokenCurve) and (points == STEPS or self.metric.cells is not None):
            return (np.arange(points) + (self.metric.way == "insertion")) / points  # never none, or all, of the tokens
        if getattr(self.metric, "protocol", None) == "tis":
            return np.arange(1, points + 1) / points
        return np.linspace(0, 1, points)


@dataclass
class Setting:
    """One model on one data set in one run, explained for one kind of class: within it methods are comparable."""

    run: str
    folder: Place
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
        """The data, with paths shortened to their last part: reports are shared."""
        return ":".join(Path(part).name or part if "/" in part else part for part in self.data.split(":"))

    def sample(self, metric: int, column: Column, images: Bools | None = None) -> Sample:
        """The values of a metric, on all images or on some."""
        selected = slice(None) if images is None else images
        values = self.values[selected, :, metric]
        parts = [self.parts.get((method, metric)) for method in range(values.shape[1])]
        if column.metric is None or all(numbers is None for numbers in parts):
            return Sample(values)
        rows = [np.full((len(values), 1), np.nan) if numbers is None else numbers[selected] for numbers in parts]
        complete = all((np.isnan(values[:, m]) | ~np.isnan(numbers[:, 0])).all() for m, numbers in enumerate(rows))
        return Sample(values, rows, column.metric.combine) if complete else Sample(values)


@dataclass(frozen=True)
class ErrorGroup:
    """Equal errors of one method and metric, with their count."""

    run: str
    model: str
    method: str
    metric: str
    reason: str
    count: int
    example: str


@dataclass
class Results:
    """All settings of several runs, over the same methods and metrics."""

    settings: list[Setting]
    methods: list[str]
    metrics: list[Column]
    errors: list[ErrorGroup]
    environments: dict[str, dict[str, Any]]
    replaced: int  # rows that a newer row replaces
    damaged: list[str] = field(default_factory=list)  # parts that could not be read
    stale: int = 0  # rows that are left out because the plans do not have them

    @property
    def title(self) -> str:
        return ", ".join(dict.fromkeys(setting.run for setting in self.settings))


def read_results(folders: Sequence[Place], stale: bool = False, covering: bool = False) -> Results:
    """Reads run folders written by `vitrail bench`.

    Rows that a run's plan does not have are left out: those of other methods and metrics, and of older versions where
    newer rows exist. ``stale`` keeps them, and marks their methods and metrics. ``covering`` adds all stored methods
    and metrics to the plan, of which a folder keeps only the last: older versions alone are left out.
    """
    if not folders:
        raise VitrailError("no run was given: expected at least one folder written by `vitrail bench`.")
    names = _run_names(folders)
    runs = [_Run(folder, name, stale, covering) for folder, name in zip(folders, names, strict=True)]
    methods = list(dict.fromkeys(call for run in runs for call in run.methods()))
    scaled = {call for run in runs for call in run.scaled()}
    columns = dict.fromkeys(column for run in runs for column in run.metrics())
    metrics = [replace(column, scaled=column.call in scaled) for column in columns]
    settings = [setting for run in runs for setting in run.settings(methods, metrics)]
    damaged = [f"{run.name}/{part}" for run in runs for part in run.store.damaged]
    left_out = sum(run.left_out for run in runs)
    if not settings:
        failed = sum(len(run.failed) for run in runs)
        reason = f"{failed} rows, all errors" if failed or not damaged else "every part is damaged"
        reason += f", and {left_out} of an older plan, which --stale shows" if left_out else ""
        raise VitrailError(f"nothing was measured in {', '.join(names)}: {reason}.")
    for setting, label in zip(settings, _labels(settings), strict=True):
        setting.label = label
    errors = [group for run in runs for group in run.errors()]
    environments = {run.name: run.store.environment() for run in runs}
    replaced = sum(run.replaced for run in runs)
    return Results(settings, methods, metrics, errors, environments, replaced, damaged, left_out)


def normal_call(call: str) -> str:
    """The normalised call of a method, as in rows; a method that is not registered here stays as it is."""
    try:
        return join_call(*normalised(call))
    except VitrailError:
        return call


def normalised(call: str) -> tuple[str, dict[str, Any]]:
    """The full name of a method, and its parameters that are not at their default, sorted."""
    from vitrail.methods.registry import get_method

    name, params = split_call(call)
    method = get_method(name)
    defaults = method.parameters()
    changed = {key: value for key, value in sorted(params.items()) if key not in defaults or defaults[key] != value}
    return method.info.name, changed


class _Run:
    """One run folder; its rows get the columns ``call`` (of the method) and ``column`` (of the metric)."""

    def __init__(self, folder: Place, name: str, stale: bool = False, covering: bool = False) -> None:
        self.folder, self.name, self.store = folder, name, Store(folder)
        if not self.store.has_rows:
            raise VitrailError(f"{folder} holds no results: expected a folder written by `vitrail bench`.")
        rows = self.store.rows()
        self.plan = self._plan()
        pairs = list(zip(rows["method"], rows["params"], strict=True))
        calls = {(method, params): join_call(method, _parameters(params)) for method, params in dict.fromkeys(pairs)}
        if covering and self.plan is not None:
            self.plan = _covering(self.plan, calls.values(), rows["metric"].unique())
        planned = [as_column(call, self.plan.protocol) for call in self.plan.metrics] if self.plan else []
        columns = {call: self._marked(as_column(call), planned) for call in rows["metric"].unique() if call}
        self.columns = list(dict.fromkeys([*planned, *columns.values()]))
        rows["call"] = [calls[pair] for pair in pairs]
        rows["column"] = [columns[call].call if call else "" for call in rows["metric"]]
        stale_metric = rows["column"].isin([column.call for column in self.columns if column.stale])
        stale_method = rows["call"].isin(self._unplanned(calls)) | self._is_old(rows)
        self.left_out = 0 if stale else int((stale_method | stale_metric).sum())
        if stale:
            rows.loc[stale_method, "call"] += STALE
        else:
            rows = rows[~(stale_method | stale_metric)]
        self.failed = rows[rows["error"].notna()]
        good = rows[rows["error"].isna() & (rows["method"] != "") & (rows["metric"] != "")]
        # Another version of a method, or another image of the same name, has another key; the newest counts.
        self.good = good.drop_duplicates([*SETTING, "image", "call", "column"], keep="last")
        self.replaced = len(good) - len(self.good)

    def _plan(self) -> Plan | None:
        if not self.store.exists:
            return None
        try:
            return self.store.plan()
        except VitrailError as error:
            warnings.warn(f"the report is written without its plan: {error}", stacklevel=2)
            return None

    def _marked(self, column: Column, planned: Sequence[Column]) -> Column:
        """A column, marked as stale where the plan does not have it; one that is not registered is known by name."""
        if self.plan is None or column in planned:
            return column
        names = [call_name(item.call) for item in planned if item.metric is None]
        return column if column.metric is None and call_name(column.call) in names else replace(column, stale=True)

    def _unplanned(self, calls: Mapping[tuple[str, str], str]) -> list[str]:
        """The calls of methods that the plan does not have; one that is not registered is known by name."""
        if self.plan is None:
            return []
        planned = {normal_call(call) for call in self.plan.methods}
        names = {call_name(call) for call in planned}
        return [
            call
            for (method, _), call in calls.items()
            if call and call not in planned and (_factory(method) is not None or method not in names)
        ]

    def _is_old(self, rows: pd.DataFrame) -> pd.Series[bool]:
        """Rows of an older version of a method or metric that has rows of the present version, too."""
        metrics = {column.call: column.metric for column in self.columns}
        kinds = [rows[name] for name in ("method", "params", "column", "explained")]
        row_kinds = list(zip(*kinds, strict=True))
        work = {kind: _work(kind[0], kind[1], metrics.get(kind[2]), kind[3]) for kind in set(row_kinds)}
        hashes = zip(rows["image_hash"], rows["model_hash"], row_kinds, strict=True)
        present = rows["key"] == [hash_of(str(image), str(model), work[kind] or "") for image, model, kind in hashes]
        return present.groupby(kinds, dropna=False).transform("any") & ~present

    def methods(self) -> list[str]:
        present = list(self.good["call"].unique())
        planned = [normal_call(call) for call in self.plan.methods] if self.plan else []
        return [*(call for call in planned if call in present), *(call for call in present if call not in planned)]

    def metrics(self) -> list[Column]:
        present = set(self.good["column"])
        return [column for column in self.columns if column.call in present]

    def scaled(self) -> set[str]:
        """The metrics with values of scores that are no probabilities."""
        return set(self.good["column"][self.good["scale"].notna()])

    def settings(self, methods: list[str], metrics: list[Column]) -> list[Setting]:
        calls, pictures = [column.call for column in metrics], self.store.pictures()
        groups = self.good.groupby(SETTING, sort=False, dropna=False)
        return [self._setting(key, rows, methods, calls, pictures) for key, rows in groups]

    def _setting(
        self, key: tuple[str, ...], rows: pd.DataFrame, methods: list[str], metrics: list[str], pictures: pd.DataFrame
    ) -> Setting:
        import pandas as pd

        image, images = pd.factorize(rows["image"])
        method = pd.Index(methods).get_indexer(rows["call"])
        metric = pd.Index(metrics).get_indexer(rows["column"])
        values = np.full((len(images), len(methods), len(metrics)), np.nan)
        values[image, method, metric] = rows["value"]
        explanations = rows.drop_duplicates(["image", "call"])
        seconds = explanations.groupby("call")["seconds"].mean().reindex(methods).to_numpy(dtype=np.float64)
        places = list(zip(image, method, metric, strict=True))
        parts, curves = (_stacked(rows[name], places, len(images)) for name in ("parts", "curve"))
        about = dict(zip(SETTING, key, strict=True))
        classes = _classes(rows.drop_duplicates("image"), pictures[pictures["model"] == about["model"]])
        return Setting(
            self.name, self.folder, images=list(images), classes=classes, values=values, seconds=seconds, parts=parts,
            curves=curves, **about,
        )  # fmt: skip

    def errors(self) -> list[ErrorGroup]:
        groups = self.failed.groupby(["model", "call", "column", "error"], sort=False, dropna=False)
        return [
            ErrorGroup(self.name, model, method, metric, reason, len(rows), str(rows["image"].iloc[0]))
            for (model, method, metric, reason), rows in groups
        ]


def _covering(plan: Plan, methods: Iterable[str], metrics: Iterable[str]) -> Plan:
    """The plan with these normalised calls as well."""
    planned = {normal_call(call) for call in plan.methods}
    columns = {as_column(call, plan.protocol).call for call in plan.metrics}
    all_methods = [*plan.methods, *(call for call in methods if call and call not in planned)]
    all_metrics = [*plan.metrics, *(call for call in metrics if call and call not in columns)]
    return replace(plan, methods=[*dict.fromkeys(all_methods)], metrics=[*dict.fromkeys(all_metrics)])


def _classes(rows: pd.DataFrame, pictures: pd.DataFrame) -> list[str]:
    """The true class of each image, or the explained one if that is unknown; names come from the stored pictures."""
    known = pictures.set_index("image") if "label" in pictures else None
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

    def name(number: Any) -> str:
        return "unknown" if _missing(number) else names.get(int(number), f"class {int(number)}")

    return [
        name(target) + " (explained)" if _missing(label) else name(label)
        for label, target in zip(rows["label"], rows["target"], strict=True)
    ]


def _missing(value: Any) -> bool:
    return value is None or bool(np.isnan(value))


def _parameters(text: str) -> dict[str, Any]:
    try:
        return dict(parse_json(text or "{}"))
    except ValueError:
        return {"params": text}


def _factory(method: str) -> MethodFactory | None:
    """The registered method of a name; None if it is not registered here."""
    from vitrail.methods.registry import get_method

    try:
        return get_method(method)
    except VitrailError:
        return None


def _work(method: str, params: str, metric: Metric | None, explained: str) -> str | None:
    """The work of a row by the present versions of its method and metric; None where one is not registered here."""
    factory = _factory(method) if method else None
    if factory is None or metric is None:
        return None
    values = {**factory.parameters(), **_parameters(params)}
    asked = (factory.info.name, factory.version, values), (metric.info.name, metric.version, metric.params)
    return work_of(*asked, explained)


def as_column(call: str, protocol: str | None = None) -> Column:
    """The metric of a call, with the protocol of its plan as when it is measured."""
    from vitrail.evaluation import build_metrics

    try:
        metric = build_metrics([call], protocol)[0]
    except VitrailError:
        return Column(call)  # not registered here
    return Column(metric.call, metric)


def _stacked(lists: Any, places: list[tuple[int, int, int]], images: int) -> dict[tuple[int, int], Floats]:
    """Lists of numbers by method and metric, (images, longest); shorter curves are interpolated to the longest."""
    groups: dict[tuple[int, int], list[tuple[int, Floats]]] = {}
    for (image, method, metric), numbers in zip(places, lists, strict=True):
        if numbers is not None and not isinstance(numbers, float) and len(numbers):
            groups.setdefault((method, metric), []).append((image, np.asarray(numbers, dtype=np.float64)))
    arrays = {}
    for key, members in groups.items():
        longest = max(len(numbers) for _, numbers in members)
        arrays[key] = np.full((images, longest), np.nan)
        for image, numbers in members:
            arrays[key][image] = np.interp(np.linspace(0, 1, longest), np.linspace(0, 1, len(numbers)), numbers)
    return arrays


def _run_names(folders: Sequence[Place]) -> list[str]:
    """Folder names, with as many parents as needed to be unique."""
    paths = [PurePosixPath(folder) if is_remote(folder) else Path(folder).resolve() for folder in folders]
    if len(set(paths)) != len(paths):
        raise VitrailError("the same run was given twice.")
    depth = 1
    while len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in paths]


def _labels(settings: Sequence[Setting]) -> list[str]:
    """What distinguishes each setting: model, data, explained class; weights and run only if these are equal."""
    rows = [(s.model, s.data_name, s.explained, s.model_hash[:8], s.run) for s in settings]
    columns = list(zip(*rows, strict=True))
    selected = [values for values in columns[:3] if len(set(values)) > 1]
    for values in columns[3:]:
        if len(set(zip(*selected, values, strict=True))) > len(set(zip(*selected, strict=True)) or {()}):
            selected.append(values)
    return [" · ".join(values) for values in zip(*selected, strict=True)] or [""] * len(settings)
