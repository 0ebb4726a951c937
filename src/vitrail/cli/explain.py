"""``vitrail explain``: explains images; for several, also a contact sheet and a table."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.calls import parse_parameters, split_call
from vitrail.cli import options
from vitrail.cli.outputs import file_stems, join_parts, params_part, plural
from vitrail.cli.questions import ContrastError, Question, check_reads_texts, merged
from vitrail.cli.sources import Source, find_sources, skipped_files, true_classes
from vitrail.errors import VitrailError
from vitrail.files import printable, write_together
from vitrail.plugins import load_plugins
from vitrail.show.look import DEFAULT_LOOK, Look

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.api import Seen
    from vitrail.explanation import Explanation
    from vitrail.methods.base import Method
    from vitrail.models.view import View
    from vitrail.show.legend import Legend

STEPS = 32  # of insertion and deletion
LONG = 10.0  # seconds from which an estimate is printed
ORDERS = ("name", "probability", "trust")  # of a contact sheet
COLUMNS = (
    "image", "true", "class", "label", "probability", "trust", "against", "method", "params", "picture", "seconds",
    "skipped", "error",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What to explain of every image."""

    question: Question
    top: int
    metrics: tuple[str, ...] = ()  # to score the map by
    curves: bool = False
    trust: bool = True
    look: Look = DEFAULT_LOOK
    sort: str | None = None

    @property
    def passes(self) -> float:
        """The cost per map besides that of the method, in forward passes."""
        from vitrail.metrics.trust import COST

        return 1 + COST * self.trust + 2 * sum(_steps(name) + 1 for name in self.metrics)


@dataclass(frozen=True)
class Tile:
    """A cell of the contact sheet."""

    name: str
    picture: Image.Image
    caption: str
    legend: Legend
    probability: float
    trust: float | None


@dataclass
class Report:
    """The results of a run so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(bool(row["error"]) for row in self.rows)


@options.grouped(load_options=options.MODEL, look=options.LOOK)
def explain(
    *,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE-OR-FOLDER", help="Images, or folders of images.")],
    model: options.ModelName = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method, e.g. tis or rise(masks=32); see `vitrail methods`; default: decompx.skipplus (Swin: vit_cx)."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Class to explain: a name, a number, @label (the true class) or @predicted, the default."),
    ] = None,
    against: options.Against = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text to explain, of a model that reads texts: any, not a class.")
    ] = None,
    against_text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Explain the text or target as opposed to this text.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=10, help="Explain the K most likely classes side by side.")] = 1,
    out: options.Out = Path("vitrail-out"),
    param: options.Params = None,
    trust: options.Trusting = True,
    score: Annotated[
        bool, typer.Option("--score", help="Score the map by insertion and deletion, with a random map beside it.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps of --score and --curves.")] = STEPS,
    curves: Annotated[bool, typer.Option("--curves", help="Score the map and plot the curves.")] = False,
    look: Look,
    sort: Annotated[
        str | None,
        typer.Option(
            help="Order of the contact sheet: name, probability or trust (both highest first); "
            "default: that of the images."
        ),
    ] = None,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
) -> None:
    """Explain predictions: which parts of an image are evidence for a class, and which against it."""
    target, against = merged("--target", target, text), merged("--against", against, against_text)
    if top > 1 and target is not None:
        raise VitrailError("--top explains the most likely classes and --target a single class: use only one of them.")
    if sort is not None and sort not in ORDERS:
        raise VitrailError(f"--sort must be {', '.join(ORDERS[:-1])} or {ORDERS[-1]}, but got {sort!r}.")
    if sort == "trust" and not trust:
        raise VitrailError("--sort trust and --no-trust contradict each other: use only one of them.")
    metrics = (f"insertion(steps={steps})", f"deletion(steps={steps})") if score or curves else ()
    sources = find_sources(images, out)
    params = parse_parameters(param or [])

    from vitrail.models.loading import load

    load_plugins(plugin or [])
    question = Question(target, against)
    view = load(model, device=device, dtype=dtype, **load_options)
    check_reads_texts(view, text, against_text)
    view = view.asked_about(question.texts)
    request = Request(question, top, metrics, curves, trust, look, sort)
    if run(_build(view, method, params), request, sources, out, as_json):
        raise typer.Exit(1)


def run(method: Method, request: Request, sources: list[Source], out: Path, as_json: bool = False) -> int:
    """Explains every image and prints where the results are; returns the number of images that failed."""
    console, view = Console(stderr=as_json, highlight=False), method.model
    _check_classes(method, request)
    print_model(console, view)
    labels, paths = true_classes(console, view, sources), [source.path for source in sources]
    forwards, backwards = method.passes()
    passes = forwards + 2 * backwards + request.passes
    count = len(paths) * request.top
    print_estimate(console, view, f"{count} × {method.info.name}", passes * count)
    view.known_fingerprint = view.fingerprint()  # hashed once, not for every image
    report = Report()
    try:
        for path, label, stem in zip(paths, labels, file_stems(paths, out, _ending(method, request)), strict=True):
            _explain_image(console, method, request, path, label, stem, report, alone=len(paths) == 1)
    finally:
        if len(paths) > 1 and report.rows:
            report.rows += [
                dict.fromkeys(COLUMNS, "") | {"image": str(path), "skipped": reason}
                for path, reason in skipped_files(sources).items()
            ]
            _write_overview(console, out, report, request.sort)
    if as_json:
        print(json.dumps(report.results, indent=1, default=str))  # noqa: T201
    return report.failures


def _build(view: View, call: str | None, extra: dict[str, Any]) -> Method:
    """The method of a name or a call, ``rise(masks=32)``, with the parameters of ``-p``."""
    from vitrail.evaluation import default_method
    from vitrail.methods.registry import build_method

    name, params = split_call(call or default_method(view))
    repeated = [key for key in extra if key in params]
    if repeated:
        raise VitrailError(f"{repeated[0]} is set in {call!r} and with -p: set it once.")
    return build_method(name, view, **params, **extra)


def _ending(method: Method, request: Request) -> str:
    """What follows the image's name in the names of its results."""
    return f".{method.info.name}" + join_parts([params_part(method.given()), *request.question.parts(method.model)])


