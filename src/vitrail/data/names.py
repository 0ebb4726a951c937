"""Data sets by name: what the command line takes after --data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from vitrail.data.base import DataSet
from vitrail.data.memory import InMemory
from vitrail.data.scene_data import SceneData
from vitrail.data.scenes import Scene, Scenes
from vitrail.errors import VitrailError
from vitrail.files import printable, reading


@dataclass(frozen=True)
class _Kind:
    """Where a data set's class lives, and what its name fixes."""

    module: str
    name: str
    fixed: dict[str, Any] = field(default_factory=dict)


_KINDS = {
    "imagenet": _Kind("imagenet", "ImageNet"),
    "imagenet_s": _Kind("imagenet_s", "ImageNetS"),
    "imagenet_segmentation": _Kind("imagenet_segmentation", "ImageNetSegmentation"),
    "cifar10": _Kind("cifar", "Cifar", {"classes": 10}),
    "cifar100": _Kind("cifar", "Cifar", {"classes": 100}),
    "imagenette": _Kind("imagenet", "Imagenette"),
    "pets": _Kind("pets", "OxfordPets"),
    "voc": _Kind("voc", "PascalVoc"),
    "coco": _Kind("coco", "Coco"),
    "tiny_imagenet": _Kind("tiny_imagenet", "TinyImageNet"),
    "mura": _Kind("mura", "Mura"),
    "folder": _Kind("folder", "ImageFolder"),
}
DATA_NAMES: tuple[str, ...] = ("scenes", *_KINDS)

_DEFAULT_SCENES = 200
_SUBSET = ("n", "seed", "indices")
_NUMBERS = frozenset({"n", "seed", "size", "year", "objects"})


@reading()
def open_data(spec: str | Path | DataSet | Sequence[Any], **options: Any) -> DataSet:
    """Open a data set.

    Args:
        spec: `scenes`, `scenes:200`, `scenes:200@7` (seed 7), a name and its folder or file such as `imagenet:DIR`
            (names: `DATA_NAMES`), a folder of pictures (see `ImageFolder`), its table or one picture. Options follow
            a question mark: `imagenet:DIR?boxes=DIR2&split=val`. Or a data set, scenes, or a list of pictures, of
            pairs (picture, label) or of examples.
        **options: The options of the data set's class, over those in `spec`; and for every data set `n` and `seed`,
            or `indices` (positions or a file of them), to take a subset.
    """
    if isinstance(spec, str | Path):
        kind, place, written = _read_spec(str(spec), isinstance(spec, Path))
        options = {**written, **options}
    options = {name: value for name, value in options.items() if value is not None}
    draw = {name: options.pop(name) for name in _SUBSET if name in options}
    if isinstance(spec, str | Path):
        data = _open_scenes(place, options) if kind == "scenes" else _open_named(kind, place, options)
    else:
        data = _from_objects(spec, options)
    if not draw:
        return data
    if set(draw) == {"seed"}:
        raise VitrailError("seed= was given without n=: it draws a subset of n examples (for scenes: scenes:200@7).")
    return data.subset(**draw)


def data_name(spec: str) -> str:
    """The data of a specification, however it is written and however many of its images it takes."""
    kind, place, options = _read_spec(spec, False)
    if kind == "scenes":
        seed = int(place.partition("@")[2] or 0)
        name = f"scenes:@{seed}" if seed else "scenes"
    else:
        name = printable(f"{kind}:{Path(place).resolve()}")
    kept = "&".join(f"{key}={value}" for key, value in sorted(options.items()) if key not in _SUBSET)
    return f"{name}?{kept}" if kept else name


def _read_spec(spec: str, is_path: bool) -> tuple[str, str, dict[str, Any]]:
    """Return (name of the kind, place, options) of a specification."""
    if is_path or (spec and spec not in DATA_NAMES and Path(spec).exists()):
        return "folder", spec, {}
    kind, _, rest = spec.partition("?")[0].partition(":")
    if kind in DATA_NAMES:
        rest = spec.removeprefix(kind).removeprefix(":")
        if rest and Path(rest).exists():
            return kind, rest, {}
        place, _, query = rest.partition("?")
        return kind, place, _read_options(query, spec)
    if re.fullmatch(r"[A-Za-z_]\w+:.*", spec) or not re.search(r"[./\\]", spec):
        raise VitrailError(
            f"There is no data set {kind!r} and no such folder. Data sets: {', '.join(DATA_NAMES)}; or give the path "
            "of a folder of pictures."
        )
    place, _, query = spec.partition("?")
    return "folder", place, _read_options(query, spec)


def _read_options(query: str, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise VitrailError(f"{spec!r} has the option {part!r}, expected name=value, with & between options.")
        if name in _NUMBERS and not re.fullmatch(r"\d{1,9}", value):
            raise VitrailError(f"{spec!r} has {part!r}, expected a whole number.")
        options[name] = int(value) if name in _NUMBERS else value
    return options


def _open_scenes(place: str, options: dict[str, Any]) -> DataSet:
    found = re.fullmatch(r"(\d{1,9})?(?:@(\d{1,18}))?", place)
    if not found:
        raise VitrailError(f"scenes:{place} was given, expected scenes:200, or scenes:200@7 for seed 7.")
    _check_options("scenes", options, ("objects",))
    try:
        return SceneData(int(found[1] or _DEFAULT_SCENES), int(found[2] or 0), **options)
    except ValueError as error:
        raise VitrailError(f"{error}.") from None


def _open_named(kind: str, place: str, options: dict[str, Any]) -> DataSet:
    if kind == "folder" and Path(place).is_file():
        if Path(place).suffix.lower() in (".csv", ".tsv"):
            return _open_named("folder", str(Path(place).parent), {"table": place, **options})
        _check_options("one picture", options, ())
        return InMemory([place])
    if not place:
        raise VitrailError(f"The data set {kind} needs its folder or file: write {kind}:PATH.")
    about = _KINDS[kind]
    opener = getattr(import_module(f"vitrail.data.{about.module}"), about.name)
    allowed = [name for name in list(inspect.signature(opener).parameters)[1:] if name not in about.fixed]
    _check_options(kind, options, allowed)
    data: DataSet = opener(place, **about.fixed, **options)
    return data


def _from_objects(given: Any, options: dict[str, Any]) -> DataSet:
    if isinstance(given, DataSet):
        _check_options("an open data set", options, ())
        return given
    if isinstance(given, bytes | bytearray) or not isinstance(given, Sequence):
        raise VitrailError(
            f"A {type(given).__name__} was given as data, expected the name of a data set, a path, a data set, or a "
            "list of pictures."
        )
    if isinstance(given, Scenes) or (len(given) and isinstance(given[0], Scene)):
        _check_options("given scenes", options, ())
        return SceneData(given)
    _check_options("a list of pictures", options, ("labels", "name"))
    return InMemory(given, **options)


def _check_options(what: str, options: dict[str, Any], allowed: Sequence[str]) -> None:
    unknown = [name for name in options if name not in allowed]
    if unknown:
        known = ", ".join([*allowed, *_SUBSET])
        raise VitrailError(f"{what} has no option {unknown[0]!r}; its options: {known}.")
