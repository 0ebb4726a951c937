"""``vitrail bench``: runs a plan under the eyes of the user, or watches one that runs elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from vitrail.bench.cluster import run_on_cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Outcome, Step, load_model, open_plan_data
from vitrail.bench.run import run as run_plan
from vitrail.bench.store import Store
from vitrail.calls import split_list
from vitrail.cli.board import Board, board_of, image_ids
from vitrail.errors import VitrailError
from vitrail.models.view import View
from vitrail.progress import watched

LINE_EVERY = 30.0  # seconds


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


def run(plan: Plan, out: Path, device: str, retry: bool, cluster: str | None = None, workers: int | None = None) -> int:
    """Runs the plan and says what came of it; returns how much of it could not be measured, now or before."""
    if workers is not None and cluster is None:
        raise VitrailError(f"--workers {workers} is for a cluster: give --cluster too.")
    told = Console(highlight=False)

    def load(spec: ModelSpec) -> View:
        return load_model(replace(spec, options={"device": device, **spec.options}))

    told.print(f"Run [bold]{escape(str(out))}[/]: Ctrl-C keeps what is done, the same command goes on.", soft_wrap=True)
    store, data = Store(out), open_plan_data(plan)
    board = board_of(plan, store, data.ids, errors=not retry)  # which are tried again
    live = Live(board, console=told, refresh_per_second=1) if told.is_terminal else None
    watch = board.see if live else Lines(board, told).see
    try:
        with live or nullcontext(), watched(lambda what, done, total: None):  # bars within an image would disturb
            if cluster is None:
                outcome = run_plan(plan, out, load=load, watch=watch, retry=retry, data=data)
            else:
                outcome = run_on_cluster(
                    plan, out, cluster, load=load, watch=watch, retry=retry, workers=workers, data=data
                )
            final = board_of(plan, store, data.ids)
            if live:
                live.update(final)
    except VitrailError as error:
        if board.started or isinstance(error.__cause__, OSError):
            _tell_kept(told, out)
        raise
    if not live:
        told.print(final)
    _conclude(told, outcome, out)
    return outcome.failed


def _tell_kept(told: Console, out: Path) -> None:
    rows = Store(out).rows(["image"])
    told.print(
        f"The run ended early. {rows['image'].nunique()} images with {len(rows)} rows were measured and ", end=""
    )
    told.print(f"kept in [bold]{escape(str(out))}[/]; the same command goes on.", soft_wrap=True)


def _conclude(told: Console, outcome: Outcome, out: Path) -> None:
    told.print(f"{outcome.images} images measured, {outcome.known} known before: {outcome.rows} rows in ", end="")
    told.print(f"{outcome.seconds:.0f} s.")
    if outcome.failed:
        before = f" ({outcome.failed_before} in an earlier call: --retry tries again)" if outcome.failed_before else ""
        told.print(f"[red]{outcome.failed} could not be measured[/]{before}; the rows say why. The first: ", end="")
        told.print(escape(outcome.first_error or ""), soft_wrap=True)
    told.print(f"Report: [bold]vitrail report {escape(str(out))}[/]", soft_wrap=True)


def watch_run(folder: Path, every: float = 2.0, once: bool = False) -> None:
    """Shows a run as it grows, from its files alone, until it is complete."""
    if not (folder / "plan.toml").exists():
        raise VitrailError(f"{folder} is no run folder: there is no plan.toml in it.")
    store, told = Store(folder), Console(highlight=False)
    plan = store.plan()
    ids = image_ids(plan)
    first = board_of(plan, store, ids)
    with Live(console=told, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            if store.plan() != plan:  # someone went on with another one
                plan = store.plan()
                ids = image_ids(plan)
                first = board_of(plan, store, ids)
            for spec in plan.models:
                first.start(spec.name, began)
            board = board_of(plan, store, ids)
            board.started, board.baseline = first.started, first.baseline
            live.update(board, refresh=True)
            if once or board.complete:
                return
            time.sleep(max(every, 9 * (time.monotonic() - began)))  # large runs are read less often


@dataclass
class Lines:
    """In place of the live table where there is no terminal: a line now and then."""

    board: Board
    told: Console
    said: float = field(default_factory=time.monotonic)

    def see(self, step: Step) -> None:
        self.board.see(step)
        if time.monotonic() - self.said > LINE_EVERY:
            self.told.print(self.board.line(step.model), soft_wrap=True, markup=False)
            self.said = time.monotonic()
