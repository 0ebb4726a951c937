"""Errors that a client gets: a status and one sentence."""

from __future__ import annotations

from vitrail.errors import VitrailError

LONGEST = 2000  # letters: what was given is repeated, and may be anything


class Refused(VitrailError):  # noqa: N818 — an answer, rather than a fault
    """A request that cannot be served; ``retry`` says after how many seconds to ask again."""

    def __init__(self, status: int, sentence: str, retry: int | None = None) -> None:
        super().__init__(sentence if len(sentence) <= LONGEST else f"{sentence[: LONGEST - 1]}…")
        self.status, self.retry = status, retry
