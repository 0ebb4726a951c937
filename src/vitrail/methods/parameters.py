"""Checking a method's parameters against their types, before any work."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitrail.errors import VitrailError


def check_parameters(cls: type, params: dict[str, Any]) -> None:
    """Raises an error that names the parameter, what it may be and what it was."""
    hints = get_type_hints(cls)
    for name, value in params.items():
        if not _fits(value, hints[name]):
            raise VitrailError(f"{name} must be {_told(hints[name])}, but got {value!r}.")


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # a list, as JSON has it, is as good
        return isinstance(value, tuple | list) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _told(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_told(one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"several of {_told(get_args(kind)[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", NoneType: "None"}.get(kind, str(kind))
