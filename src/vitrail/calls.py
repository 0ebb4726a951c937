"""Methods and metrics with their parameters as one word: ``rise(masks=256, space=tokens)``."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vitrail.errors import VitrailError

# A quoted text as a whole, or a letter that divides.
_PARTS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[][(){},]""", re.DOTALL)
_WORDS = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CALL = re.compile(r"\s*([\w.]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def split_call(text: str) -> tuple[str, dict[str, Any]]:
    """``"rise(masks=256)"`` → ``("rise", {"masks": 256})``; words that are no Python value are strings."""
    found = _CALL.fullmatch(text)
    if not found:
        raise VitrailError(f"cannot read {text!r}: expected a name, or name(parameter=value, …).")
    params = {}
    for word in split_list(found[2] or ""):
        key, equals, value = word.partition("=")
        if not equals or not key.strip().isidentifier():
            raise VitrailError(f"cannot read {word!r} in {text!r}: expected parameter=value.")
        if key.strip() in params:
            raise VitrailError(f"{key.strip()} is given twice in {text!r}.")
        params[key.strip()] = _value(value.strip())
    return found[1], params


def join_call(name: str, params: Mapping[str, Any]) -> str:
    """The reverse of ``split_call``."""
    return f"{name}({', '.join(f'{key}={_word(value)}' for key, value in params.items())})" if params else name


def split_list(text: str | Sequence[str]) -> list[str]:
    """Words between commas that stand in no bracket; several texts one after another."""
    if not isinstance(text, str):
        return [word for one in text for word in split_list(one)]
    words, awaited, start = [], "", 0
    for found in _PARTS.finditer(text + ","):
        letter = found[0]
        if letter in _CLOSING:
            awaited = _CLOSING[letter] + awaited
        elif awaited and letter == awaited[0]:
            awaited = awaited[1:]
        elif letter in ")]}":
            break
        elif letter == "," and not awaited:
            words.append(text[start : found.start()].strip())
            start = found.end()
    if start <= len(text):
        raise VitrailError(f"cannot read {text!r}: its brackets do not match.")
    return [word for word in words if word]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _WORDS.get(text.lower(), text)


def _word(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*", value) and _value(value) == value
    return value if plain else repr(value)
