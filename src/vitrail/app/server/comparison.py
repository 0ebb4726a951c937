"""One method of a comparison: its share of the bar, and its own time."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic as clock
from typing import Any

Answer = dict[str, Any]
Tell = Callable[[str, Answer], None]  # "progress" or "partial", and what there is to say


class OutOfTime(BaseException):  # like Cancelled: nothing on the way may catch it
    """The method has used up its time."""


class Turn:
    """Passes on what a method says, as a part of the whole that ``state`` describes."""

    def __init__(self, tell: Tell, state: Answer, seconds: float) -> None:
        self._tell, self._state = tell, state
        self._until = clock() + seconds
        self._share = self._before = self._room = 0.0  # of this method: done; done before this bar; for this bar
        self._bar = (0, 0)

    def tell(self, what: str, said: Answer) -> None:
        """Raises OutOfTime where the method has none left."""
        begin = clock()
        if begin > self._until:
            raise OutOfTime
        self._move(said["done"], said["total"])
        text = f"{self._state['what']}: {said['what']} {said['done']}/{said['total']}"
        self._tell(what, {**self._state, "done": self._state["done"] + self._share, "what": text})
        self._until += clock() - begin  # a quick job may have gone first

    def _move(self, done: int, total: int) -> None:
        """A method has any number of bars, one after another: each takes half of what is left."""
        if total <= 1:  # the picture, of which there is one
            return
        if total != self._bar[1] or done < self._bar[0]:
            self._before, self._room = self._share, (1 - self._share) / 2
        self._bar = (done, total)
        self._share = self._before + self._room * min(1.0, done / total)
