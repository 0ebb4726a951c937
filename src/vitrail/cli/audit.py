"""``vitrail audit``: what a model gets wrong on many images, and whether it is right for the wrong reason."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitrail.bench.plan import ModelSpec
from vitrail.cli import options
from vitrail.cli.bench import ModelLoader, default_model
from vitrail.cli.codes import FAILED
from vitrail.cli.outputs import duration, plural, print_json
from vitrail.cli.sources import print_skipped
from vitrail.errors import VitrailError
from vitrail.plugins import load_plugins
from vitrail.progress import watched

if TYPE_CHECKING:
    from vitrail.audit.run import Audit
    from vitrail.bench.run import Step
    from vitrail.geometry import Box
    from vitrail.models.view import View

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


@options.grouped(load_options=options.load_options)
def audit(
    *,
    data: Annotated[
        str, typer.Argument(metavar="FOLDER-OR-DATASET", help="Images: a folder, a table of labels, pets:DIR, …")
    ],
    model: options.ModelName = None,
    table: Annotated[
        Path | None, typer.Option(help="Table with the true classes of a folder, and perhaps boxes and masks.")
    ] = None,
    masks: Annotated[Path | None, typer.Option(help="Folder with masks of the objects, named as the images.")] = None,
    boxes: Annotated[
        Path | None, typer.Option(help="Table with boxes of the objects: columns file and boxes (x0,y0,x1,y1;…).")
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[IMAGE=]X0,Y0,X1,Y1",
            help="Test a region, in shares of width and height: evidence inside, and predictions without it, for "
            "every image, or for a single file; repeatable.",
        ),
    ] = None,
    paired: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Altered copies of the images, to compare each pair.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Method of the explanations; default: decompx.skipplus (Swin: vit_cx).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report; an unfinished audit is resumed.")] = Path(
        "vitrail-audit"
    ),
    images: Annotated[int | None, typer.Option(min=1, help="Number of images to sample; default: all.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    trust: options.Trusting = True,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images per batch; default: by device.")] = None,
    retry: options.Retry = False,
    cluster: options.Cluster = None,
    workers: options.Workers = None,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Audit a model on many images: errors, calibration, and predictions that rest on the wrong evidence."""
    from vitrail.audit.removal import parse_region
    from vitrail.audit.run import audit_images, check_output
    from vitrail.evaluation import open_examples

    options.check_workers(workers, cluster)
    check_output(out, [data, *([] if paired is None else [paired])])
    single = [text for text in region or [] if "=" in text]
    everywhere = [parse_region(text) for text in region or [] if "=" not in text]
    named = [(text.rpartition("=")[0], parse_region(text.rpartition("=")[2])) for text in single]
    plugins = [path.expanduser().resolve() for path in plugin or []]
    load_plugins(plugins)
    console = Console(stderr=as_json, highlight=False)
    spec = f"folder:{data}?table={table}" if table is not None else data
    chosen = model or default_model(data)
    load = ModelLoader(device, plugins)
    set_of_images = open_examples(spec, images, seed)
    print_skipped(console, set_of_images.name, set_of_images.skipped)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in load_options.items()}
    view = load(ModelSpec(chosen, settings))
    text = f"Preprocessing of {view.name}: {view.preprocessing.describe()}."
    console.print(f"[dim]{escape(text)}[/]", soft_wrap=True)
    _test_single(console, view, named)
    console.print(
        f"Audit in [bold]{escape(str(out))}[/]: Ctrl-C stops and keeps the results, the same command resumes.",
        soft_wrap=True,
    )
    with _progress(console) as watch:
        result = audit_images(
            chosen, spec, out, method=method, masks=masks, boxes=boxes, regions=everywhere, paired=paired,
            images=images, seed=seed, trust=trust, batch_size=batch_size, retry=retry, options=settings,
            load=load, view=view, watch=watch, cluster=cluster, workers=workers,
        )  # fmt: skip
    _print_result(console, result)
    if as_json:
        print_json(_as_dict(result))
    if result.outcome.failed:
        raise typer.Exit(FAILED)


def _test_single(console: Console, view: View, regions: Sequence[tuple[str, Box]]) -> None:
    """Predicts single images again without a region."""
    from vitrail.audit.removal import without_region

    for image, box in regions:
        if not Path(image).is_file():
            raise VitrailError(f"--region names the image {image!r}, which is no file: give the path of an image.")
        removal = without_region(view, image, box)
        console.print(f"{escape(Path(image).name)}: {escape(removal.words())}", soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Any]:
    """What to call after every step: a bar with the time left, or a line now and then without a terminal."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as progress, watched(lambda name, done, total: None):
            task = progress.add_task("images", total=None)
            yield lambda step: progress.update(task, completed=step.done, total=step.total)
        return
    with watched(lambda name, done, total: None):
        yield Lines(console).see


@dataclass
class Lines:
    """A line of progress now and then, where there is no terminal for a bar."""

    console: Console
    now: float = field(default_factory=time.monotonic)  # of the last step
    last: float = field(default_factory=time.monotonic)  # of the last line
    began: float = 0.0
    measured: set[str] = field(default_factory=set)  # images, since then
    done: float = math.inf

    def see(self, step: Step) -> None:
        before, self.now = self.now, time.monotonic()
        if step.done < self.done:  # at first, and when the altered copies begin
            self.measured = set()
        if not self.measured:  # what is known from an earlier call says nothing of the time left
            self.began = before
        self.measured |= {row["image"] for row in step.rows}
        self.done = step.done
        if self.now - self.last > LINE_EVERY:
            line = f"{step.done} of {step.total} images"
            if self.measured:
                left = (self.now - self.began) / len(self.measured) * (step.total - step.done)
                line += f", about {duration(left)} left"
            self.console.print(line, soft_wrap=True, markup=False)
            self.last = self.now


def _as_dict(result: Audit) -> dict[str, Any]:
    """What --json prints."""
    summary, outcome = result.summary, result.outcome
    suspicions = [
        {"class": suspicion.name, "score": suspicion.score, "confirmed": suspicion.is_confirmed,
         "words": suspicion.words()} for suspicion in summary.suspicions
    ]  # fmt: skip
    return {
        "report": result.report,
        "files": result.files,
        "headline": summary.headline(),
        "totals": asdict(summary.totals),
        "suspicions": suspicions,
        "explained": outcome.images,
        "known": outcome.known,
        "failed": outcome.failed,
        "first_error": outcome.first_error,
        "seconds": outcome.seconds,
    }


def _print_result(console: Console, result: Audit) -> None:
    summary, outcome = result.summary, result.outcome
    totals = summary.totals
    known = f"{plural(outcome.images, 'image')} explained, {outcome.known} known before"
    console.print(f"{known}, in {outcome.seconds:.0f} s.", soft_wrap=True)
    if totals.accuracy is not None and totals.interval is not None:
        low, high = totals.interval
        console.print(
            f"Accuracy {totals.accuracy:.1%} [{low:.1%}, {high:.1%}], {plural(totals.errors, 'error')}; "
            f"calibration error {totals.calibration_error:.1%}.",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    colour = "red" if summary.confirmed else "green"
    console.print(f"[{colour}]{escape(summary.headline())}[/]", soft_wrap=True)
    for suspicion in summary.confirmed:
        console.print(f"  {escape(' '.join(suspicion.words()))}", soft_wrap=True)
    if outcome.failed:
        first = escape(outcome.first_error or "")
        console.print(f"[red]{plural(outcome.failed, 'image')} could not be explained[/]. First error: {first}")
    console.print(f"Report: [bold]{escape(str(result.report))}[/]", soft_wrap=True)
