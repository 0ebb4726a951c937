"""``vitrail bench``: runs a plan under the eyes of the user, or watches one that runs elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitrail.bench.cluster import run_on_cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Outcome, Step, load_model
from vitrail.bench.run import run as run_plan
from vitrail.bench.store import Store
from vitrail.errors import VitrailError
from vitrail.metrics.calls import join_call, split_list
from vitrail.metrics.statistics import interval
from vitrail.models.view import View

WIDTH, CELL = 62, 24  # columns of the terminal that the method takes, and each metric
RESAMPLES = 200  # of its intervals
BAR = 16


def make_plan(
    path: Path | None,
    models: list[str] | None,
    weights: Mapping[str, Any],
    given: Mapping[str, Any],
    preset: str | None,
) -> Plan:
    """The plan of a file, with what the command line says in place of its own."""
    options = {name: str(value) if isinstance(value, Path) else value for name, value in weights.items() if value}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name in ("methods", "metrics"):
        if name in chosen:
            chosen[name] = split_list(chosen[name])
    if models:
        chosen["models"] = [ModelSpec(name, dict(options)) for name in split_list(models)]
    elif options:
        raise VitrailError(f"{', '.join(options)} belong to a model: name it with --model.")
    if path is not None:
        plan = replace(Plan.read(path), **chosen)
    else:
        if "data" not in chosen:
            raise VitrailError("--data says what to measure on, as scenes:100 or imagenet:DIR; or give a plan file.")
        plan = Plan(**{"models": [ModelSpec(default_model(chosen["data"]))], **chosen})
    return plan if preset is None else plan.with_preset(preset)


def default_model(data: str) -> str:
    """The embedded model that knows the data."""
    return "scenes" if data.split(":", maxsplit=1)[0] == "scenes" else "photo"


def run(plan: Plan, out: Path, device: str, retry: bool, cluster: str | None = None) -> int:
    """Runs the plan and says what came of it; returns how much failed."""
    told = Console(highlight=False)

    def load(spec: ModelSpec) -> View:
        return load_model(replace(spec, options={"device": device, **spec.options}))

    told.print(f"Run [bold]{escape(str(out))}[/]: Ctrl-C keeps what is done, the same command goes on.", soft_wrap=True)
    board = Board()
    for rows in _before(out):
        board.add(rows)
    with Live(console=told, refresh_per_second=2, transient=not told.is_terminal, get_renderable=board.draw):
        if cluster is None:
            outcome = run_plan(plan, out, load=load, watch=board.see, retry=retry)
        else:
            outcome = run_on_cluster(plan, out, cluster, load=load, watch=board.see, retry=retry)
    if not told.is_terminal:
        told.print(board.draw())
    _conclude(told, outcome, out)
    return outcome.errors


def _before(out: Path) -> Iterable[list[dict[str, Any]]]:
    store = Store(out)
    if (out / "rows").is_dir():
        yield store.rows(["model", "method", "params", "metric", "value", "seconds", "error"]).to_dict("records")


def _conclude(told: Console, outcome: Outcome, out: Path) -> None:
    told.print(f"{outcome.images} images measured, {outcome.known} known before: {outcome.rows} rows in ", end="")
    told.print(f"{outcome.seconds:.0f} s.")
    if outcome.errors:
        told.print(f"[red]{outcome.errors} could not be measured[/]; the rows say why. The first: ", end="")
        told.print(escape(outcome.first_error or ""), soft_wrap=True)
    told.print(f"Report: [bold]vitrail report {escape(str(out))}[/]", soft_wrap=True)


def watch_run(folder: Path, every: float = 2.0, once: bool = False) -> None:
    """Shows a run as it grows, from its files alone."""
    if not (folder / "plan.toml").exists():
        raise VitrailError(f"{folder} is no run folder: there is no plan.toml in it.")
    store, told = Store(folder), Console(highlight=False)
    with Live(console=told, refresh_per_second=1) as live:
        while True:
            board = Board()
            rows = store.rows(["model", "image", "method", "params", "metric", "value", "seconds", "error"])
            board.add(rows.to_dict("records"))
            for model, own in rows.groupby("model"):
                board.done[str(model)] = own["image"].nunique()
            live.update(board.draw())
            if once:
                return
            time.sleep(every)


@dataclass
class Board:
    """The live table: how far each method is, what it costs, and the means so far."""

    values: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)  # model, method, metric
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    errors: int = 0
    begin: dict[str, tuple[float, int]] = field(default_factory=dict)

    def see(self, step: Step) -> None:
        self.add([{**row, "model": step.model} for row in step.rows])
        self.begin.setdefault(step.model, (time.monotonic(), step.done - 1))
        self.done[step.model], self.total[step.model] = step.done, step.total

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if isinstance(row.get("error"), str):
                self.errors += 1
                continue
            params = row["params"]
            call = row["method"] if params == "{}" else join_call(row["method"], _json(params))
            self.values.setdefault((row["model"], call, row["metric"]), []).append(float(row["value"]))
            self.seconds.setdefault((row["model"], call), []).append(float(row["seconds"]))

    def draw(self) -> Group:
        return Group(*(self._of(model) for model in self.done), *self._failures())

    def _failures(self) -> list[Text]:
        return [Text(f"{self.errors} could not be measured", style="red")] if self.errors else []

    def _of(self, model: str) -> Table:
        metrics = list(dict.fromkeys(metric for own, _, metric in self.values if own == model))
        shown = metrics[: max(1, (Console().width - WIDTH) // CELL)]
        done, total = self.done[model], self.total.get(model)
        table = Table(box=None, header_style="dim", title=self._title(model, done, total), title_justify="left")
        table.add_column("method", no_wrap=True)
        table.add_column("images", justify="right", no_wrap=True, min_width=6)
        table.add_column("s/image", justify="right", no_wrap=True, min_width=7)
        for metric in shown:
            table.add_column(metric, justify="right", no_wrap=True)
        if len(metrics) > len(shown):
            table.add_column(f"… {len(metrics) - len(shown)} more", no_wrap=True)
        for call in dict.fromkeys(method for own, method, _ in self.values if own == model):
            spent = self.seconds[model, call]
            count = max((len(self.values.get((model, call, metric), ())) for metric in metrics), default=0)
            cells = [_mean(self.values.get((model, call, metric), [])) for metric in shown]
            table.add_row(escape(call), str(count), f"{np.mean(spent):.3f}", *cells)
        return table

    def _title(self, model: str, done: int, total: int | None) -> str:
        if not total:
            return f"{escape(model)}: {done} images"
        filled = BAR * done // total
        start, before = self.begin[model]
        rate = (done - before) / max(time.monotonic() - start, 1e-9)
        left = (total - done) / rate if rate else 0
        bar = "█" * filled + "·" * (BAR - filled)
        return f"{escape(model)} {bar} {done}/{total} images, {rate:.2f}/s, {left / 60:.1f} min left"


def _mean(values: list[float]) -> str:
    known = np.array(values, dtype=float)
    known = known[~np.isnan(known)]
    if not len(known):
        return "–"
    low, high = interval(known, resamples=RESAMPLES)
    return f"{known.mean():.3f} ±{(high - low) / 2:.3f}"


def _json(text: str) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(text)
    return found
