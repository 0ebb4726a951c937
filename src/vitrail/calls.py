"""Calls as text, ``rise(masks=256, space=tokens)``: parsing, printing, and checking parameters against their types."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from vitrail.errors import VitrailError

# A whole quoted string, or a separator.
_PARTS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[][(){},]""", re.DOTALL)
_WORDS = {"true": True, "false": False, "none": None, "null": None, "inf": math.inf, "-inf": -math.inf}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CALL = re.compile(r"\s*([\w.]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def split_call(text: str) -> tuple[str, dict[str, Any]]:
    """``"rise(masks=256)"`` → ``("rise", {"masks": 256})``; words that are not Python literals are strings."""
    match = _CALL.fullmatch(text)
    if not match:
        raise VitrailError(f"cannot parse {text!r}: expected a name, or name(parameter=value, …).")
    return match[1], parse_parameters(split_list(match[2] or ""), text)


def call_name(text: str) -> str:
    """The name in a call, also where the rest cannot be parsed."""
    return text.partition("(")[0].strip()


def parse_parameters(assignments: Sequence[str], text: str | None = None) -> dict[str, Any]:
    """``["masks=256", "cluster=False"]`` → ``{"masks": 256, "cluster": False}``; ``text`` is where they stand."""
    params: dict[str, Any] = {}
    where = "" if text is None else f" in {text!r}"
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise VitrailError(f"cannot parse {assignment!r}{where}: expected parameter=value.")
        if key in params:
            raise VitrailError(f"{key} is given twice{where}.")
        params[key] = _value(value.strip())
    return params


def join_call(name: str, params: Mapping[str, Any]) -> str:
    """The inverse of ``split_call``."""
    return f"{name}({', '.join(f'{key}={_word(value)}' for key, value in params.items())})" if params else name


def split_list(text: str | Sequence[str]) -> list[str]:
    """Items between commas outside of brackets; several texts one after another."""
    if not isinstance(text, str):
        return [item for part in text for item in split_list(part)]
    items, open_brackets, start = [], "", 0
    for match in _PARTS.finditer(text + ","):
        token = match[0]
        if token in _CLOSING:
            open_brackets = _CLOSING[token] + open_brackets
        elif open_brackets and token == open_brackets[0]:
            open_brackets = open_brackets[1:]
        elif token in ")]}":
            break
        elif token == "," and not open_brackets:
            items.append(text[start : match.start()].strip())
            start = match.end()
    if start <= len(text):
        raise VitrailError(f"cannot parse {text!r}: its brackets do not match.")
    return [item for item in items if item]


class Named:
    """What has a name and parameters: a method or a metric."""

    info: ClassVar[Any]

    @classmethod
    def parameters(cls) -> dict[str, Any]:
        """The parameters and their defaults."""
        raise NotImplementedError

    @property
    def params(self) -> dict[str, Any]:
        """The parameters and their values."""
        return {name: getattr(self, name) for name in self.parameters()}

    def given(self) -> dict[str, Any]:
        """The parameters that are not at their default."""
        return {name: value for name, value in self.params.items() if value != self.info.params[name]}

    @property
    def call(self) -> str:
        """Name and parameters as text, as in rows and plans."""
        return join_call(self.info.name, self.given())


def check_parameters(owner: type, params: Mapping[str, Any]) -> None:
    """Raises an error that names the parameter, its type and the value."""
    hints = _type_hints(owner)
    for name, value in params.items():
        if not _matches(value, hints[name]):
            raise VitrailError(f"{name} must be {_type_name(hints[name])}, but got {value!r}.")


@functools.lru_cache(maxsize=512)
def _type_hints(owner: type) -> Mapping[str, Any]:
    return get_type_hints(owner)


def check_known(name: str, params: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuses unknown parameters and lists the known ones with their defaults."""
    unknown = [key for key in params if key not in known]
    if unknown:
        listed = ", ".join(f"{key}={value!r}" for key, value in known.items() if key != "shape") or "none"
        raise VitrailError(f"{name} has no parameter {', '.join(unknown)}; it has: {listed}.")


def protocols_of(owner: Any) -> tuple[str, ...]:
    """The values of the parameter ``protocol`` of a class, a ``Literal``; without it only the default."""
    return (get_args(get_type_hints(owner)["protocol"]) if hasattr(owner, "protocol") else ()) or ("default",)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _WORDS.get(text.lower(), text)


def _word(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*", value) and _value(value) == value
    return value if plain else repr(value)


def _matches(value: Any, kind: Any) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_matches(value, option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # JSON has lists only
        return isinstance(value, tuple | list) and all(_matches(item, get_args(kind)[0]) for item in value)
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _type_name(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_type_name(option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(repr(value) for value in get_args(kind))
    if get_origin(kind) is tuple:
        return f"several of {_type_name(get_args(kind)[0])}"
    return {int: "an integer", float: "a number", bool: "true or false", NoneType: "None"}.get(kind, str(kind))
