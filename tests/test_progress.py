"""Long work reports its progress and can be cancelled."""

from __future__ import annotations

import pytest
from PIL import Image
from tests.common import small_budget

import vitrail
from vitrail.methods.registry import list_methods
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
