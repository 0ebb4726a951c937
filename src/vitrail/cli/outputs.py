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
MAX_NAME = 24  # those of a class, a text or a file in it


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
    """``281-tabby``: the index, because two classes can have the same name.

    Texts and groups have no numbers of their own: they stand with all that fits, a text that does not with a digest.
    """
    label = "" if view.labels is None else view.labels[index]
    is_group = view.question is not None and view.question["kind"] == "groups"
    name = readable(label if is_group or view.reads_texts else label.split(",")[0])
    if view.reads_texts and not is_group and name.replace("-", " ") != label:
        name = f"{name}-{digest(label)}".strip("-")
    return f"{index}-{name}" if name else f"class-{index}"


def file_part(path: Path) -> str:
    """``coffee-1f0c3a52``: its name, and a digest of its folder too."""
    return f"{readable(path.stem)}-{digest(str(path.resolve()))}".strip("-")


def readable(text: str) -> str:
    """The beginning of a text as a part of a file name; perhaps nothing."""
    return _sanitize(text)[:MAX_NAME].strip("-.")


def digest(text: str) -> str:
    """A few characters that tell a text from others."""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]


def params_part(params: Mapping[str, Any]) -> str:
    """``rule-frozen.start_layer-1``"""
    return ".".join(f"{name}-{_sanitize(str(value))}" for name, value in sorted(params.items()))


def join_parts(parts: Sequence[str]) -> str:
    """The suffix of a file name: empty without parts, hashed where it would get too long."""
    text = ".".join(part for part in parts if part)
    if len(text) > MAX_LENGTH:
        text = f"{text[: MAX_LENGTH - 9]}-{digest(text)}"
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
