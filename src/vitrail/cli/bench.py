"""``vitrail bench``: runs a plan and shows its progress, or watches a run that is in progress elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape

from vitrail.bench.folders import Place, is_remote
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.shard import Shard
from vitrail.calls import call_name, split_list
from vitrail.cli import options
from vitrail.cli.codes import FAILED
from vitrail.cli.outputs import plural, print_json
from vitrail.cli.sources import print_skipped
from vitrail.errors import VitrailError
from vitrail.plugins import load_plugins
from vitrail.progress import watched

if TYPE_CHECKING:
    from vitrail.bench.run import Outcome, Step
    from vitrail.bench.suite import Suite
    from vitrail.cli.board import Board
    from vitrail.models.view import View

SUITES = ("leaderboard",)
LINE_EVERY = 30.0  # seconds


@options.grouped(load_options=options.load_options)
def bench(
    *,
    plan: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN.toml",
            help="Plan file, whose settings options override; or leaderboard: all methods and metrics.",
        ),
    ] = None,
    model: Annotated[
        list[str] | None, typer.Option("--model", "-m", metavar="MODELS", help="Models, comma-separated or repeated.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Data set: scenes:100, imagenet:DIR, a folder, …; see docs/data.md. For leaderboard: the folder with "
            "its data and models."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(metavar="METHODS", help="Methods, e.g. tis or rise(masks=256), comma-separated or repeated."),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="METRICS", help="Metrics, e.g. deletion(steps=32), comma-separated or repeated."),
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Number of images to sample; default: all.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling; default: 0.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Class to explain: predicted or label; or, of the annotated object of each image, region (its class "
            "within its mask, by a segmentation model) or box (the detection that fits its box)."
        ),
    ] = None,
    protocol: Annotated[str | None, typer.Option(help="Use this paper's protocol: tis, vit_cx, rise, …")] = None,
    preset: Annotated[str | None, typer.Option(help="full, or quick: fewer steps and masks.")] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Run folder, or s3://BUCKET/RUN; an unfinished run is resumed. Default: vitrail-run, or "
            "vitrail-leaderboard.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Measure only every N-th image, while other processes measure the others."),
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per batch; default: by device.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bitwise reproducible: one image at a time.")
    ] = False,
    maps: Annotated[bool, typer.Option(help="Store maps and thumbnails for the report.")] = True,
    pairs: Annotated[
        list[str] | None,
        typer.Option(metavar="PAIRS", help="For leaderboard: only these pairs of a model and data, e.g. pets,photo."),
    ] = None,
    retry: options.Retry = False,
    cluster: options.Cluster = None,
    workers: options.Workers = None,
    watch: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Only watch a run that is in progress elsewhere: a folder, s3://BUCKET/RUN, or a folder of the head "
            "of --cluster.",
        ),
    ] = None,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Benchmark methods by metrics on many images; the same command resumes an interrupted run."""
    if watch is not None:
        if as_json:
            raise VitrailError("--watch draws a table for people: leave out --json, or read the run folder.")
        watch_run(watch, cluster=cluster)
        return
    settings: dict[str, Any] = {
        "metrics": metrics, "images": images, "seed": seed, "target": target, "protocol": protocol,
        "batch_size": batch_size, "deterministic": deterministic or None,
    }  # fmt: skip
    plugins = [path.expanduser().resolve() for path in plugin or []]
    part = None if shard is None else Shard.parse(shard)
    console, page = Console(stderr=as_json, highlight=False), None
    measure = partial(run, console, device=device, retry=retry, plugins=plugins, shard=part)
    if plan is not None and str(plan) in SUITES and not plan.exists():
        from vitrail.bench.suite import open_suite

        del settings["metrics"]
        others = {"model": model, **settings, "preset": preset, "cluster": cluster, "workers": workers, **load_options}
        unused = [options.flag(name) for name, value in others.items() if value is not None]
        if unused:
            raise VitrailError(f"{plan} determines its models and images: leave out {', '.join(unused)}.")
        load_plugins(plugins)
        place = None if data is None else Path(data)
        if out is not None and is_remote(out):
            raise VitrailError(f"{plan} writes its page into a folder, not to {out}: choose a folder with --out.")
        suite_folder = Path(out or f"vitrail-{plan}")
        selected = partial(
            open_suite, str(plan), place, metrics=split_list(metrics or []), pairs=split_list(pairs or [])
        )
        outcomes, page = run_suite(console, selected, split_list(methods or []), suite_folder, measure)
    else:
        if pairs:
            raise VitrailError("--pairs is for leaderboard: leave it out, or name another data set with --data.")
        load_plugins(plugins)
        settings |= {"data": data, "methods": methods, "maps": None if maps else False}
        chosen = make_plan(plan, model, load_options, settings, preset)
        run_folder = out if out is not None and is_remote(out) else Path(out or "vitrail-run")
        outcomes = {run_folder: measure(chosen, run_folder, cluster=cluster, workers=workers)}
    if as_json:
        print_json({"runs": [_as_dict(path, outcome) for path, outcome in outcomes.items()], "leaderboard": page})
    if any(outcome.failed for outcome in outcomes.values()):
        raise typer.Exit(FAILED)