def _explain_image(
    console: Console,
    method: Method,
    request: Request,
    path: Path,
    label: int | None,
    stem: Path,
    report: Report,
    *,
    alone: bool,
) -> None:
    """Explains one image; in a folder, an unreadable image is reported and the others go on."""
    try:
        explanations = list(_explanations(method, path, label, request))
        for explanation in explanations:
            if request.trust:
                explanation.trust()
            explanation.score(request.metrics)
        chance = [explanation.random_scores(request.metrics) for explanation in explanations]
        tile = _tile(path, explanations[0], request.look)
        picture = _save(explanations, stem, request)
    except VitrailError as error:
        if alone:
            raise
        kind, colour = ("skipped", "yellow") if isinstance(error, ContrastError) else ("error", "red")
        console.print(f"[{colour}]{escape(path.name)}[/]: {escape(str(error))}", soft_wrap=True)
        true = "" if label is None else method.model.label(label)
        report.rows.append(dict.fromkeys(COLUMNS, "") | {"image": str(path), "true": true, kind: str(error)})
        report.results.append({"image": {"path": str(path)}, kind: str(error)})
        return
    first = explanations[0]
    # recorded at once: Ctrl-C from here on must not leave a picture that is missing from the table
    report.rows += [_row(path, explanation, picture) for explanation in explanations]
    report.tiles.append(tile)
    report.results += [{"picture": str(picture), **explanation.to_dict()} for explanation in explanations]
    if alone:
        print_top(console, first)
    console.print(f"{escape(first.title)} → [bold]{escape(str(picture))}[/]" + _remark(first), soft_wrap=True)
    for explanation, random in zip(explanations, chance, strict=True):
        for line in _lines(explanation, random, alone):
            name = f"{explanation.label}: " if len(explanations) > 1 else ""
            console.print(f"  [dim]{escape(name + line)}[/]", soft_wrap=True)


