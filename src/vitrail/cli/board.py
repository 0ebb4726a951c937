"""The live table of a run: how far each method is, what it costs, and the means so far."""

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
from vitrail.data.names import data_name
from vitrail.errors import VitrailError
from vitrail.evaluation import explained_classes
from vitrail.report.rows import as_column, normal_call

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["model", "data", "image", "method", "params", "metric", "explained", "value", "seconds", "error"]
BAR = 8
CELL = 14  # columns of the terminal that a metric takes
FIXED = 28  # that bar, seconds and time left take
NAME = 24  # that the name of a method takes at most where there is little room


@dataclass
class Tally:
    """Numbers summed up as they come, so that a table of many images costs no more than one of few."""

    rows: int = 0  # those that failed or do not apply too
    known: int = 0
    mean: float = 0.0
    spread: float = 0.0  # sum of squared distances from the mean

    def add(self, rows: int, known: int, mean: float, spread: float) -> None:
        self.rows += rows
        if known:
            both, apart = self.known + known, mean - self.mean
            self.spread += spread + apart * apart * self.known * known / both
            self.mean += apart * known / both
            self.known = both

    def __str__(self) -> str:
        if not self.known:
            return "–"
        if self.known == 1:
            return f"{self.mean:.3f}"
        half = 1.96 * math.sqrt(self.spread / (self.known - 1) / self.known)
        return f"{self.mean:.3f} ±{half:.3f}"


@dataclass
class Board:
    """What a plan's rows say so far. Rows come in one thread while another draws."""

    plan: Plan
    total: int | None = None  # images; None = not known here
    tallies: dict[tuple[str, str, str, str], Tally] = field(default_factory=dict)  # model, method, metric, explained
    seconds: dict[tuple[str, str], Tally] = field(default_factory=dict)
    unread: Counter[str] = field(default_factory=Counter)  # images by model
    errors: int = 0
    begin: dict[str, float] = field(default_factory=dict)
    baseline: dict[tuple[str, str], int] = field(default_factory=dict)  # images of a method when it began

    def __post_init__(self) -> None:
        plan = self.plan
        self.methods = list(dict.fromkeys(normal_call(call) for call in plan.methods))
        self.metrics = list(dict.fromkeys(as_column(call, plan.protocol).call for call in plan.metrics))
        self.kinds = explained_classes(plan.target, plan.protocol)
        self.lock = Lock()

    def see(self, step: Step) -> None:
        """Takes what a run has just done."""
        import pandas as pd

        if step.rows:
            self.add(pd.DataFrame([{**row, "model": step.model} for row in step.rows]))
        self.total = step.total
        self.start(step.model, time.monotonic())

    def start(self, model: str, now: float) -> None:
        """From the first time on that this is said the rate is measured."""
        with self.lock:
            if model not in self.begin:
                self.begin[model] = now
                self.baseline |= {(model, method): self._count(model, method) or 0 for method in self.methods}

    def add(self, rows: pd.DataFrame) -> None:
        """Takes rows; those that the plan does not ask for are left out."""
        frame = rows.reindex(columns=COLUMNS).astype({"method": object, "metric": object, "explained": object})
        frame = frame.fillna({"method": "", "metric": "", "explained": ""})
        pairs = list(zip(frame["method"], frame["params"], strict=True))
        calls = {pair: _call(*pair) for pair in set(pairs)}
        frame["method"] = [calls[pair] for pair in pairs]
        asked = {"method": self.methods, "metric": self.metrics, "explained": self.kinds}
        for column, own in asked.items():
            frame = frame[frame[column].isin(["", *own])]
        with self.lock:
            self.errors += int(frame["error"].notna().sum())
            self.unread.update(frame.loc[frame["method"] == "", "model"])
            frame = frame[frame["method"] != ""]
            for key, own in frame.groupby(["model", "method", "metric", "explained"], sort=False):
                _take(self.tallies.setdefault(key, Tally()), own["value"])
            for pair, own in frame.groupby(["model", "method"], sort=False):
                _take(self.seconds.setdefault(pair, Tally()), own["seconds"])

    @property
    def complete(self) -> bool:
        """Whether all that the plan asks for is there."""
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
            yield Text("s/map: explaining alone; left: its part of the remaining time; ±: 95 %.", style="dim")
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
                span(left[method]) if method in left else "–", *texts,
            )  # fmt: skip
        return table

    def _cells(self) -> list[tuple[str, str]]:
        """What is measured of a map: metric and explained class."""
        return [(metric, kind) for metric in self.metrics for kind in self.kinds]

    def _line(self, model: str) -> str:
        counts = [count for method in self.methods if (count := self._count(model, method)) is not None]
        told = f"{model}: {self._of_all(self._measured(model, min(counts, default=0)))} images"
        told += f", {self.unread[model]} could not be read" if self.unread[model] else ""
        pace, left = self._pace(model), self._left(model)
        if pace is not None:
            told += f", {pace:.2f} s/image"
        return f"{told}, {span(sum(left.values()))} left" if left else told

    def _count(self, model: str, method: str) -> int | None:
        """Images of which all rows of a method are there; None if the plan has nothing for it."""
        spared = self.plan.cheap_only  # measured on some methods only: which, the rows tell
        found = [(self.tallies.get((model, method, *cell)), split_call(cell[0])[0]) for cell in self._cells()]
        counts = [own.rows if own else 0 for own, name in found if own or name not in spared]
        if not counts:
            return None
        count = min(counts) + self.unread[model]
        return count if self.total is None else min(count, self.total)

    def _measured(self, model: str, count: int) -> int:
        """Those of so many images that could be read."""
        return max(0, count - self.unread[model])

    def _fresh(self, model: str) -> dict[str, int]:
        """Images measured since the beginning, by method."""
        if model not in self.begin:
            return {}
        found = {method: (self._count(model, method) or 0) - self.baseline[model, method] for method in self.methods}
        return {method: count for method, count in found.items() if count > 0}

    def _pace(self, model: str) -> float | None:
        """Seconds per image, all methods and metrics together."""
        fresh = self._fresh(model)
        return (time.monotonic() - self.begin[model]) / max(fresh.values()) if fresh else None

    def _left(self, model: str) -> dict[str, float]:
        """Each method's part of the remaining time; what is not explaining, the methods at work share equally."""
        pace, fresh = self._pace(model), self._fresh(model)
        if pace is None or self.total is None:
            return {}
        own = {method: self.seconds[model, method].mean for method in fresh if (model, method) in self.seconds}
        explaining = sum(own.values())  # more than the pace where methods share a trace
        scale, rest = min(1.0, pace / explaining) if explaining else 0.0, max(0.0, pace - explaining) / len(fresh)
        lacking = {method: self.total - (self._count(model, method) or 0) for method in fresh}
        return {method: lacking[method] * (own.get(method, 0.0) * scale + rest) for method in fresh}

    def _of_all(self, count: int) -> str:
        return str(count) if self.total is None else f"{count}/{self.total}"

    def _bar(self, count: int) -> str:
        filled = BAR * count // self.total if self.total else 0
        return "" if self.total is None else "█" * filled + "·" * (BAR - filled)


