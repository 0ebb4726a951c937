"""Damage to valid inputs: of bytes, and of the values of JSON or TOML."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF)
WORDS = (0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
TEXTS = (
    "", " ", "\0", "\n", "..", "../../evil", "/etc/passwd", "/dev/zero", "~", "%s", "{}", "{0.__class__}", "nan", "inf",
    "-1", "1e999", "None", "true", "[/]", "\x1b[31m", "é", "\u202e", "\ud800", "😀", "a" * 5000, "a\x00b", "🏳️‍🌈",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 2**31, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e-320, 1e308, float("nan"),
    float("inf"), float("-inf"), [], [[]], {}, {"": None}, [None], [0], [1, 2, 3], [1e308, -1e308], *TEXTS,
)  # fmt: skip


def damaged(data: bytes, draw: random.Random) -> bytes:
    """Bytes with one to eight changes, early ones more likely: there are the headers."""
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        if not content:
            return draw.randbytes(8)
        limit = draw.choice((16, 64, 256, len(content)))
        place = draw.randrange(min(limit, len(content)))
        draw.choice(DAMAGES)(content, place, draw)
    return bytes(content)


def _flip(content: bytearray, place: int, draw: random.Random) -> None:
    content[place] ^= 1 << draw.randrange(8)


def _set(content: bytearray, place: int, draw: random.Random) -> None:
    content[place] = draw.choice((*EXTREMES, draw.randrange(256)))


def _word(content: bytearray, place: int, draw: random.Random) -> None:
    size = draw.choice((2, 4))
    content[place : place + size] = (draw.choice(WORDS) % 256**size).to_bytes(size, draw.choice(("big", "little")))


def _cut(content: bytearray, place: int, draw: random.Random) -> None:
    del content[place:]


def _remove(content: bytearray, place: int, draw: random.Random) -> None:
    del content[place : place + draw.randint(1, 32)]


def _repeat(content: bytearray, place: int, draw: random.Random) -> None:
    content[place:place] = content[place : place + draw.randint(1, 64)] * draw.choice((1, 2, 50))


def _insert(content: bytearray, place: int, draw: random.Random) -> None:
    content[place:place] = draw.randbytes(draw.randint(1, 16))


def _move(content: bytearray, place: int, draw: random.Random) -> None:
    piece = content[place : place + draw.randint(1, 64)]
    elsewhere = draw.randrange(len(content))
    content[elsewhere : elsewhere + len(piece)] = piece


DAMAGES: Sequence[Callable[[bytearray, int, random.Random], None]] = (
    _flip, _flip, _set, _set, _word, _word, _cut, _remove, _repeat, _insert, _move
)  # fmt: skip


def altered(values: Any, draw: random.Random, others: Sequence[Any] = VALUES) -> Any:
    """A nested value with one to three members replaced, removed, repeated or renamed."""
    result = copy.deepcopy(values)
    for _ in range(draw.choice((1, 1, 2, 3))):
        holders = [value for value in _nested(result) if isinstance(value, dict | list) and value]
        if not holders:
            return draw.choice(others)
        holder = draw.choice(holders)
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        kind = draw.random()
        if kind < 0.7:
            holder[key] = copy.deepcopy(draw.choice(others))
        elif kind < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw.choice(TEXTS)] = holder.pop(key)
        else:
            holder.extend(copy.deepcopy(holder[key]) for _ in range(draw.choice((1, 100))))
    return result


def _nested(value: Any) -> list[Any]:
    """A value and everything in it."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(inner for member in members for inner in _nested(member))]
