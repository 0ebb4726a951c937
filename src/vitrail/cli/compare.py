"""``vitrail compare``: one figure with the maps of many methods for one image."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from vitrail.calls import join_call, parse_parameters, split_call, split_list
from vitrail.cli import options
from vitrail.cli.explain import print_estimate, print_model, print_top, ranked_classes
from vitrail.cli.outputs import file_stems, join_parts, params_part, plural
from vitrail.cli.questions import Question
from vitrail.cli.sources import Source, find_sources, true_classes
from vitrail.errors import VitrailError
from vitrail.files import write_together
from vitrail.plugins import load_plugins
from vitrail.show.look import Look

if TYPE_CHECKING:
    from PIL import Image

    from vitrail.explanation import Explanation
    from vitrail.methods.base import Method
    from vitrail.models.view import View

COLUMNS = 6


@options.grouped(load_options=options.load_options, look=options.look)
def compare(
    *,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Image file.")],
    model: options.ModelName = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHODS",
            help="Names, globs or calls such as rise(masks=32), comma-separated or repeated; "
            "default: about eight recommended methods.",
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All methods but those based on masks, without aggregations.")
    ] = False,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--targets",
            "--target",
            metavar="CLASSES",
            help="Classes, comma-separated or repeated, a row each: names, numbers, @label (the true class) or "
            "@predicted, the default.",
        ),
    ] = None,
    against: options.Against = None,
    out: options.Out = Path("vitrail-out"),
    param: options.Params = None,
    look: Look,
    trust: options.Trusting = True,
    load_options: dict[str, Any],
    plugin: options.Plugins = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Compare the maps of several methods for one image, side by side."""
    if everything and methods:
        raise VitrailError("--all draws every method and --methods those named: use only one of them.")
    if Path(image).is_dir():
        raise VitrailError(f"compare takes one image, but {image} is a folder: use vitrail explain for folders.")
    (source,) = find_sources([image], out)
    params = parse_parameters(param or [])

    from vitrail.models.loading import load

    load_plugins(plugin or [])
    questions = [Question(target, against) for target in options.comma_separated(targets)] or [Question(None, against)]
    texts = [text for question in questions for text in question.texts]
    view = load(model, device=device, dtype=dtype, **load_options).asked_about(texts)
    calls = every_method(view) if everything else choose(view, split_list(methods or []))
    built = build(view, calls, params)
    parts = [shared_part(built, params), *(single_parts(built, params) if methods else ())]
    run(built, questions, source, out, parts, look, trust)


def run(
    methods: list[Method],
    questions: list[Question],
    source: Source,
    out: Path,
    parts: list[str],
    look: Look,
    trust: bool = True,
) -> Path:
    """Writes the figure with its JSON file and prints where it is; after Ctrl-C, with the maps computed so far."""
    from vitrail.metrics.trust import COST

    console = Console(highlight=False)
    view = methods[0].model
    for question in questions:
        question.check(view)
    print_model(console, view)
    (label,) = true_classes(console, view, [source])
    view.known_fingerprint = view.fingerprint()  # hashed once, not for every method
    maps = len(methods) * len(questions)
    costs = [method.passes() for method in methods]
    passes = sum(forwards + 2 * backwards + 1 + COST * trust for forwards, backwards in costs)
    summary = plural(len(methods), "method")
    print_estimate(console, view, summary, passes * len(questions))
    (stem,) = file_stems([source.path], out, _ending(view, parts, questions))
    rows: list[list[Explanation]] = []
    interrupt = None
    try:
        _explain(console, source.path, label, methods, questions, rows, trust)
    except KeyboardInterrupt as error:
        interrupt = error
        rows = [row for row in rows if row]
        if not rows:
            raise
        summary = f"Stopped: {sum(map(len, rows))} of {plural(maps, 'map')}"
    picture = stem.with_name(stem.name + ".png")
    _write(picture, rows, look)
    print_top(console, rows[0][0])
    console.print(f"{summary} → [bold]{escape(str(picture))}[/]", soft_wrap=True)
    if interrupt:
        raise interrupt
    return picture


def _explain(
    console: Console,
    path: Path,
    label: int | None,
    methods: list[Method],
    questions: list[Question],
    rows: list[list[Explanation]],
    trust: bool,
) -> None:
    """Fills the rows map by map, so that an interrupt leaves what is done."""
    from vitrail.api import explain_each, see

    view = methods[0].model
    picture = see(view, path)  # read once and shared by all explanations
    predicted = ranked_classes(view, picture)[0]
    for target, against in [question.classes(view, label, predicted) for question in questions]:
        rows.append([])
        for method in track(methods, description="methods", console=console, transient=True):
            rival = against if method.info.class_specific else None
            for explanation in explain_each(method, [picture], target, rival):
                explanation.true_label = None if label is None else view.label(label)
                if trust:
                    explanation.trust()
                rows[-1].append(explanation)


