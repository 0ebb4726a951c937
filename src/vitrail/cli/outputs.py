"""The files that ``vitrail explain`` and ``vitrail compare`` write: their names, and how to know them again."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail.models.view import View

LONGEST = 60  # letters of what is added to a name
_SHEET = re.compile(r"\.(top\d+|curves)$")
_BEGIN = re.compile(rb'\s*(\[\s*)?\{\s*"vitrail"')


def class_part(view: View, index: int) -> str:
    """``281-tabby``: the number, because two classes can have one name."""
    name = "" if view.labels is None else _plain(view.labels[index].split(",")[0])[:24].strip("-.")
    return f"{index}-{name}" if name else f"class-{index}"


def params_part(params: Mapping[str, Any]) -> str:
    """``rule-frozen.start_layer-1``"""
    return ".".join(f"{name}-{_plain(str(value))}" for name, value in sorted(params.items()))


def join_parts(parts: Sequence[str]) -> str:
    """What is put behind the usual name: nothing for the plain question; never longer than names can be."""
    text = ".".join(part for part in parts if part)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f".{text}" if text else ""


def file_stems(paths: Sequence[Path], out: Path, ending: str) -> list[Path]:
    """``cat`` + ending for each picture; pictures of the same name get a number, those of earlier runs too."""
    used: set[str] = set()
    stems = []
    for path in paths:
        numbered = itertools.chain([path.stem], (f"{path.stem}-{number}" for number in itertools.count(2)))
        name = next(name for name in numbered if name not in used and _free(out / (name + ending), path))
        used.add(name)
        stems.append(out / (name + ending))
    return stems


def own_results(path: Path) -> bool:
    """Whether vitrail wrote this picture: its JSON file, or the table of a folder, lies beside it."""
    if path.suffix.lower() != ".png":
        return False
    if path.name == "contact-sheet.png":
        return path.with_name("explanations.csv").is_file()
    stem = _SHEET.sub("", path.stem)
    return any(_is_ours(path.with_name(name)) for name in (f"{path.stem}.json", f"{stem}.json", f"{stem}.1.json"))


def several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _free(stem: Path, picture: Path) -> bool:
    """Whether nothing is there, or only what is known of the same picture."""
    for name in (f"{stem.name}.json", f"{stem.name}.1.json"):
        owner = _explained(stem.with_name(name))
        if owner is not None and owner != str(picture.resolve()):
            return False
    return True


def _explained(path: Path) -> str | None:
    """The picture that a JSON file of vitrail is about."""
    if not _is_ours(path):
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        owner = (saved[0] if isinstance(saved, list) else saved)["image"]["path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(owner)


def _is_ours(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return _BEGIN.match(file.read(64)) is not None
    except OSError:
        return False


def _plain(text: str) -> str:
    """Letters, digits, dots, signs: what no shell and no file system minds."""
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", text.strip(" ()[]{}'\"")).strip(".") or "none"
