"""Data sets by name: what the command line takes after --data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from vitrail.data.base import DataSet, Joined
from vitrail.data.captions import CaptionedScene, CaptionedSceneData, CaptionedScenes, Shared
from vitrail.data.crops import Crops
from vitrail.data.fiftyone import FiftyOneData, is_fiftyone
from vitrail.data.memory import InMemory
from vitrail.data.scenes import Scene, SceneData, Scenes
from vitrail.errors import VitrailError
from vitrail.files import printable, reading
from vitrail.registry import Registry, first_line, matching

# (folder or file, **options) → a data set, or a list of images as ``open_data`` takes it.
Opener: TypeAlias = Callable[..., DataSet | Sequence[Any]]
O = TypeVar("O", bound=Opener)


@dataclass(frozen=True)
class BuiltIn:
    """A built-in data set: its module is imported when it is opened. `fixed` holds the options that its name sets."""

    class_name: str
    fixed: Mapping[str, Any] = field(default_factory=dict)

    @property
    def opener(self) -> Callable[..., DataSet]:
        """The class of the data set."""
        opener: Callable[..., DataSet] = getattr(import_module("vitrail.data"), self.class_name)
        return opener

    def __call__(self, place: str, **options: Any) -> DataSet:
        return self.opener(place, **self.fixed, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        parameters = inspect.signature(self.opener).parameters
        return inspect.Signature([option for name, option in parameters.items() if name not in self.fixed])


DATA_SETS: Registry[Opener] = Registry("data set", group="vitrail.data")


def data_set(name: str) -> Callable[[O], O]:
    """Registers a data set of your own: a subclass of `DataSet`, or a function that returns one or a list of images.

    `open_data("name:PLACE?option=value")` calls it with the place, a string, and the options.
    """

    def register(opener: O) -> O:
        if not inspect.signature(opener).parameters:
            raise VitrailError(f"the data set {name!r} takes no arguments: its first must be its folder or file.")
        DATA_SETS.add(name, opener, opener.__module__)
        return opener

    return register


@data_set("scenes")
def open_scenes(place: str = "", objects: int | None = None) -> SceneData:
    """Scenes from `N@SEED`; both may be missing."""
    count, seed = _count_and_seed("scenes", place, _DEFAULT_SCENES)
    with _drawing():
        return SceneData(count, seed, objects)


@data_set("scenes_text")
def open_captioned_scenes(
    place: str = "", objects: int | None = None, shared: Shared | None = None
) -> CaptionedSceneData:
    """Captioned scenes from `N@SEED`; both may be missing."""
    count, seed = _count_and_seed("scenes_text", place, _DEFAULT_SCENES)
    with _drawing():
        return CaptionedSceneData(count, seed, objects, shared)


@data_set("samples")
def open_samples(place: str = "") -> Crops:
    """Crops of the bundled photographs from `N@SEED`; both may be missing."""
    count, seed = _count_and_seed("samples", place, _DEFAULT_CROPS)
    return Crops(count, seed)


for _name, _entry in {
    "imagenet": BuiltIn("ImageNet"),
    "imagenet_s": BuiltIn("ImageNetS"),
    "imagenet_segmentation": BuiltIn("ImageNetSegmentation"),
    "cifar10": BuiltIn("Cifar", {"classes": 10}),
    "cifar100": BuiltIn("Cifar", {"classes": 100}),
    "imagenette": BuiltIn("Imagenette"),
    "pets": BuiltIn("OxfordPets"),
    "voc": BuiltIn("PascalVoc"),
    "coco": BuiltIn("Coco"),
    "tiny_imagenet": BuiltIn("TinyImageNet"),
    "mura": BuiltIn("Mura"),
    "folder": BuiltIn("ImageFolder"),
    "fiftyone": BuiltIn("FiftyOneData"),
}.items():
    DATA_SETS.add(_name, _entry, __name__)


@contextmanager
def _drawing() -> Iterator[None]:
    """Inside, scenes that cannot be drawn are an error of the user."""
    try:
        yield
    except ValueError as error:
        raise VitrailError(f"{error}.") from None


def _count_and_seed(name: str, place: str, count: int) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,9})?(?:@(\d{1,18}))?", place)
    if not match:
        raise VitrailError(f"expected {name}:200, or {name}:200@7 for seed 7, but got {name}:{place}.")
    return int(match[1] or count), int(match[2] or 0)


DATA_NAMES: tuple[str, ...] = tuple(DATA_SETS.entries())  # the built-in ones

_DEFAULT_SCENES, _DEFAULT_CROPS = 200, 60
_DRAWN = ("scenes", "scenes_text", "samples")  # whose place is a number and a seed
_IN_DATABASE = ("fiftyone",)  # whose place is a name
_PLUS = " + "  # between data sets that are joined
_SUBSET = ("n", "seed", "indices")
_NUMBERS = frozenset({"n", "seed", "size", "year", "objects"})


@reading()
def open_data(spec: str | Path | DataSet | Sequence[Any], **options: Any) -> DataSet:
    """Opens a data set.

    Args:
        spec: `scenes`, `scenes:200`, `scenes:200@7` (seed 7), a name and its folder or file such as `imagenet:DIR`
            (names: `DATA_NAMES`, and those of `data_set`), a folder of images (see `ImageFolder`), its table or one
            image. Options follow a question mark: `imagenet:DIR?boxes=DIR2&split=val`. Several are joined by ` + `,
            without their labels. Or a data set, also one of FiftyOne, scenes, or a list of images, of pairs (image,
            label) or of examples.
        **options: the options of the data set's class; they override those in `spec`. Every data set has `n` and
            `seed`, or `indices` (positions or a file of them), to take a subset.
    """
    if isinstance(spec, str) and _PLUS in spec and not Path(spec).exists():
        spec = Joined([open_data(part) for part in spec.split(_PLUS)])
    if isinstance(spec, str | Path):
        kind, place, spec_options = _parse_spec(str(spec), isinstance(spec, Path))
        options = {**spec_options, **options}
    options = {name: value for name, value in options.items() if value is not None}
    subset = {name: options.pop(name) for name in _SUBSET if name in options}
    data = _open_named(kind, place, options) if isinstance(spec, str | Path) else _from_objects(spec, options)
    if not subset:
        return data
    if set(subset) == {"seed"}:
        raise VitrailError("seed= needs n=: it draws a subset of n examples (for scenes: scenes:200@7).")
    return data.subset(**subset)


def describe_data(pattern: str = "*") -> list[dict[str, Any]]:
    """Every data set whose name matches the glob, as a row of a listing: its place, its options and their defaults."""
    entries = DATA_SETS.every_entry()
    rows = []
    for name in matching(entries, pattern):
        opener = entries[name]
        place, *options = inspect.signature(opener).parameters.values()
        is_required = place.default is inspect.Parameter.empty
        rows.append({
            "name": name,
            "place": "required" if is_required else "optional",
            "options": {option.name: option.default for option in options},
            "summary": first_line(opener.opener if isinstance(opener, BuiltIn) else opener),
        })  # fmt: skip
    if not rows:
        raise VitrailError(f"no data set matches {pattern!r}; `vitrail data` lists all.")
    return rows


def data_name(spec: str) -> str:
    """A canonical name of the data of a specification, without its subset: the same however the path is written."""
    if _PLUS in spec and not Path(spec).exists():
        return _PLUS.join(data_name(part) for part in spec.split(_PLUS))
    kind, place, options = _parse_spec(spec, False)
    if kind in _DRAWN:
        seed = int(place.partition("@")[2] or 0)
        name = f"{kind}:@{seed}" if seed else kind
    else:
        known = place if kind in _IN_DATABASE else Path(place).resolve()
        name = printable(f"{kind}:{known}") if place else kind
    kept = "&".join(f"{key}={value}" for key, value in sorted(options.items()) if key not in _SUBSET)
    return f"{name}?{kept}" if kept else name


def _parse_spec(spec: str, is_path: bool) -> tuple[str, str, dict[str, Any]]:
    """(name, place, options) of a specification."""
    names = DATA_SETS.entries()
    if is_path or (spec and spec not in names and Path(spec).exists()):
        return "folder", spec, {}
    kind = spec.partition("?")[0].partition(":")[0]
    if kind.isidentifier() and DATA_SETS.get(kind) is not None:
        rest = spec.removeprefix(kind).removeprefix(":")
        if rest and Path(rest).exists():
            return kind, rest, {}
        place, _, query = rest.partition("?")
        return kind, place, _parse_options(query, spec)
    if re.fullmatch(r"[A-Za-z_]\w+:.*", spec) or not re.search(r"[./\\]", spec):
        try:
            DATA_SETS[kind]
        except VitrailError as error:
            listed = ", ".join(DATA_SETS.every_entry())
            raise VitrailError(f"{error} Data sets: {listed}; or give the path of a folder.") from None
    place, _, query = spec.partition("?")
    return "folder", place, _parse_options(query, spec)


def _parse_options(query: str, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise VitrailError(f"{spec!r} has the option {part!r}, expected name=value, with & between options.")
        if name in _NUMBERS and not re.fullmatch(r"\d{1,9}", value):
            raise VitrailError(f"{spec!r} has {part!r}, expected a non-negative integer.")
        options[name] = int(value) if name in _NUMBERS else value
    return options


def _open_named(kind: str, place: str, options: dict[str, Any]) -> DataSet:
    if kind == "folder" and Path(place).is_file():
        if Path(place).suffix.lower() in (".csv", ".tsv"):
            return _open_named("folder", str(Path(place).parent), {"table": place, **options})
        _check_options("a single image", options, ())
        return InMemory([place])
    opener = DATA_SETS[kind]
    first, *others = inspect.signature(opener).parameters.values()
    if not place and first.default is inspect.Parameter.empty:
        raise VitrailError(f"the data set {kind} needs its folder or file: write {kind}:PATH.")
    _check_options(kind, options, [option.name for option in others])
    return _from_objects(opener(place, **options), {})


def _from_objects(data: Any, options: dict[str, Any]) -> DataSet:
    if isinstance(data, DataSet):
        _check_options("an open data set", options, ())
        return data
    if is_fiftyone(data):
        _check_options("a FiftyOne data set", options, ("label", "boxes"))
        return FiftyOneData(data, **options)
    if isinstance(data, str | bytes | bytearray) or not isinstance(data, Sequence):
        raise VitrailError(
            "data must be the name of a data set, a path, a data set or a list of images, but got "
            f"{type(data).__name__}."
        )
    if isinstance(data, CaptionedScenes) or (len(data) and isinstance(data[0], CaptionedScene)):
        _check_options("a list of scenes", options, ())
        return CaptionedSceneData(data)
    if isinstance(data, Scenes) or (len(data) and isinstance(data[0], Scene)):
        _check_options("a list of scenes", options, ())
        return SceneData(data)
    _check_options("a list of images", options, ("labels", "name"))
    return InMemory(data, **options)


def _check_options(what: str, options: dict[str, Any], allowed: Sequence[str]) -> None:
    unknown = [name for name in options if name not in allowed]
    if unknown:
        known = ", ".join([*allowed, *_SUBSET])
        raise VitrailError(f"{what} has no option {unknown[0]!r}; its options: {known}.")
