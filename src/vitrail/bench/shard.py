"""Shards: parts of the images of a run, measured by processes that know nothing of each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vitrail.errors import VitrailError


@dataclass(frozen=True)
class Shard:
    """The ``number``-th of ``count`` equal parts of the images of a run, from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Reads ``i/n``."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise VitrailError(f"a shard is i/n with i from 1 to n, as 2/8, but got {text!r}.")
        return cls(int(match[1]), int(match[2]))

    def of(self, positions: Sequence[int]) -> Sequence[int]:
        return positions[self.number - 1 :: self.count]

    def __str__(self) -> str:
        return f"{self.number}-of-{self.count}"