def _as_dict(folder: Place, outcome: Outcome) -> dict[str, Any]:
    """What --json prints of a run."""
    return {
        "run": folder,
        "measured": outcome.images,
        "known": outcome.known,
        "rows": outcome.rows,
        "failed": outcome.failed,
        "first_error": outcome.first_error,
        "seconds": outcome.seconds,
    }


def run_suite(
    console: Console,
    selected: Callable[..., Suite],
    methods: Sequence[str],
    out: Path,
    measure: Callable[[Plan, Path], Outcome],
) -> tuple[dict[Place, Outcome], Path]:
    """Measures the pairs of a suite one after another and writes its page; returns the runs and the page.

    ``selected`` opens the suite with these ``methods``. The page has all pairs, also those that were measured earlier.
    The methods of plugin files are measured beside the suite's reference; those of packages where they are named.
    """
    from vitrail.methods.registry import METHODS
    from vitrail.report.leaderboard import write_leaderboard

    added = [entry for entry in METHODS.entries() if is_of_plugin(entry)]
    suite = selected(methods=methods)
    if added and not methods:
        suite = selected(methods=[*added, *suite.reference])
    outcomes: dict[Place, Outcome] = {}
    for pair in suite.pairs:
        if pair.plan is None:
            console.print(f"[dim]{escape(f'{pair.title} is left out: there is no {pair.missing}.')}[/]", soft_wrap=True)
            continue
        console.print(f"[bold]{escape(pair.title)}[/]: {escape(pair.about)}", soft_wrap=True)
        outcomes[out / pair.name] = measure(pair.plan, out / pair.name)
    measured = {call for pair in suite.pairs if pair.plan is not None for call in pair.plan.methods}
    everything = selected(methods=suite.reference, metrics=[], pairs=[])
    page = write_leaderboard(out, everything.pairs, sorted(call for call in measured if is_of_plugin(call)))
    console.print(f"Leaderboard: [bold]{escape(str(page))}[/]", soft_wrap=True)
    return outcomes, page


def is_of_plugin(call: str) -> bool:
    """Whether a method does not come with vitrail; for an aggregation, its base."""
    from vitrail.methods.registry import get_method

    return not get_method(call_name(call).partition(".")[0]).__module__.startswith("vitrail.")


def make_plan(
    path: Path | None,
    models: list[str] | None,
    load_options: Mapping[str, Any],
    settings: Mapping[str, Any],
    preset: str | None,
) -> Plan:
    """The plan of a file, overridden by the options of the command line."""
    model_options = {name: str(value) if isinstance(value, Path) else value for name, value in load_options.items()}
    chosen: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    for name in ("methods", "metrics"):
        if name in chosen:
            chosen[name] = split_list(chosen[name])
    if models:
        chosen["models"] = [ModelSpec(name, dict(model_options)) for name in split_list(models)]
    elif model_options and path is not None:
        raise VitrailError(f"{', '.join(model_options)} requires a model: name it with --model.")
    if path is not None:
        plan = replace(Plan.read(path), **chosen)
    else:
        if "data" not in chosen:
            raise VitrailError("no data set is given: use --data, e.g. scenes:100 or imagenet:DIR, or a plan file.")
        plan = Plan(**{"models": [ModelSpec(default_model(chosen["data"]), model_options)], **chosen})
    return plan if preset is None else plan.with_preset(preset)


def default_model(data: str) -> str:
    """The embedded model that was trained on the classes of the data set."""
    name = data.partition("?")[0].partition(":")[0]
    return {"scenes": "scenes", "scenes_text": "scenes-text"}.get(name, "photo")


@dataclass(frozen=True)
class ModelLoader:
    """Loads the models of a plan; the workers of a cluster get a copy."""

    device: str
    plugins: Sequence[Path]

    def __call__(self, spec: ModelSpec) -> View:
        from vitrail.bench.run import load_model

        load_plugins(self.plugins)
        return load_model(replace(spec, options={"device": self.device, **spec.options}))