def _write(picture: Path, rows: list[list[Explanation]], look: Look) -> None:
    from vitrail.show.figure import png_bytes

    text = json.dumps([ex.to_dict() for row in rows for ex in row], ensure_ascii=False, indent=1, default=str)
    content = text.encode(errors="backslashreplace")  # JSON's own escapes for a path that is not UTF-8
    write_together({picture: png_bytes(draw(rows, look)), picture.with_suffix(".json"): content})


def _ending(view: View, parts: list[str], questions: list[Question]) -> str:
    """What follows the image's name in the names of the results."""
    class_parts = [question.parts(view)[0] for question in questions] + questions[0].parts(view)[1:]
    return ".compare" + join_parts([*parts, *class_parts])


def shared_part(methods: list[Method], shared: dict[str, Any]) -> str:
    """The shared parameters in a file name."""
    return params_part({key: shared[key] for key in shared if any(key in method.given() for method in methods)})


def single_parts(methods: list[Method], shared: dict[str, Any]) -> Iterator[str]:
    """The parameters of single methods in a file name, ``rise.masks-32``."""
    for method in methods:
        params = {name: value for name, value in method.given().items() if name not in shared or value != shared[name]}
        if params:
            yield f"{method.info.name}.{params_part(params)}"


def build(view: View, calls: list[str], shared: dict[str, Any]) -> list[Method]:
    """The methods of these calls without duplicates; each gets the shared parameters that it has."""
    from vitrail.methods.registry import build_method, get_method

    methods: dict[str, Method] = {}
    used: set[str] = set()
    for name, params in map(split_call, calls):
        known = get_method(name).parameters()
        used |= known.keys() & shared.keys()
        method = build_method(name, view, **{**{key: value for key, value in shared.items() if key in known}, **params})
        methods.setdefault(join_call(method.info.name, method.given()), method)
    unknown = [key for key in shared if key not in used]
    if unknown:
        raise VitrailError(f"none of these methods has a parameter {', '.join(unknown)}.")
    return [*methods.values()]


def every_method(view: View) -> list[str]:
    """The names of all methods that can explain a model, but aggregations and masks."""
    from vitrail.methods.registry import get_method, supported_methods

    return [name for name in supported_methods(view) if "." not in name and get_method(name).info.family != "mask"]


def choose(view: View, patterns: list[str]) -> list[str]:
    """The calls of the methods to draw: names, calls and globs; by default the recommended methods."""
    from vitrail.methods.registry import list_methods, recommended_methods, supported_methods

    if not patterns:
        return recommended_methods(view)
    supported = supported_methods(view)
    calls: list[str] = []
    for text in patterns:
        pattern, bracket, params = text.partition("(")
        is_glob = any(character in pattern for character in "*?[")
        names = [name for name in supported if fnmatchcase(name, pattern)] if is_glob else [pattern]
        if not names:
            raise VitrailError(
                f"{pattern!r} matches no method that {view.name} supports, of {len(list_methods())} in all."
            )
        calls += [name + bracket + params for name in names]
    return calls


def draw(rows: list[list[Explanation]], look: Look) -> Image.Image:
    """The image, then its maps; with several classes a row of maps for each."""
    from vitrail.show.figure import contact_sheet, labelled, thumbnail
    from vitrail.show.legend import shared_legends

    first, width = rows[0][0], len(rows[0]) + 1
    if len(rows) == 1:
        width = math.ceil(width / math.ceil(width / COLUMNS))  # rows of about the same length
    cells = []
    for row in rows:
        cells.append((thumbnail(first.image, focus=first.focus), row[0].title))
        cells += [(thumbnail(ex.overlay(**asdict(look)), focus=first.focus), _caption(ex)) for ex in row]
    title = first.title if len(rows) == 1 else " / ".join(row[0].title for row in rows)
    detail = f"{plural(len(rows[0]), 'method')} on {first.model_name} · each map in its own range"
    legends = shared_legends([ex.legend(look) for row in rows for ex in row])
    return labelled(contact_sheet(cells, width), title, detail, legends, title_on_top=True)


def _caption(ex: Explanation) -> str:
    """The method, its time, whether the class matters, and how far the map can be trusted, if known."""
    seconds = f"{ex.seconds:.1f} s" if ex.seconds >= 1 else f"{1000 * ex.seconds:.0f} ms"
    facts = [f"trust {ex.trust_score:.2f}"] if ex.trust_score is not None else []
    facts += [seconds] if ex.class_specific else [seconds, "any class"]
    return f"{ex.call}\n{' · '.join(facts)}"
