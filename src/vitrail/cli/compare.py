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
from vitrail.cli.outputs import file_stems, join_parts, params_part, plural, print_json
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
    as_json: options.Json = False,
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
    for question in questions:
        question.check(view)
    built = build(view, calls, params)
    ending = _ending(built, params, questions, named=bool(methods))
    (stem,) = file_stems([source.path], out, ending)
    console = Console(stderr=as_json, highlight=False)
    picture, maps = run(console, built, questions, source, stem, look, trust)
    if as_json:
        print_json([{"picture": picture, **explanation.to_dict()} for explanation in maps])


def run(
    console: Console,
    methods: list[Method],
    questions: list[Question],
    source: Source,
    stem: Path,
    look: Look,
    trust: bool,
) -> tuple[Path, list[Explanation]]:
    """Writes the figure with its JSON file and prints where it is; after Ctrl-C, with the maps computed so far."""
    from vitrail.metrics.trust import COST

    view = methods[0].model
    print_model(console, view)
    (label,) = true_classes(console, view, [source])
    view.known_weights = view.weights_hash()  # hashed once, not for every method
    costs = [method.passes() for method in methods]
    passes = sum(forwards + 2 * backwards + 1 + COST * trust for forwards, backwards in costs)
    summary = plural(len(methods), "method")
    print_estimate(console, view, summary, passes * len(questions))
    maps: list[Explanation] = []
    interrupt = None
    try:
        for explanation in _explanations(console, methods, questions, source.path, label):
            if trust:
                explanation.trust()
            maps.append(explanation)
    except KeyboardInterrupt as error:
        if not maps:
            raise
        interrupt = error
        summary = f"Stopped: {len(maps)} of {plural(len(methods) * len(questions), 'map')}"
    picture = stem.with_name(stem.name + ".png")
    _write(picture, [maps[start : start + len(methods)] for start in range(0, len(maps), len(methods))], look)
    print_top(console, maps[0])
    console.print(f"{summary} → [bold]{escape(str(picture))}[/]", soft_wrap=True)
    if interrupt:
        raise interrupt
    return picture, maps


def _explanations(
    console: Console, methods: list[Method], questions: list[Question], path: Path, label: int | None
) -> Iterator[Explanation]:
    """The maps of all methods for the first question, then for the next."""
    from vitrail.api import explain_each, see

    view = methods[0].model
    picture = see(view, path)  # read once and shared by all explanations
    predicted = ranked_classes(view, picture)[0]
    for target, against in [question.classes(view, label, predicted) for question in questions]:
        for method in track(methods, description="methods", console=console, transient=True):
            rival = against if method.info.class_specific else None
            for explanation in explain_each(method, [picture], target, rival):
                explanation.true_label = None if label is None else view.label(label)
                yield explanation


def _write(picture: Path, rows: list[list[Explanation]], look: Look) -> None:
    from vitrail.show.figure import png_bytes

    text = json.dumps([ex.to_dict() for row in rows for ex in row], ensure_ascii=False, indent=1, default=str)
    content = text.encode(errors="backslashreplace")  # JSON's own escapes for a path that is not UTF-8
    write_together({picture: png_bytes(draw(rows, look)), picture.with_suffix(".json"): content})


def _ending(methods: list[Method], shared: dict[str, Any], questions: list[Question], named: bool) -> str:
    """What follows the image's name in the names of the results: parameters and classes.

    Parameters of single methods, ``rise.masks-32``, only where the user named the methods.
    """
    view, settings = methods[0].model, [(method.info.name, method.given()) for method in methods]
    parts = [params_part({key: shared[key] for key in shared if any(key in params for _, params in settings)})]
    for name, params in settings if named else ():
        single = {key: value for key, value in params.items() if key not in shared or value != shared[key]}
        parts += [f"{name}.{params_part(single)}"] if single else []
    parts += [question.parts(view)[0] for question in questions] + questions[0].parts(view)[1:]
    return ".compare" + join_parts(parts)


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
