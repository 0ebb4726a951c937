"""``vitrail explain``: explains images; for several, also a contact sheet and a table."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.calls import parse_parameters, split_call
from vitrail.cli import options
from vitrail.cli.codes import FAILED
from vitrail.cli.outputs import duration, file_stems, join_parts, params_part, plural, print_json
from vitrail.cli.questions import ContrastError, OtherQuestion, Question, check_reads_texts, merged, other_question
from vitrail.cli.sources import Source, find_sources, skipped_files, true_classes
from vitrail.errors import VitrailError
from vitrail.files import printable, write_together
from vitrail.pipeline import ahead, failed
from vitrail.plugins import load_plugins
from vitrail.sheets import ORDERS, Tile, draw_sheet, tile_of
from vitrail.show.look import Look

if TYPE_CHECKING:
    from concurrent.futures import Future

    from PIL import Image

    from vitrail.api import Seen
    from vitrail.explanation import Explanation
    from vitrail.integrations.exports import ExportFile
    from vitrail.methods.base import Method
    from vitrail.models.view import View

READ_AHEAD, DRAWN_AHEAD = 8, 4  # images
LONG = 10.0  # seconds from which an estimate is printed
COLUMNS = (
    "image", "true", "class", "label", "probability", "trust", "against", "method", "params", "picture", "seconds",
    "skipped", "error",
)  # fmt: skip


@options.grouped(other=other_question, load_options=options.load_options, look=options.look)
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
    other: OtherQuestion,
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
    steps: Annotated[int, typer.Option(min=1, help="Number of steps of --score and --curves.")] = 32,
    curves: Annotated[bool, typer.Option("--curves", help="Score the map and plot the curves.")] = False,
    look: Look,
    sort: Annotated[
        str | None,
        typer.Option(
            help="Order of the contact sheet: name, probability or trust (both highest first); "
            "default: that of the images."
        ),
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FORMATS",
            help="Also write coco or label_studio (areas with half of the evidence), npz or tiff (values), or add to "
            "fiftyone:NAME; comma-separated or repeated.",
        ),
    ] = None,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
) -> None:
    """Explain predictions: which parts of an image are evidence for a class, and which against it."""
    asked = Question(
        merged("--target", target, text),
        merged("--against", against, against_text),
        ("--target" if text is None else "--text", "--against" if against_text is None else "--against-text"),
    )
    if top > 1 and (asked.target is not None or other.target is not None):
        raise VitrailError("--top explains the most likely classes and --target a single class: use only one of them.")
    if sort is not None and sort not in ORDERS:
        raise VitrailError(f"--sort must be name, probability or trust, but got {sort!r}.")
    if sort == "trust" and not trust:
        raise VitrailError("--sort trust and --no-trust contradict each other: use only one of them.")
    sources = find_sources(images, out)
    params = parse_parameters(param or [])
    exports = Exports.of(options.comma_separated(export))

    from vitrail.models.loading import load

    load_plugins(plugin or [])
    loaded = load(model, device=device, dtype=dtype, **load_options)
    check_reads_texts(loaded, text, against_text)
    view, question = other.posed(loaded, asked, [source.path for source in sources])
    run = Run(
        console=Console(stderr=as_json, highlight=False),
        method=_build(view, method, params),
        question=question,
        place=other.place,
        top=top,
        steps=steps if score or curves else 0,
        curves=curves,
        trust=trust,
        look=look,
        sort=sort,
        exports=exports,
    )
    run.explain(sources, out)
    if as_json:
        print_json(run.results)
    if run.failures:
        raise typer.Exit(FAILED)


def _build(view: View, call: str | None, extra: dict[str, Any]) -> Method:
    """The method of a name or a call, ``rise(masks=32)``, with the parameters of ``-p``."""
    from vitrail.evaluation import default_method
    from vitrail.methods.registry import build_method

    name, params = split_call(call or default_method(view))
    repeated = [key for key in extra if key in params]
    if repeated:
        raise VitrailError(f"{repeated[0]} is set in {call!r} and with -p: set it once.")
    return build_method(name, view, **params, **extra)


@dataclass(frozen=True)
class Exports:
    """What is written for other tools."""

    files: dict[str, ExportFile] = field(default_factory=dict)  # of all images, by format
    tiff: bool = False  # a file for each map
    data_sets: list[Any] = field(default_factory=list)  # of FiftyOne

    @classmethod
    def of(cls, formats: list[str]) -> Exports:
        """From the words of --export."""
        if not formats:
            return cls()
        from vitrail.integrations.exports import FORMATS, export_file
        from vitrail.integrations.fiftyone import FIFTYONE, dataset_named

        unknown = next((word for word in formats if word not in FORMATS and not word.startswith(FIFTYONE)), None)
        if unknown is not None:
            raise VitrailError(f"--export must be {', '.join(FORMATS)} or {FIFTYONE}NAME, but got {unknown!r}.")
        named = [dataset_named(word.removeprefix(FIFTYONE)) for word in formats if word.startswith(FIFTYONE)]
        files = {word: export_file(word) for word in formats if word in FORMATS and word != "tiff"}
        return cls(files, "tiff" in formats, named)

    def add(self, explanations: list[Explanation]) -> None:
        """Adds the explanations of an image; FiftyOne gets the first."""
        from vitrail.integrations.fiftyone import add_to_fiftyone

        for file in self.files.values():
            for explanation in explanations:
                file.add(explanation)
        for data_set in self.data_sets:
            add_to_fiftyone(data_set, explanations[0])

    def contents(self, out: Path) -> dict[str | os.PathLike[str], bytes]:
        """The files of all images, if any was explained."""
        from vitrail.integrations.exports import NAMES

        return {out / NAMES[kind]: file.content() for kind, file in self.files.items() if file.paths}


@dataclass(frozen=True)
class Drawn:
    """An image that is explained, and the files to be written."""

    explanations: list[Explanation]  # of its classes
    chance: list[dict[str, float]]  # the scores of random maps
    picture: Path  # the one that is shown
    files: dict[str | os.PathLike[str], bytes]
    tile: Tile


Unwritten = tuple[Path, int | None, Callable[[], Drawn]]  # an image, its class, and what draws its explanations


@dataclass(kw_only=True)
class Run:
    """What to explain of every image, and the results so far."""

    console: Console
    method: Method
    question: Question
    place: str  # where a class is asked about, in the names of files
    top: int
    steps: int  # of insertion and deletion, by which maps are scored; 0 = they are not
    curves: bool
    trust: bool
    look: Look
    sort: str | None
    exports: Exports
    rows: list[dict[str, Any]] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return sum(bool(row["error"]) for row in self.rows)

    @property
    def metrics(self) -> list[str]:
        return [f"{name}(steps={self.steps})" for name in ("insertion", "deletion") if self.steps]

    def explain(self, sources: list[Source], out: Path) -> None:
        """Explains every image and prints where the results are."""
        from vitrail.metrics.trust import COST

        view, info = self.method.model, self.method.info
        self.question.check(view)
        for option, is_set in ((self.question.options[1], self.question.against is not None), ("--top", self.top > 1)):
            if is_set and not info.class_specific:
                raise VitrailError(f"{option} has no effect: the map of {info.name} is the same for every class.")
        print_model(self.console, view)
        labels = [None] * len(sources) if view.question else true_classes(self.console, view, sources)
        paths = [source.path for source in sources]
        forwards, backwards = self.method.passes()
        passes = forwards + 2 * backwards + 1 + COST * self.trust + 2 * (self.steps + 1) * len(self.metrics)
        count = len(paths) * self.top
        print_estimate(self.console, view, f"{count} × {info.name}", passes * count)
        if len(paths) == 1:
            print_boxes(self.console, view, paths[0])
        view.known_weights = view.weights_hash()  # hashed once, not for every image
        ending = f".{info.name}" + join_parts(
            [params_part(self.method.given()), self.place, *self.question.parts(view)]
        )
        images = list(zip(paths, labels, file_stems(paths, out, ending), strict=True))
        try:
            self._explain_each(images)
        finally:
            if exported := self.exports.contents(out):
                write_together(exported)
                names = " and ".join(f"[bold]{escape(str(path))}[/]" for path in exported)
                self.console.print(f"Exported: {names}", soft_wrap=True)
            if len(paths) > 1 and self.rows:
                skipped = skipped_files(sources).items()
                self.rows += [_row(path, skipped=reason) for path, reason in skipped]
                self.write_overview(out)

    def _explain_each(self, images: list[tuple[Path, int | None, Path]]) -> None:
        """Explains images, given by path, class and beginning of the names of their results.

        The next ones are read and the last ones drawn in threads meanwhile; results are written and reported in order.
        Ctrl-C, wherever it arrives, leaves nothing unwritten that is explained.
        """
        unwritten: deque[Unwritten] = deque()

        def tasks() -> Iterator[Callable[[], Drawn]]:
            with closing(self._read_ahead([path for path, _, _ in images])) as reads:
                for (path, label, stem), read in zip(images, reads, strict=True):
                    task: Callable[[], Drawn]
                    try:
                        task = cache(self._explained(path, label, stem, read))  # which is drawn once
                    except VitrailError as error:
                        task = partial(failed, error)
                    unwritten.append((path, label, task))
                    yield task

        try:
            with closing(ahead(tasks(), min(DRAWN_AHEAD, len(images)), eager=True)) as drawings:
                for drawing in drawings:
                    self._write_next(unwritten, drawing.result, alone=len(images) == 1)
        except VitrailError:
            raise
        except BaseException:
            if unwritten and self.rows and self.rows[-1]["image"] == str(unwritten[0][0]):
                unwritten.popleft()  # the interrupt came right after its row
            while unwritten:
                self._write_next(unwritten, unwritten[0][2], alone=len(images) == 1)
            raise

    def _write_next(self, unwritten: deque[Unwritten], draw: Callable[[], Drawn], *, alone: bool) -> None:
        """Writes and reports the result of the first image that waits for it."""
        path, label, _ = unwritten[0]
        drawn = self._record(path, label, draw, alone=alone)
        unwritten.popleft()
        if drawn is not None:
            self._report(drawn, alone=alone)

    def _read_ahead(self, paths: list[Path]) -> Generator[Future[Seen], None, None]:
        from vitrail.api import read_seen

        view = self.method.model
        return ahead((partial(read_seen, view, path) for path in paths), min(READ_AHEAD, len(paths)))

    def _explained(self, path: Path, label: int | None, stem: Path, read: Future[Seen]) -> Callable[[], Drawn]:
        """Explains an image; what remains to be done is to draw it."""
        from vitrail.api import with_warning

        picture = with_warning(self.method.model, read.result())
        true_label = None if label is None else self.method.model.label(label)
        explanations = list(self._explanations(picture, label))
        for explanation in explanations:
            explanation.true_label = true_label
            if self.trust:
                explanation.trust()
            explanation.score(self.metrics)
        chance = [explanation.random_scores(self.metrics) for explanation in explanations]
        plots = [explanation.curve_picture() for explanation in explanations] if self.curves else []
        return partial(self._drawn, path.name, explanations, chance, plots, stem)

    def _record(self, path: Path, label: int | None, draw: Callable[[], Drawn], *, alone: bool) -> Drawn | None:
        """Writes the result of an image and returns it; in a folder, an unreadable image is reported."""
        try:
            drawn = draw()
            write_together(drawn.files)
            self.exports.add(drawn.explanations)
        except VitrailError as error:
            if alone:
                raise
            kind, colour = ("skipped", "yellow") if isinstance(error, ContrastError) else ("error", "red")
            self.console.print(f"[{colour}]{escape(path.name)}[/]: {escape(str(error))}", soft_wrap=True)
            true_label = "" if label is None else self.method.model.label(label)
            self.rows.append(_row(path, true=true_label, **{kind: str(error)}))
            self.results.append({"image": {"path": str(path)}, kind: str(error)})
            return None
        # recorded at once: Ctrl-C from here on must not leave a picture that is missing from the table
        self.rows += [_explained_row(path, explanation, drawn.picture) for explanation in drawn.explanations]
        self.tiles.append(drawn.tile)
        self.results += [{"picture": str(drawn.picture), **explained.to_dict()} for explained in drawn.explanations]
        return drawn

    def _report(self, drawn: Drawn, *, alone: bool) -> None:
        """Prints the result of an image."""
        first = drawn.explanations[0]
        if alone:
            print_top(self.console, first)
        picture = escape(str(drawn.picture))
        self.console.print(f"{escape(first.title)} → [bold]{picture}[/]" + _remark(first), soft_wrap=True)
        for explanation, random in zip(drawn.explanations, drawn.chance, strict=True):
            for line in _lines(explanation, random, alone):
                name = f"{explanation.label}: " if len(drawn.explanations) > 1 else ""
                self.console.print(f"  [dim]{escape(name + line)}[/]", soft_wrap=True)

    def _explanations(self, picture: Seen, label: int | None) -> Iterator[Explanation]:
        from vitrail.api import explain_each
        from vitrail.methods.registry import build_method
        from vitrail.models.detection import Detector
        from vitrail.targets import Box

        method, question = self.method, self.question
        view = method.model
        if isinstance(view, Detector) and view.question is None:
            view = Box(None, question.class_of(view, label)).posed(view, lambda: [picture])
            method = build_method(method.info.name, view, **method.given())
        target: str | int | list[int] | None = question.target
        count, rival = 1, None
        if self.top > 1:
            ranked = ranked_classes(view, picture)
            rival = question.rival(view, label, ranked[0])
            target = [index for index in ranked if index != rival][: self.top]
            count = len(target)
        elif question.needs_prediction:
            target, rival = question.classes(view, label, ranked_classes(view, picture)[0])
        return explain_each(method, [picture] * count, target, rival)

    def _drawn(
        self,
        name: str,
        explanations: list[Explanation],
        chance: list[dict[str, float]],
        plots: list[Image.Image],
        stem: Path,
    ) -> Drawn:
        """Draws a picture and a JSON file per class, several classes also side by side, and the curves on request."""
        from vitrail.show.figure import png_bytes, side_by_side

        files: dict[str | os.PathLike[str], bytes] = {}
        if plots:
            files[stem.with_name(stem.name + ".curves.png")] = png_bytes(side_by_side(plots))
        if len(explanations) == 1:
            files |= self._files(explanations[0], stem)
            picture = stem.with_name(stem.name + ".png")
        else:
            for rank, explanation in enumerate(explanations, 1):
                files |= self._files(explanation, stem.with_name(f"{stem.name}.{rank}"))
            picture = stem.with_name(f"{stem.name}.top{len(explanations)}.png")
            pictures = [explanation.picture(**asdict(self.look)) for explanation in explanations]
            files[picture] = png_bytes(side_by_side(pictures))
        return Drawn(explanations, chance, picture, files, tile_of(explanations[0], name, self.look))

    def _files(self, explanation: Explanation, stem: Path) -> dict[str | os.PathLike[str], bytes]:
        """The picture with its JSON file, and the values for --export tiff."""
        from vitrail.integrations.exports import tiff_bytes

        files = explanation.files(stem.with_name(stem.name + ".png"), self.look)
        if self.exports.tiff:
            files[stem.with_name(stem.name + ".tif")] = tiff_bytes(explanation)
        return files

    def write_overview(self, out: Path) -> None:
        """Writes the table and the contact sheet of several images."""
        from vitrail.show.figure import png_bytes

        buffer = io.StringIO()
        scores = dict.fromkeys(name for row in self.rows for name in row if name not in COLUMNS)
        writer = csv.DictWriter(buffer, [*COLUMNS[:-2], *scores, *COLUMNS[-2:]])
        writer.writeheader()
        writer.writerows(self.rows)
        files: dict[str | os.PathLike[str], bytes] = {out / "explanations.csv": printable(buffer.getvalue()).encode()}
        if self.tiles:
            files[out / "contact-sheet.png"] = png_bytes(draw_sheet(self.tiles, self.sort))
        write_together(files)
        names = " and ".join(f"[bold]{escape(str(path))}[/]" for path in files)
        self.console.print(f"Overview: {names}", soft_wrap=True)
        if self.failures:
            self.console.print(f"[red]{plural(self.failures, 'image')} could not be explained[/]: see the table.")


def ranked_classes(view: View, picture: Seen) -> list[int]:
    """The classes, most likely first."""
    import torch

    from vitrail.engine.requests import check_finite

    with torch.no_grad():
        logits = view.logits(picture.pixels[None])
    check_finite(view, logits)
    return view.class_scores(logits)[0].argsort(descending=True, stable=True).tolist()


def print_model(console: Console, view: View) -> None:
    size = f"{view.size[0]}×{view.size[1]} pixels"
    facts = size if view.question else f"{view.num_classes} classes, {size}"
    console.print(f"Model [bold]{escape(view.name)}[/]: {facts}.", soft_wrap=True)
    if view.note:
        console.print(f"[dim]{escape(view.note)}[/]", soft_wrap=True)
    console.print(f"[dim]Preprocessing: {escape(view.preprocessing.describe())}.[/]", soft_wrap=True)


def print_boxes(console: Console, view: View, path: Path) -> None:
    """What a detector sees in an image: the boxes that are at least as sure as not, or the surest."""
    from vitrail.api import see
    from vitrail.models.detection import Detector

    if not isinstance(view, Detector):
        return
    boxes = view.boxes(see(view, path).image)
    table = Table("box", "name", "probability", "pixels", box=None, header_style="dim")
    for detection in [detection for detection in boxes if detection.probability >= 0.5] or boxes[:1]:
        corners = ", ".join(f"{edge:.0f}" for edge in detection.box)
        table.add_row(str(detection.query), escape(detection.label), f"{detection.probability:.1%}", corners)
    console.print(table)


def print_estimate(console: Console, view: View, work: str, passes: float) -> None:
    """Estimates the duration of long work from that of one forward pass."""
    seconds = _seconds_per_image(view, 1) * passes
    if seconds > LONG:  # the first pass of a process is slower than the others
        seconds = min(_seconds_per_image(view, 4) for _ in range(3)) * passes
    if seconds > LONG:
        console.print(f"{work}: about {duration(seconds)}. Ctrl-C stops and keeps the results so far.")


def _seconds_per_image(view: View, count: int) -> float:
    """The duration of a forward pass of so many images, for each of them."""
    import torch

    begin = time.perf_counter()
    with torch.no_grad():
        float(view.logits(torch.zeros(count, 3, *view.size)).sum())  # waits for the device
    return (time.perf_counter() - begin) / count


def print_top(console: Console, explanation: Explanation) -> None:
    """The most likely classes; a score has no others beside it."""
    if explanation.measure != "probability":
        return
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
    details = [explanation.score_line, explanation.error_line, explanation.storage_line] if alone else []
    yield from filter(None, [explanation.trust_line, *details])
    if random:
        measured = [(split_call(name)[0], explanation.scores[name], value) for name, value in random.items()]
        scores = [f"{name} {score:.3f} (random {value:.3f})" for name, score, value in measured]
        scaled = f" ({explanation.scale_line})" if explanation.scale_line else ""
        line = f"{', '.join(scores)}{scaled}; higher is better for insertion, lower for deletion"
        yield line.replace("-", "−")


def _row(path: Path, **values: Any) -> dict[str, Any]:
    """A row of the table; columns without a value are empty."""
    return dict.fromkeys(COLUMNS, "") | {"image": str(path)} | values


def _explained_row(path: Path, explanation: Explanation, picture: Path) -> dict[str, Any]:
    values = {
        "true": explanation.true_label or "",
        "class": explanation.target,
        "label": explanation.label,
        "probability": f"{explanation.probability:.6f}",
        "trust": "" if explanation.trust_score is None else f"{explanation.trust_score:.4f}",
        "against": explanation.against_label or "",
        "method": explanation.method,
        "params": json.dumps(explanation.params, default=str),
        "picture": str(picture),
        "seconds": f"{explanation.seconds:.3f}",
    }
    if explanation.scale:
        values["scale"] = json.dumps(explanation.scale)
    return _row(path, **values, **{name: f"{value:.6f}" for name, value in explanation.scores.items()})
