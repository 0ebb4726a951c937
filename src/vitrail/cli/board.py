"""The live table of a run: progress and cost of each method, and the means so far."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from vitrail.bench.plan import Plan
from vitrail.bench.run import Step, open_plan_data
from vitrail.bench.store import Store
from vitrail.calls import join_call, split_call
from vitrail.cli.outputs import duration
from vitrail.data.names import data_name
from vitrail.errors import VitrailError
from vitrail.evaluation import explained_classes
from vitrail.report.results import as_column, normal_call

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["model", "data", "image", "method", "params", "metric", "explained", "value", "seconds", "error"]
BAR = 8
CELL = 14  # terminal columns of a metric
FIXED = 28  # of bar, seconds and time left
NAME = 24  # of the name of a method, at most, on narrow terminals


@dataclass
class Tally:
    """Running mean and variance, so that the cost of the table does not depend on the number of images."""

    rows: int = 0  # including failed and inapplicable ones
    known: int = 0
    mean: float = 0.0
    spread: float = 0.0  # sum of squared deviations from the mean

    def add(self, values: pd.Series[float]) -> None:
        """Adds the values of some rows; NaN is that of a failed or inapplicable one."""
        self.rows += len(values)
        known = values.dropna()
        if len(known):
            mean, total = float(known.mean()), self.known + len(known)
            shift = mean - self.mean
            self.spread += float(((known - mean) ** 2).sum()) + shift * shift * self.known * len(known) / total
            self.mean += shift * len(known) / total
            self.known = total

    def __str__(self) -> str:
        if not self.known:
            return "–"
        if self.known == 1:
            return f"{self.mean:.3f}"
        half = 1.96 * math.sqrt(self.spread / (self.known - 1) / self.known)
        return f"{self.mean:.3f} ±{half:.3f}"


@dataclass
class Board:
    """The state of a plan's rows. Rows are added in one thread while another draws."""

    plan: Plan
    total: int | None = None  # images; None = unknown
    tallies: dict[tuple[str, str, str, str], Tally] = field(default_factory=dict)  # model, method, metric, explained
    seconds: dict[tuple[str, str], Tally] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)  # model → images that could not be read, or asked about
    errors: int = 0
    started: dict[str, float] = field(default_factory=dict)  # model → time
    baseline: dict[tuple[str, str], int] = field(default_factory=dict)  # images of a method at that time

    def __post_init__(self) -> None:
        plan = self.plan
        self.methods = list(dict.fromkeys(normal_call(call) for call in plan.methods))
        self.metrics = list(dict.fromkeys(as_column(call, plan.protocol).call for call in plan.metrics))
        self.kinds = explained_classes(plan.target, plan.protocol)
        self.lock = Lock()

    def see(self, step: Step) -> None:
        """Adds the rows of a step."""
        import pandas as pd

        if step.rows:
            self.add(pd.DataFrame([{**row, "model": step.model} for row in step.rows]))
        self.total = step.total
        self.start(step.model, time.monotonic())

    def start(self, model: str, now: float) -> None:
        """Starts measuring the rate, on the first call for a model."""
        with self.lock:
            if model not in self.started:
                self.started[model] = now
                self.baseline |= {(model, method): self._count(model, method) or 0 for method in self.methods}

    def add(self, rows: pd.DataFrame) -> None:
        """Adds rows; those that are not in the plan are ignored."""
        frame = rows.reindex(columns=COLUMNS).astype({"method": object, "metric": object, "explained": object})
        frame = frame.fillna({"method": "", "metric": "", "explained": ""})
        pairs = list(zip(frame["method"], frame["params"], strict=True))
        calls = {pair: _call(*pair) for pair in set(pairs)}
        frame["method"] = [calls[pair] for pair in pairs]
        planned = {"method": self.methods, "metric": self.metrics, "explained": self.kinds}
        for column, values in planned.items():
            frame = frame[frame[column].isin(["", *values])]
        with self.lock:
            self.errors += int(frame["error"].notna().sum())
            self.unread.update(frame.loc[frame["method"] == "", "model"])
            frame = frame[frame["method"] != ""]
            for key, members in frame.groupby(["model", "method", "metric", "explained"], sort=False):
                self.tallies.setdefault(key, Tally()).add(members["value"])
            for pair, members in frame.groupby(["model", "method"], sort=False):
                self.seconds.setdefault(pair, Tally()).add(members["seconds"])

    @property
    def complete(self) -> bool:
        """Whether every row of the plan exists."""
        with self.lock:
            counts = [self._count(spec.name, method) for spec in self.plan.models for method in self.methods]
        return self.total is not None and all(count is None or count >= self.total for count in counts)

    def line(self, model: str) -> str:
        """One model in one line."""
        with self.lock:
            return self._line(model)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self.lock:
            shown = [spec.name for spec in self.plan.models if any(key[0] == spec.name for key in self.tallies)]
            tables = [self._table(model, options.max_width) for model in shown]
        yield from tables
        hidden = max((len(self._cells()) - len(table.columns) + 5 for table in tables), default=0)
        if hidden:
            yield Text(f"{hidden} more columns: a wider terminal, or vitrail report, shows them.", style="dim")
        if tables:
            yield Text("s/map: explanation only; left: share of the remaining time; ±: 95 %.", style="dim")
        if self.errors:
            yield Text(f"{self.errors} could not be measured", style="red")

    def _table(self, model: str, width: int) -> Table:
        cells, room = self._cells(), width - FIXED - len(self._of_all(self.total or 0))
        name = max(len(method) for method in self.methods)
        name = min(name, max(NAME, room - CELL * len(cells)))
        shown = cells[: max(1, (room - name) // CELL)]
        table = Table(box=None, header_style="dim", title=self._line(model), title_justify="left", pad_edge=False)
        table.add_column("method", no_wrap=True, overflow="ellipsis", width=name)
        for title in ("", "images", "s/map", "left"):
            table.add_column(title, justify="right", no_wrap=True)
        for metric, kind in shown:
            title = metric.replace("(", "\n(") + (f"\n{kind}" if len(self.kinds) > 1 else "")
            table.add_column(title, justify="right", overflow="fold")
        left = self._left(model)
        for method in self.methods:
            count = self._count(model, method)
            if count is None:
                continue
            spent = self.seconds.get((model, method), Tally())
            texts = [str(self.tallies.get((model, method, *cell), Tally())) for cell in shown]
            table.add_row(
                Text(method), self._bar(count), self._of_all(self._measured(model, count)),
                f"{spent.mean:.3f}" if spent.known else "–",
                duration(left[method]) if method in left else "–", *texts,
            )  # fmt: skip
        return table

    def _cells(self) -> list[tuple[str, str]]:
        """The columns: metric and explained class."""
        return [(metric, kind) for metric in self.metrics for kind in self.kinds]

    def _line(self, model: str) -> str:
        counts = [count for method in self.methods if (count := self._count(model, method)) is not None]
        line = f"{model}: {self._of_all(self._measured(model, min(counts, default=0)))} images"
        line += f", {self.unread[model]} left out" if self.unread[model] else ""
        pace, left = self._pace(model), self._left(model)
        if pace is not None:
            line += f", {pace:.2f} s/image"
        return f"{line}, {duration(sum(left.values()))} left" if left else line

    def _count(self, model: str, method: str) -> int | None:
        """Images with all rows of a method; None if the plan has none for it."""
        optional = self.plan.cheap_only  # measured on some methods only; the rows show on which
        tallies = [(self.tallies.get((model, method, *cell)), split_call(cell[0])[0]) for cell in self._cells()]
        counts = [
            self._of_limit(tally.rows if tally else 0, name) for tally, name in tallies if tally or name not in optional
        ]
        if not counts:
            return None
        count = min(counts) + self.unread[model]
        return count if self.total is None else min(count, self.total)

    def _of_limit(self, rows: int, metric: str) -> int:
        """The images that are done by a metric: all of them once it has reached its limit."""
        limit = self.plan.limits.get(metric)
        return rows if limit is None or rows < limit or self.total is None else max(rows, self.total)

    def _measured(self, model: str, count: int) -> int:
        """The number of these images that could be read."""
        return max(0, count - self.unread[model])

    def _fresh(self, model: str) -> dict[str, int]:
        """Images measured since the start, by method."""
        if model not in self.started:
            return {}
        counts = {method: (self._count(model, method) or 0) - self.baseline[model, method] for method in self.methods}
        return {method: count for method, count in counts.items() if count > 0}

    def _pace(self, model: str) -> float | None:
        """Seconds per image, all methods and metrics together."""
        fresh = self._fresh(model)
        return (time.monotonic() - self.started[model]) / max(fresh.values()) if fresh else None

    def _left(self, model: str) -> dict[str, float]:
        """Each method's share of the remaining time; time not spent explaining is split equally."""
        pace, fresh = self._pace(model), self._fresh(model)
        if pace is None or self.total is None:
            return {}
        seconds = {method: self.seconds[model, method].mean for method in fresh if (model, method) in self.seconds}
        explaining = sum(seconds.values())  # more than the pace if methods share a trace
        scale, rest = min(1.0, pace / explaining) if explaining else 0.0, max(0.0, pace - explaining) / len(fresh)
        missing = {method: self.total - (self._count(model, method) or 0) for method in fresh}
        return {method: missing[method] * (seconds.get(method, 0.0) * scale + rest) for method in fresh}

    def _of_all(self, count: int) -> str:
        return str(count) if self.total is None else f"{count}/{self.total}"

    def _bar(self, count: int) -> str:
        filled = BAR * count // self.total if self.total else 0
        return "" if self.total is None else "█" * filled + "·" * (BAR - filled)


def image_ids(plan: Plan) -> list[str] | None:
    """The images of a plan; None if the data cannot be opened: a run may be watched from another machine."""
    try:
        return open_plan_data(plan).ids
    except VitrailError:
        return None


def board_of(plan: Plan, store: Store, ids: Sequence[str] | None, errors: bool = True) -> Board:
    """A board of the rows of a plan in a run folder, on these images; ``errors=False`` leaves out failed rows."""
    board = Board(plan, None if ids is None else len(ids))
    if not store.has_rows:
        return board
    rows = store.rows(COLUMNS)
    rows = rows[(rows["data"] == data_name(plan.data)) & rows["model"].isin([spec.name for spec in plan.models])]
    if ids is not None:
        rows = rows[rows["image"].isin(ids)]
    if not errors:
        rows = rows[rows["error"].isna()]
    # another version of a method, or other weights of a model, have other keys; the newest counts
    board.add(rows.drop_duplicates(["model", "image", "method", "params", "metric", "explained"], keep="last"))
    return board


def _call(method: str, params: Any) -> str:
    """The call of a row's method; empty for an image that was left out."""
    return join_call(method, json.loads(params)) if method else ""
