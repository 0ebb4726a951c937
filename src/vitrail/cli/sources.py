"""The images that ``vitrail explain`` and ``vitrail compare`` are given, and their true classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from vitrail.errors import VitrailError

if TYPE_CHECKING:
    from vitrail.data.folder import ImageFolder
    from vitrail.models.view import View

NAMED = 20  # skipped files of one reason that are named


@dataclass(frozen=True)
class Source:
    """An image; ``label`` is its position among the classes of ``folder``, None for a file named by itself."""

    path: Path
    folder: ImageFolder | None = None
    label: int | None = None


def find_sources(places: list[str], out: Path) -> list[Source]:
    """The images to explain, without earlier results; raises if results cannot be written to ``out``."""
    from vitrail.data.folder import ImageFolder
    from vitrail.data.images import checked_file

    existing = next(folder for folder in (out, *out.parents) if os.path.lexists(folder))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise VitrailError(f"cannot write to --out {out}: {existing} is not a writable folder.")
    results = out.resolve()
    if results in [Path(place).resolve() for place in places if Path(place).is_dir()]:
        raise VitrailError(f"--out {out} is the folder of the images: choose another, or results mix with them.")
    sources: dict[Path, Source] = {}
    for place in places:
        if not Path(place).is_dir():
            sources[Path(place)] = Source(checked_file(place))
            continue
        folder = ImageFolder(place)
        listed = [Source(folder.path(position), folder, folder.label(position)) for position in range(len(folder))]
        sources |= {source.path: source for source in listed if results not in source.path.resolve().parents}
    if not sources:
        raise VitrailError(f"there are no images in {', '.join(places)} besides earlier results of vitrail.")
    return list(sources.values())


def true_classes(console: Console, view: View, sources: Iterable[Source]) -> list[int | None]:
    """The true class of every image, None where it is not known; what folders skip is printed."""
    maps: dict[Path, Callable[[int], int] | None] = {}
    classes: list[int | None] = []
    for source in sources:
        folder = source.folder
        if folder is None:
            classes.append(_class_of_file(view, source.path))
            continue
        if folder.root not in maps:
            print_skipped(console, folder.name, folder.skipped)
            maps[folder.root] = _classes_of_folder(console, view, folder)
        remap = maps[folder.root]
        classes.append(None if remap is None or source.label is None else view.class_index(remap(source.label)))
    return classes


def skipped_files(sources: Iterable[Source]) -> dict[Path, str]:
    """The files that the folders of these images leave out, and why."""
    folders = {source.folder.root: source.folder for source in sources if source.folder is not None}
    return {root / file: why for root, folder in folders.items() for file, why in folder.skipped.items()}


def print_skipped(console: Console, name: str, skipped: Mapping[str, str]) -> None:
    """The files of a folder that are left out, by reason."""
    for reason in dict.fromkeys(skipped.values()):
        files = [file for file, why in skipped.items() if why == reason]
        more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
        text = f"Skipped in {name}: {', '.join(files[:NAMED])}{more} ({reason})."
        console.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)


def _classes_of_folder(console: Console, view: View, folder: ImageFolder) -> Callable[[int], int] | None:
    """From the classes of a folder to the model's; None where they are not classes of the model."""
    from vitrail.data.annotations import class_map

    try:
        return class_map(view, folder)
    except VitrailError as error:
        if folder.table is not None or any(_is_class(view, name) for name in folder.labels or ()):
            console.print(f"[yellow]No true classes:[/] {escape(str(error))}", soft_wrap=True)
        return None


def _class_of_file(view: View, path: Path) -> int | None:
    """The class that a table gives an image, or else the name of its folder, if it is exactly that of a class."""
    from vitrail.data.folder import label_of

    with suppress(VitrailError):
        label, listed = label_of(path.resolve())
        if label is not None and (listed or _is_class(view, str(label))):
            return view.class_index(label)
    return None


def _is_class(view: View, name: str) -> bool:
    """Whether a name is that of a class, neither a number nor a beginning, which folders often are by chance."""
    from vitrail.models.labels import plain_name, plain_names

    wanted = plain_name(name)
    return not name.isdecimal() and any(wanted in names for names in plain_names(tuple(view.labels or ())))