def _explanations(method: Method, path: Path, label: int | None, request: Request) -> Iterator[Explanation]:
    from vitrail.api import explain_each, see

    view, question = method.model, request.question
    picture = see(view, path)
    target: str | int | list[int] | None = question.target
    count, rival = 1, None
    if request.top > 1:
        ranked = ranked_classes(view, picture)
        rival = question.rival(view, label, ranked[0])
        target = [index for index in ranked if index != rival][: request.top]
        count = len(target)
    elif question.needs_prediction:
        target, rival = question.classes(view, label, ranked_classes(view, picture)[0])
    for explanation in explain_each(method, [picture] * count, target, rival):
        explanation.true_label = None if label is None else view.label(label)
        yield explanation


def ranked_classes(view: View, picture: Seen) -> list[int]:
    """The classes, most likely first."""
    import torch

    from vitrail.engine.requests import check_finite

    with torch.no_grad():
        logits = view.logits(picture.pixels[None])
    check_finite(view, logits)
    return view.class_scores(logits)[0].argsort(descending=True, stable=True).tolist()


def _tile(path: Path, explanation: Explanation, look: Look) -> Tile:
    from vitrail.show.figure import thumbnail

    picture = thumbnail(explanation.overlay(**asdict(look)), focus=explanation.focus)
    caption = f"{printable(path.name)}: {explanation.title}"
    if explanation.true_label is not None:
        predicted = explanation.top[0][1] if explanation.top else explanation.label
        caption += f"\n{'✓' if predicted == explanation.true_label else '✗'} true class: {explanation.true_label}"
    if explanation.trust_score is not None:
        caption += f"\ntrust {explanation.trust_score:.2f}"
    return Tile(path.name, picture, caption, explanation.legend(look), explanation.probability, explanation.trust_score)


def _save(explanations: list[Explanation], stem: Path, request: Request) -> Path:
    """Writes a picture and a JSON file per class, several classes also side by side, and the curves on request."""
    from vitrail.show.figure import png_bytes, side_by_side

    files: dict[str | os.PathLike[str], bytes] = {}
    if request.curves:
        plots = [explanation.curve_picture() for explanation in explanations]
        files[stem.with_name(stem.name + ".curves.png")] = png_bytes(side_by_side(plots))
    if len(explanations) == 1:
        picture = stem.with_name(stem.name + ".png")
        write_together({**files, **explanations[0].files(picture, request.look)})
        return picture
    for rank, explanation in enumerate(explanations, 1):
        files |= explanation.files(stem.with_name(f"{stem.name}.{rank}.png"), request.look)
    sheet = stem.with_name(f"{stem.name}.top{len(explanations)}.png")
    pictures = [explanation.picture(**asdict(request.look)) for explanation in explanations]
    write_together({**files, sheet: png_bytes(side_by_side(pictures))})
    return sheet


def _check_classes(method: Method, request: Request) -> None:
    """Refuses invalid classes before any work."""
    request.question.check(method.model)
    for option, is_set in (("--against", request.question.against is not None), ("--top", request.top > 1)):
        if is_set and not method.info.class_specific:
            raise VitrailError(f"{option} has no effect: the map of {method.info.name} is the same for every class.")


def print_model(console: Console, view: View) -> None:
    size = f"{view.size[0]}×{view.size[1]}"
    console.print(f"Model [bold]{escape(view.name)}[/]: {view.num_classes} classes, {size} pixels.", soft_wrap=True)
    if view.note:
        console.print(f"[dim]{escape(view.note)}[/]", soft_wrap=True)
    console.print(f"[dim]Preprocessing: {escape(view.preprocessing.describe())}.[/]", soft_wrap=True)


