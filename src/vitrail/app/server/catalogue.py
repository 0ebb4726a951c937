"""What a server offers: its models, and its methods with a form for their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor

from vitrail.app.server.tasks import grid_of
from vitrail.errors import VitrailError
from vitrail.evaluation import default_method
from vitrail.methods.base import MethodFactory
from vitrail.methods.registry import describe_methods, get_method
from vitrail.models.detection import Detector
from vitrail.models.questions import embedding
from vitrail.models.view import View

Row = dict[str, Any]


def describe_model(name: str, view: View) -> Row:
    return {
        "id": name,
        "name": view.name,
        "classes": view.num_classes,
        "input": list(view.size),
        "grid": list(grid_of(view)),
        "view": "tokens" if view.has_tokens else "features" if view.has_features else "logits",
        "asks": list(questions(view)),
        "default_method": default_method(view),
        "note": view.note,
        "labels": [view.label(i) for i in range(view.num_classes)],
    }


def questions(view: View) -> Iterator[str]:
    """What can be asked of a model."""
    if not view.is_embedding:
        yield from ("class", "group")
    if isinstance(view, Detector):
        yield "box"
    if view.has_tokens and view.architecture().head.pool in ("patches", "queries"):
        yield "region"
    if view.reads_texts:
        yield "text"
    with suppress(VitrailError):
        embedding(view, "cosine").architecture()
        yield "similarity"


def describe_methods_of(view: View) -> list[Row]:
    """The rows of ``vitrail methods --json --model``, each with a form."""
    rows = describe_methods("*", view)
    for row in rows:
        row["form"] = parameter_form(get_method(row["name"]))
    return rows


def parameter_form(method: MethodFactory) -> list[Row]:
    """One entry per parameter, with what a form needs to ask for it: not for tensors, nor for files of the server."""
    types = method.parameter_types().items()
    hints = {n: hint for n, hint in types if Tensor not in get_args(hint) and n not in method.file_parameters}
    return [_entry(name, hint, method.parameters()[name]) for name, hint in hints.items()]


def _entry(name: str, hint: Any, default: Any) -> Row:
    types = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    optional = NoneType in types
    types = [type_ for type_ in types if type_ is not NoneType]
    choices = None
    if any(get_origin(type_) is tuple for type_ in types):
        kind = "numbers"
    elif get_origin(types[0]) is Literal:
        kind, choices = "choice", list(get_args(types[0]))
    else:
        kind = {int: "integer", float: "number", bool: "boolean"}.get(types[0], "text")
    return {"name": name, "kind": kind, "default": default, "choices": choices, "optional": optional}