def run(
    console: Console,
    plan: Plan,
    out: Place,
    *,
    device: str,
    retry: bool,
    plugins: Sequence[Path],
    shard: Shard | None,
    cluster: str | None = None,
    workers: int | None = None,
) -> Outcome:
    """Runs the plan and prints a summary."""
    options.check_workers(workers, cluster)
    if shard is not None and cluster is not None:
        raise VitrailError("--shard is for processes without a cluster: leave it out with --cluster.")

    from vitrail.bench.cluster import run_on_cluster
    from vitrail.bench.run import open_plan_data
    from vitrail.bench.run import run as run_plan
    from vitrail.bench.store import Store
    from vitrail.cli.board import board_of

    loader = ModelLoader(device, plugins)

    def load_and_describe(spec: ModelSpec) -> View:
        view = loader(spec)
        text = f"Preprocessing of {view.name}: {view.preprocessing.describe()}."
        console.print(text, style="dim", markup=False, soft_wrap=True)
        return view

    where = f"[bold]{escape(str(out))}[/]"
    console.print(f"Run {where}: Ctrl-C stops and keeps the results, the same command resumes.", soft_wrap=True)
    store, data = Store(out), open_plan_data(plan)
    print_skipped(console, data.name, data.skipped)
    board = board_of(plan, store, data.ids, errors=not retry)
    live = Live(board, console=console, refresh_per_second=1) if console.is_terminal else None
    watch = board.see if live else Lines(board, console).see
    try:
        with live or nullcontext(), watched(lambda name, done, total: None):  # no bars for single images
            if cluster is None:
                outcome = run_plan(plan, out, load=load_and_describe, watch=watch, retry=retry, data=data, shard=shard)
            else:
                outcome = run_on_cluster(
                    plan, out, cluster, load=loader, watch=watch, retry=retry, workers=workers, data=data
                )
            final = board_of(plan, store, data.ids)
            if live:
                live.update(final)
    except VitrailError as error:
        if board.started or isinstance(error.__cause__, OSError):
            rows = store.rows(["image"])
            measured = f"{plural(rows['image'].nunique(), 'image')} with {plural(len(rows), 'row')} measured so far"
            text = f"The run stopped early: {measured}, kept in {where}; the same command resumes."
            console.print(text, soft_wrap=True)
        raise
    if not live:
        console.print(final)
    _print_outcome(console, outcome, out)
    return outcome


def _print_outcome(console: Console, outcome: Outcome, out: Place) -> None:
    images, rows = plural(outcome.images, "image"), plural(outcome.rows, "row")
    summary = f"{images} measured, {outcome.known} known before: {rows} in {outcome.seconds:.0f} s."
    console.print(summary, soft_wrap=True)
    if outcome.failed:
        before = f" ({outcome.failed_before} in an earlier call: use --retry)" if outcome.failed_before else ""
        failures = f"[red]{plural(outcome.failed, 'row')} could not be measured[/]{before}"
        console.print(f"{failures}. First error: {escape(outcome.first_error or '')}", soft_wrap=True)
    console.print(f"Report: [bold]vitrail report {escape(str(out))}[/]", soft_wrap=True)


def watch_run(folder: Place, every: float = 2.0, once: bool = False, cluster: str | None = None) -> None:
    """Shows the progress of a run, read from its files, here or on the head of a cluster, until it is complete."""
    from vitrail.bench.cluster import ClusterStore
    from vitrail.bench.store import Store
    from vitrail.cli.board import board_of, image_ids

    def ids_of(store: Store) -> list[str] | None:
        return image_ids(store.plan())

    store: Store = Store(folder) if cluster is None else ClusterStore(folder, cluster)
    watched_plan = None
    if not store.exists:
        raise VitrailError(f"{folder} is not a run folder: it has no plan.toml.")
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            began, plan = time.monotonic(), store.plan()
            if plan != watched_plan:  # at first, and when the run is resumed with another plan
                watched_plan = plan
                ids = store.ask(ids_of) if isinstance(store, ClusterStore) else ids_of(store)
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
    """A line of progress now and then, where there is no terminal for the live table."""

    board: Board
    console: Console
    last: float = field(default_factory=time.monotonic)

    def see(self, step: Step) -> None:
        self.board.see(step)
        if time.monotonic() - self.last > LINE_EVERY:
            self.console.print(self.board.line(step.model), soft_wrap=True, markup=False)
            self.last = time.monotonic()
