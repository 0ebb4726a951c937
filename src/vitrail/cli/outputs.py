"""What commands print and write: JSON, the names of files, and words for numbers."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.data.results import is_explanation
from vitrail.files import parse_json

if TYPE_CHECKING:
    from vitrail.models.view import View

MAX_LENGTH = 60  # characters that are added to a name


def print_json(result: Any) -> None:
    """Prints the result of a command, all that --json writes to the standard output.

    NaN and infinity, which JSON lacks, become null.
    """
    print(json.dumps(_as_json(result), indent=1, allow_nan=False), flush=True)  # noqa: T201


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numbers of numpy
        return _as_json(value.tolist())
    return value if value is None or isinstance(value, str | int) else str(value)


def class_part(view: View, index: int) -> str:
    """``281-tabby``: the index, because two classes can have the same name."""
    name = "" if view.labels is None else _sanitize(view.labels[index].split(",")[0])[:24].strip("-.")
    return f"{index}-{name}" if name else f"class-{index}"


def params_part(params: Mapping[str, Any]) -> str:
    """``rule-frozen.start_layer-1``"""
    return ".".join(f"{name}-{_sanitize(str(value))}" for name, value in sorted(params.items()))


def join_parts(parts: Sequence[str]) -> str:
    """The suffix of a file name: empty without parts, hashed where it would get too long."""
    text = ".".join(part for part in parts if part)
    if len(text) > MAX_LENGTH:
        text = f"{text[: MAX_LENGTH - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f".{text}" if text else ""


def file_stems(paths: Sequence[Path], out: Path, ending: str) -> list[Path]:
    """``cat`` + ending for each image; images of the same name are numbered, also across runs."""
    used: set[str] = set()
    stems = []
    for path in paths:
        numbered = itertools.chain([path.stem], (f"{path.stem}-{number}" for number in itertools.count(2)))
        name = next(name for name in numbered if name not in used and _is_free(out / (name + ending), path))
        used.add(name)
        stems.append(out / (name + ending))
    return stems


def plural(count: int, noun: str) -> str:
    """``1 map``, ``2 maps``"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _is_free(stem: Path, image: Path) -> bool:
    """Whether no results exist under this name, or only results of the same image."""
    explained = [_explained_image(stem.with_name(f"{stem.name}{suffix}")) for suffix in (".json", ".1.json")]
    return all(path is None or path == str(image.resolve()) for path in explained)


def _explained_image(path: Path) -> str | None:
    """The path of the image that a JSON file of vitrail explains."""
    if not is_explanation(path):
        return None
    try:
        saved = parse_json(path.read_text(encoding="utf-8"))
        return str((saved[0] if isinstance(saved, list) else saved)["image"]["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sanitize(text: str) -> str:
    """Letters, digits and signs that are safe in every shell and file system."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text.strip(" ()[]{}'\"")).strip(".") or "none"