def image_ids(plan: Plan) -> list[str] | None:
    """The images of a plan; None where they cannot be read: a run may be watched far from its data."""
    try:
        return open_plan_data(plan).ids
    except VitrailError:
        return None


def board_of(plan: Plan, store: Store, ids: Sequence[str] | None, errors: bool = True) -> Board:
    """A board with what a run folder holds of a plan, on these images; without ``errors`` only what has a value."""
    board = Board(plan, None if ids is None else len(ids))
    if not (store.folder / "rows").is_dir():
        return board
    rows = store.rows(COLUMNS)
    rows = rows[(rows["data"] == data_name(plan.data)) & rows["model"].isin([spec.name for spec in plan.models])]
    if ids is not None:
        rows = rows[rows["image"].isin(ids)]
    if not errors:
        rows = rows[rows["error"].isna()]
    # another version of a method, or other weights of a model, have other keys; the newest is what counts
    board.add(rows.drop_duplicates(["model", "image", "method", "params", "metric", "explained"], keep="last"))
    return board


def span(seconds: float) -> str:
    """A time as one says it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _take(tally: Tally, values: Any) -> None:
    known = values.dropna()
    mean = float(known.mean()) if len(known) else 0.0
    tally.add(len(values), len(known), mean, float(((known - mean) ** 2).sum()))


def _call(method: str, params: Any) -> str:
    """The call of a row's method; nothing where an image could not be read."""
    return join_call(method, json.loads(params)) if method else ""
