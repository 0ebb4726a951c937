"""What decides whether a trace comes from a graph. Graphs themselves need a GPU: benchmarks/gpu.py, part ``graphs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from tests.families import FAMILIES
from tests.helpers import batch, wrapped
from torch import Tensor, nn

from vitrail.engine import captured
from vitrail.engine.captured import KEPT, State, Uses
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.models.view import View
from vitrail.targets import Target


class Recorded:
    """In place of a capture: what it was made from."""

    made: ClassVar[list[Any]] = []

    def __init__(self, make: Any, images: Tensor, targets: Sequence[Target]) -> None:
        self.made.append(make)
        make(images, targets)


@pytest.fixture
def view() -> View:
    return wrapped("timm_vit", FAMILIES["timm_vit"].build())  # it is changed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(captured, "Capture", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    return Recorded.made


def nothing(images: Tensor, targets: Sequence[Target]) -> list[Trace]:
    return []


def use(uses: Uses, key: str, times: int = 1, make: Any = nothing) -> list[bool]:
    """Whether each of some uses comes from a graph."""
    return [uses.get(key, make, torch.zeros(1), []) is not None for _ in range(times)]


def test_the_third_use_is_captured_each_key_apart(made: list[Any]) -> None:
    uses = Uses()
    assert use(uses, "a", 2) == [False, False]
    assert use(uses, "b", 2) == [False, False]
    assert use(uses, "a", 3) == [True, True, True]
    assert use(uses, "b") == [True]
    assert len(made) == 2, "one graph for each"


def test_the_graph_not_used_for_longest_gives_way(made: list[Any]) -> None:
    uses, names = Uses(), [str(i) for i in range(KEPT)]
    for name in names:
        use(uses, name, 3)
    use(uses, names[0])
    use(uses, "another", 3)
    assert [use(uses, name)[0] for name in (names[0], *names[2:], "another")] == [True] * KEPT
    assert use(uses, names[1], 3) == [False, False, True], "its uses are counted anew"
    assert len(uses.captures) == KEPT


def test_what_cannot_be_captured_is_tried_once(made: list[Any]) -> None:
    def fails(images: Tensor, targets: Sequence[Target]) -> list[Trace]:
        raise RuntimeError("operation not permitted when stream is capturing")

    uses = Uses()
    assert use(uses, "a", 5, fails) == [False] * 5
    assert len(made) == 1


def replace_weight(module: Any) -> None:
    module.blocks[0].mlp.fc1.weight = nn.Parameter(module.blocks[0].mlp.fc1.weight.detach().clone())


def move_weight(module: Any) -> None:
    module.blocks[0].mlp.fc1.weight.data = module.blocks[0].mlp.fc1.weight.data.clone()


def replace_part(module: Any) -> None:
    module.blocks[1].mlp.act = nn.ReLU()


def set_attribute(module: Any) -> None:
    module.norm.eps = 0.5


def add_hook(module: Any) -> None:
    module.blocks[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize("change", [replace_weight, move_weight, replace_part, set_attribute, add_hook])
def test_another_network_forgets_its_graphs(change: Callable[[Any], None], view: View, made: list[Any]) -> None:
    uses = Uses()
    for expected in (False, False, True, True):
        uses.check(State.of(view.module))
        assert use(uses, "a") == [expected]
    change(view.module)
    for expected in (False, False, True):
        uses.check(State.of(view.module))
        assert use(uses, "a") == [expected]


def test_weights_that_change_in_place_are_read_by_the_graph(view: View, made: list[Any]) -> None:
    before = State.of(view.module)
    with torch.no_grad():
        for parameter in view.module.parameters():
            parameter.mul_(2)
    assert State.of(view.module) == before


def test_a_cpu_has_no_graphs(view: View, made: list[Any]) -> None:
    spec = TraceSpec.of({"x"}, [0])
    for _ in range(4):
        assert captured.captured(view, batch("timm_vit", 1, torch.float32), [Target()], spec, nothing) is None
    assert not made