def print_estimate(console: Console, view: View, work: str, passes: float) -> None:
    """Estimates the duration of long work from that of one forward pass."""
    import torch

    blank, durations = torch.zeros(4, 3, *view.size), []
    with torch.no_grad():
        for _ in range(3):
            begin = time.perf_counter()
            float(view.logits(blank).sum())  # waits for the device
            durations.append(time.perf_counter() - begin)
    seconds = min(durations) / len(blank) * passes
    if seconds > LONG:
        console.print(f"{work}: about {_duration(seconds)}. Ctrl-C stops and keeps the results so far.")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def print_top(console: Console, explanation: Explanation) -> None:
    """The most likely classes."""
    table = Table("class", "name", "probability", box=None, header_style="dim")
    for index, label, probability in explanation.top:
        style = "bold" if index == explanation.target else None
        table.add_row(str(index), escape(label), f"{probability:.1%}", style=style)
    console.print(table)


def _remark(explanation: Explanation) -> str:
    wrong = explanation.true_label not in (None, explanation.label)
    remarks = [f"the true class is {escape(explanation.true_label or '')}"] if wrong else []
    remarks += [] if explanation.class_specific else [f"{explanation.method} is the same for every class"]
    return f" [dim]({', '.join(remarks)})[/]" if remarks else ""


def _lines(explanation: Explanation, random: dict[str, float], alone: bool) -> Iterator[str]:
    """What is printed below a result: trust; for a single image also its split score, errors and storage; scores."""
    lines = [
        explanation.trust_line,
        *([explanation.score_line, explanation.error_line, explanation.storage_line] if alone else []),
    ]
    yield from (line for line in lines if line)
    if random:
        measured = [(split_call(name)[0], explanation.scores[name], value) for name, value in random.items()]
        scores = [f"{name} {score:.3f} (random {value:.3f})" for name, score, value in measured]
        yield f"{', '.join(scores)}; higher is better for insertion, lower for deletion"


def _steps(metric: str) -> int:
    return int(split_call(metric)[1]["steps"])


def _row(path: Path, explanation: Explanation, picture: Path) -> dict[str, Any]:
    values = (
        str(path), explanation.true_label or "", explanation.target, explanation.label,
        f"{explanation.probability:.6f}", "" if explanation.trust_score is None else f"{explanation.trust_score:.4f}",
        explanation.against_label or "", explanation.method,
        json.dumps(explanation.params, default=str), str(picture), f"{explanation.seconds:.3f}", "", "",
    )  # fmt: skip
    scores = {name: f"{value:.6f}" for name, value in explanation.scores.items()}
    return {**dict(zip(COLUMNS, values, strict=True)), **scores}


def _write_overview(console: Console, out: Path, report: Report, order: str | None) -> None:
    """The table and the contact sheet of several images."""
    from vitrail.show.figure import png_bytes

    buffer = io.StringIO()
    scores = dict.fromkeys(name for row in report.rows for name in row if name not in COLUMNS)
    writer = csv.DictWriter(buffer, [*COLUMNS[:-2], *scores, *COLUMNS[-2:]])
    writer.writeheader()
    writer.writerows(report.rows)
    files: dict[str | os.PathLike[str], bytes] = {out / "explanations.csv": printable(buffer.getvalue()).encode()}
    if report.tiles:
        files[out / "contact-sheet.png"] = png_bytes(draw_sheet(report.tiles, order))
    write_together(files)
    console.print("Overview: " + " and ".join(f"[bold]{escape(str(path))}[/]" for path in files), soft_wrap=True)
    if report.failures:
        console.print(f"[red]{plural(report.failures, 'image')} could not be explained[/]: see the table.")


def draw_sheet(tiles: list[Tile], order: str | None) -> Image.Image:
    """The contact sheet with its legend."""
    from vitrail.show.figure import contact_sheet, labelled
    from vitrail.show.legend import shared_legends

    sheet = contact_sheet([(tile.picture, tile.caption) for tile in _sorted(tiles, order)])
    return labelled(sheet, "", "", shared_legends([tile.legend for tile in tiles]))


def _sorted(tiles: list[Tile], order: str | None) -> list[Tile]:
    if order == "name":
        return sorted(tiles, key=lambda tile: tile.name)
    if order == "probability":
        return sorted(tiles, key=lambda tile: -tile.probability)
    if order == "trust":
        return sorted(tiles, key=lambda tile: math.inf if tile.trust is None else -tile.trust)
    return tiles
