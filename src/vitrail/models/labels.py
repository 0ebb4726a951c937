"""Names of classes: from a list, a file, or the ImageNet lists that timm ships."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.errors import VitrailError
from vitrail.files import parse_json


def plain_name(name: str) -> str:
    """A class name without differences of case, spaces, hyphens and underscores: ``British_Shorthair``."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def is_number(name: str) -> bool:
    """Whether a class is named by its number."""
    return re.fullmatch(r"\s*[+-]?\d+\s*", name, re.ASCII) is not None


@lru_cache(maxsize=8)
def plain_names(labels: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """For every class its plain name, then those of its synonyms, which stand between commas."""
    return tuple(tuple(map(plain_name, (label, *label.split(",")))) for label in labels)


def read_labels(labels: Sequence[str] | Mapping[Any, str] | str | Path, count: int) -> tuple[str, ...]:
    """Class names in order, from a sequence, a mapping index → name, or a text (one per line) or JSON file."""
    source = f"the file {labels}" if isinstance(labels, str | Path) else "labels"
    values = _read_file(Path(labels)) if isinstance(labels, str | Path) else labels
    if not isinstance(values, Iterable) or isinstance(values, Set):
        raise VitrailError(f"labels must be a list, a mapping or a file, but got {type(values).__name__}.")
    if isinstance(values, Mapping):
        try:
            ordered = {int(index): name for index, name in values.items()}
        except (ValueError, TypeError):
            raise VitrailError(
                f"{source} maps {next(iter(values))!r} to a name: expected class numbers as keys."
            ) from None
        if sorted(ordered) != list(range(len(ordered))):
            raise VitrailError(f"{source} must name the classes 0…{count - 1}, each once.")
        values = [ordered[i] for i in range(len(ordered))]
    values = list(values)
    wrong = [name for name in values if not isinstance(name, str | int)]
    if wrong:
        raise VitrailError(f"{source} must hold one text per class, but holds {wrong[0]!r}.")
    names = tuple(str(name).strip() for name in values)
    if len(names) != count:
        raise VitrailError(f"{source} has {len(names)} names, but the model has {count} classes.")
    return names


def _read_file(path: Path) -> Sequence[str] | Mapping[str, str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise VitrailError(f"cannot read the labels file {path}: {error}. Expected text, one name per line.") from None
    if path.suffix.lower() != ".json":
        return [line for line in text.splitlines() if line.strip()]
    try:
        values = parse_json(text)
    except ValueError as error:
        raise VitrailError(f"the labels file {path} is not valid JSON: {error}.") from None
    if not isinstance(values, list | dict):
        raise VitrailError(f"the labels file {path} must hold a list of names or a mapping number → name.")
    return values


def imagenet_labels(module: nn.Module, count: int) -> tuple[str, ...] | None:
    """The names of a model trained on an ImageNet subset that timm knows, else None."""
    if count < 1000:
        return None
    from timm.data import infer_imagenet_subset

    subset = "imagenet-1k" if count == 1000 else infer_imagenet_subset(module)
    return None if subset is None else _timm_labels(subset, count)


@lru_cache(maxsize=4)
def _timm_labels(subset: str, count: int) -> tuple[str, ...] | None:
    from timm.data import ImageNetInfo

    names = ImageNetInfo(subset).label_descriptions()
    return tuple(names) if len(names) == count else None
