"""Finding and reading the files of a data set; whatever is missing or broken becomes one clear error."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitrail.data.images import open_image
from vitrail.errors import VitrailError
from vitrail.files import printable, reading
from vitrail.geometry import Box

PICTURE_SUFFIXES = frozenset(".bmp .gif .jpeg .jpg .png .ppm .tif .tiff .webp".split())

MASK_MODES = ("1", "L", "P")  # of images that store numbers

_MAX_BYTES = 2**31


def missing(what: str, where: str | Path, how: str) -> VitrailError:
    """The error for a missing file: what was looked for, where, and how to obtain it."""
    return VitrailError(f"{what} was not found in '{where}': {how}.")


def broken(what: str, path: str | Path, why: str) -> VitrailError:
    """The error for a file that cannot be read."""
    return VitrailError(f"{what} '{path}' cannot be read: {why.rstrip('.')}.")


def find_folder(candidates: Iterable[Path], what: str, root: Path, how: str) -> Path:
    """The first candidate that is a folder."""
    return _find(Path.is_dir, candidates, what, root, how)


def find_file(candidates: Iterable[Path], what: str, root: Path, how: str) -> Path:
    """The first candidate that is a file."""
    return _find(Path.is_file, candidates, what, root, how)


def _find(is_kind: Callable[[Path], bool], candidates: Iterable[Path], what: str, root: Path, how: str) -> Path:
    path = next(filter(is_kind, candidates), None)
    if path is None:
        raise missing(what, root, how)
    return path


def inside(root: Path, name: str, source: str | Path) -> Path:
    """The path of a file that a table names, which must lie below `root`.

    Args:
        root: the folder that the name starts from.
        name: as written in the table: relative, with forward slashes.
        source: the table, for the error.
    """
    parts = PurePosixPath(name).parts
    outside = not parts or name.startswith("/") or ".." in parts or re.search(r"[\\\0]|^\w:", name)
    if outside:
        raise VitrailError(
            f"'{source}' names the file {name!r}, expected a path below its folder without '..': correct that line."
        )
    return root / name


def read_bytes(path: str | Path, what: str, how: str = "check the path") -> bytes:
    """Reads a whole file; ``how`` to obtain it is part of the error where it is missing."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES)
    except FileNotFoundError:
        raise VitrailError(f"{what} '{path}' was not found: {how}.") from None
    except OSError as error:
        raise broken(what, path, error.strerror or str(error)) from error


def read_text(path: str | Path, what: str) -> str:
    """Reads a whole UTF-8 text file."""
    try:
        return read_bytes(path, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise broken(what, path, f"it is not UTF-8 text ({error.reason})") from None


def read_rows(path: Path, what: str, least: int, separator: str | None = None) -> list[list[str]]:
    """Reads a text table: one list of columns per line that is neither blank nor a comment (#).

    Args:
        path: the file.
        what: what it is, for errors.
        least: every line needs that many columns.
        separator: of the columns; None = any white space.
    """
    rows = []
    for number, line in enumerate(read_text(path, what).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = line.split(separator)
        if len(columns) < least:
            raise broken(what, path, f"line {number} has {len(columns)} columns, expected {least}: {line[:80]!r}")
        rows.append(columns)
    return rows


def read_box(values: Sequence[str], what: str, path: Path) -> Box:
    """Turns columns of a table into a box."""
    try:
        x0, y0, x1, y1 = map(float, values)
    except ValueError:
        x0 = y0 = x1 = y1 = math.nan
    if not np.isfinite([x0, y0, x1, y1]).all():
        raise broken(what, path, f"box {','.join(values)!r}, expected four finite numbers x0,y0,x1,y1")
    return x0, y0, x1, y1


def read_integer(value: str, what: str, path: Path) -> int:
    try:
        return int(value)
    except ValueError:
        raise broken(what, path, f"expected an integer, found {value[:40]!r}") from None


def picture_names(folder: Path) -> list[str]:
    """The names of the images directly in a folder of a published data set, sorted, without hidden ones."""
    names = (entry.name for entry in _entries(folder))
    pictures = [name for name in names if name[0] != "." and Path(name).suffix.lower() in PICTURE_SUFFIXES]
    return utf8_names(pictures, folder)


def utf8_names(names: Iterable[str], folder: Path) -> list[str]:
    """The names, sorted, but for those that are not UTF-8: no published data set has such a name."""
    kept = []
    for name in sorted(names):
        if printable(name) == name:
            kept.append(name)
        else:
            warnings.warn(f"'{printable(name)}' in '{folder}' is left out: its name is not UTF-8.", stacklevel=2)
    return kept


def folder_names(folder: Path) -> list[str]:
    """The names of the folders in a folder, sorted, without hidden ones."""
    return sorted(entry.name for entry in _entries(folder) if entry.name[0] != "." and entry.is_dir())


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with reading(), os.scandir(folder) as entries:
        return list(entries)


def read_values(path: Path, what: str, modes: Sequence[str] = MASK_MODES) -> NDArray[Any]:
    """Reads an image that stores numbers (class ids, trimaps), not colours.

    Args:
        path: the file; palettes stay numbers.
        what: what it is, for errors.
        modes: Pillow modes that are accepted.
    """
    if not path.is_file():
        raise VitrailError(f"{what} '{path}' was not found: it belongs to the image of the same name.")
    try:
        with open_image(path) as image:
            mode, values = image.mode, np.array(image)
    except VitrailError:
        raise
    except Exception as error:  # Pillow's plugins raise almost anything on damaged files
        raise broken(what, path, str(error) or type(error).__name__) from error
    if mode not in modes:
        raise broken(what, path, f"its mode is {mode}, expected {' or '.join(modes)}")
    return values


def require_unique(ids: list[str], source: str | Path) -> list[str]:
    """The ids unless one appears twice."""
    if len(set(ids)) != len(ids):
        twice = next(name for name, count in Counter(ids).items() if count > 1)
        raise VitrailError(f"'{source}' names {twice!r} twice: keep one of the lines.")
    return ids


def names_below(files: Sequence[str]) -> list[str]:
    """Files as paths below the folder that all of them share."""
    folder = os.path.commonpath([Path(file).parent for file in files]) if files else ""
    return [printable(Path(file).relative_to(folder).as_posix()) for file in files]
