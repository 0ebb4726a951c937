"""What decides whether a trace comes from a graph. Graphs themselves need a GPU: benchmarks/gpu.py, part ``graphs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from tests import families
from tests.families import FAMILIES, WIDTH
from tests.helpers import batch, wrapped
from torch import Tensor, nn

import vitrail
from vitrail.calls import split_call
from vitrail.engine import captured, scheduler
from vitrail.engine.captured import KEPT, State, Uses
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.methods.registry import build_method
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
    return [uses.get(key, lambda: Recorded(make, torch.zeros(1), [])) is not None for _ in range(times)]


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


@pytest.mark.parametrize("kinds", [KEPT + 1, 10 * KEPT])
def test_graphs_of_kinds_in_turn_do_not_replace_each_other(kinds: int, made: list[Any]) -> None:
    uses, names = Uses(), [str(i) for i in range(kinds)]
    for _ in range(6):
        for name in names:
            use(uses, name)
    assert len(made) == KEPT
    assert [use(uses, name)[0] for name in names] == [True] * KEPT + [False] * (kinds - KEPT)


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
        uses.check(State.of(view.modules))
        assert use(uses, "a") == [expected]
    change(view.module)
    for expected in (False, False, True):
        uses.check(State.of(view.modules))
        assert use(uses, "a") == [expected]


def test_weights_that_change_in_place_are_read_by_the_graph(view: View, made: list[Any]) -> None:
    before = State.of(view.modules)
    with torch.no_grad():
        for parameter in view.module.parameters():
            parameter.mul_(2)
    assert State.of(view.modules) == before


def test_a_head_that_was_given_is_part_of_the_network() -> None:
    head = nn.Linear(WIDTH, 3)
    view = vitrail.wrap(families.build("timm_headless_token"), head=head, pool="token")
    before = State.of(view.modules)
    assert State.of(view.modules) == before
    head.weight.data = head.weight.data.clone()
    assert State.of(view.modules) != before


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (torch.backends.cuda.matmul, "allow_tf32", True),
        (torch.backends.cudnn, "allow_tf32", False),
        (torch.backends.cudnn, "deterministic", True),
    ],
)
def test_other_kernels_are_other_graphs(place: Any, name: str, value: bool) -> None:
    settings, before = captured._settings(), getattr(place, name)
    setattr(place, name, value)
    try:
        assert captured._settings() != settings
    finally:
        setattr(place, name, before)


def test_deterministic_kernels_are_other_graphs() -> None:
    before = captured._settings()
    torch.use_deterministic_algorithms(True)
    try:
        assert captured._settings() != before
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cpu_has_no_graphs(view: View, made: list[Any]) -> None:
    spec = TraceSpec.of({"x"}, [0])
    images, state = batch("timm_vit", 1, torch.float32), partial(State.of, view.modules)
    for _ in range(4):
        assert captured.captured(view, state, images, [Target()], spec, nothing) is None
        assert captured.captured_logits(view, state, "forward", [images], lambda images: images) is None
    assert not made


@pytest.mark.parametrize("call", ["rise(masks=8)", "tis(masks=8)", "atman", "occlusion(window=8,stride=8)"])
def test_scores_that_are_captured_are_those_of_eager_work(
    call: str, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of a graph, what it would do: the work again, with the weights as they are."""
    images, kinds = batch("timm_vit", 2, torch.float32), []

    def again(view: View, state: Any, kind: Any, inputs: Any, make: Callable[..., Tensor]) -> Tensor:
        kinds.append(kind)
        return make(*(tensor.clone() for tensor in inputs))

    name, params = split_call(call)
    method = build_method(name, view, **params)
    expected = method.attribute(images)
    monkeypatch.setattr(scheduler, "captured_logits", again)
    assert torch.equal(method.attribute(images), expected)
    assert len(set(kinds)) == 1 + ("forward" in kinds), "one kind of altered image"
    with torch.no_grad():
        view.module.get_parameter("head.weight").mul_(-2)
    assert not torch.equal(method.attribute(images), expected)
