"""Long work reports its progress and can be cancelled."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from tests.common import small_budget

import vitrail
from vitrail.engine.trace import trace
from vitrail.methods.registry import build_method, list_methods
from vitrail.models.view import View
from vitrail.progress import watched

SLOW = [name for name, info in list_methods().items() if sum(info.cost) >= 50]


class CancelledError(Exception):
    """Raised by the callback."""


@pytest.mark.parametrize("method", SLOW)
def test_methods_of_many_passes_report_progress(method: str, model: View, photo: Image.Image) -> None:
    calls: list[tuple[str, int, int]] = []
    with watched(lambda *call: calls.append(call)):
        vitrail.explain(model, photo, method, **small_budget(method))
    assert {name for name, _, _ in calls} == {method}
    ((total, done),) = by_total(calls).items()
    assert done == sorted(done)
    assert done[0] == 0
    assert total - done[-1] <= 1, "the last step, or its beginning"


def by_total(calls: list[tuple[str, int, int]]) -> dict[int, list[int]]:
    """Total → the numbers of steps done, without the bar over images, whose total is 1."""
    return {total: [d for _, d, t in calls if t == total] for _, _, total in calls if total > 1}


@pytest.mark.parametrize("method", SLOW)
def test_methods_of_many_passes_can_be_cancelled(method: str, model: View, photo: Image.Image) -> None:
    def stop(name: str, done: int, total: int) -> None:
        if done and total > 1:
            raise CancelledError

    with pytest.raises(CancelledError), watched(stop):
        vitrail.explain(model, photo, method, **small_budget(method))


def test_the_passes_of_methods_of_users_are_counted(model: View, photo: Image.Image) -> None:
    @vitrail.method("tests_progress_known", cost=(6, 0))
    def known(model, images, target):  # type: ignore[no-untyped-def]
        tokens = model.embed(images)
        for _ in range(5):
            model.encode(tokens)
        trace(model, images, target)
        return torch.zeros(len(images), *model.grid)

    @vitrail.method("tests_progress_unknown")
    def unknown(model, images, target):  # type: ignore[no-untyped-def]
        for _ in range(3):
            model.logits(images)
        return torch.zeros(len(images), *model.grid)

    calls: list[tuple[str, int, int]] = []
    images = model.preprocess(photo)[None]
    with watched(lambda *call: calls.append(call)):
        for name in ("tests_progress_known", "tests_progress_unknown", "random"):
            build_method(name, model).attribute(images, 0)
    assert calls[:7] == [("tests_progress_known", done, 6) for done in range(7)]
    ends = [(0, 1), (1, 1), (2, 0), (3, 0)]
    assert calls[7:] == [("tests_progress_unknown", *end) for end in ends], "its number of passes is not known"

    def stop(name: str, done: int, total: int) -> None:
        if done == 2:
            raise CancelledError

    with pytest.raises(CancelledError), watched(stop):
        build_method("tests_progress_known", model).attribute(images, 0)


def test_passes_outside_of_a_method_are_not_counted(model: View, photo: Image.Image) -> None:
    calls: list[tuple[str, int, int]] = []
    with watched(lambda *call: calls.append(call)):
        model.logits(model.preprocess(photo)[None])
    assert calls == []
