"""Whoever waits is told how far the work is, and can end it."""

from __future__ import annotations

import pytest
from PIL import Image

import vitrail
from vitrail.methods.registry import list_methods
from vitrail.models.view import View
from vitrail.progress import watched

SLOW = [name for name, info in list_methods().items() if sum(info.cost) >= 50]


class Enough(Exception):
    """Nobody waits any longer."""


@pytest.mark.parametrize("method", SLOW)
def test_methods_of_many_passes_say_how_far_they_are(method: str, model: View, photo: Image.Image) -> None:
    told: list[tuple[str, int, int]] = []
    with watched(lambda *step: told.append(step)):
        vitrail.explain(model, photo, method)
    assert {name for name, _, _ in told} == {method}
    ((total, done),) = steps(told).items()
    assert done == sorted(done)
    assert done[0] == 0
    assert total - done[-1] <= 1, "the last step, or its beginning"


def steps(told: list[tuple[str, int, int]]) -> dict[int, list[int]]:
    """What was done of each total; of one image nothing."""
    return {total: [d for _, d, t in told if t == total] for _, _, total in told if total > 1}


@pytest.mark.parametrize("method", SLOW)
def test_methods_of_many_passes_can_be_ended(method: str, model: View, photo: Image.Image) -> None:
    def stop(name: str, done: int, total: int) -> None:
        if done and total > 1:
            raise Enough

    with pytest.raises(Enough), watched(stop):
        vitrail.explain(model, photo, method)
