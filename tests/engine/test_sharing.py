"""Methods that ask the same kind of trace of the same images get one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers import batch, close, viewed

import vitrail
from vitrail.engine import trace as tracing
from vitrail.engine.sharing import Wish, current, shared, united
from vitrail.engine.trace import trace
from vitrail.evaluation import common_wishes
from vitrail.methods.registry import build_method, supported_methods

# They trace, but with a rule of their own, single images, or what no other method reads.
ALONE = {"partial_lrp", "tis"}
METHODS = ("gen_att", "raw_attention", "decompx", "rollout", "full_grad.plus(rule=frozen)", "trans_att", "vtranm")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Wish]:
    """The wishes of all traces that are made."""
    seen: list[Wish] = []
    make = tracing._make

    def spy(wish: Wish, *args: object) -> tracing.Trace:
        seen.append(wish)
        return make(wish, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(tracing, "_make", spy)
    return seen


@pytest.mark.parametrize("name", ["timm_vit", "timm_deit_distilled", "timm_siglip", "hf_dinov2_registers"])
def test_every_method_asks_for_the_trace_that_it_declares(name: str, made: list[Wish]) -> None:
    _, _, view = viewed(name)
    images, undeclared = batch(name, 1), set()
    for method in supported_methods(view):
        built = build_method(method, view)
        if sum(built.passes()) > 130 and method != "tis":  # masks: they do not trace
            continue
        made.clear()
        built.explain(images, 0)
        wish = built.wish()
        if wish is None and made:
            undeclared.add(method)
        elif wish is not None:
            assert made[0] == wish, method
    assert undeclared <= ALONE


@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip", "hf_dinov2_registers"])
def test_sharing_changes_no_map(name: str, made: list[Wish]) -> None:
    _, _, view = viewed(name)
    images, target = batch(name, 2), torch.tensor([1, 0])
    methods = [one for n in supported_methods(view) if (one := build_method(n, view)).wish() is not None]
    alone = [one.attribute(images, target) for one in methods]
    common = common_wishes(methods)
    assert ("plain", "logit", False) in common
    made.clear()
    for kind, wish in common.items():
        own = [i for i, one in enumerate(methods) if (asked := one.wish()) and asked.kind == kind]
        with shared(wish, view, images, target):
            for i in own:
                assert close(methods[i].attribute(images, target), alone[i], 1e-8), methods[i].info.name
        assert made.count(wish) == 1


def test_evaluate_traces_once_per_kind_and_gives_rows_as_before(made: list[Wish]) -> None:
    view = vitrail.load("scenes")
    rows = vitrail.evaluate(view, "scenes:3", METHODS, "sparseness", batch_size=8)
    kinds = [wish.kind for wish in made if isinstance(wish.rule, str)]
    assert sorted(kinds) == [("frozen", "logit", False), ("plain", "logit", False)]
    assert list(dict.fromkeys(rows["method"])) == [one.split("(")[0] for one in METHODS]
    assert (rows["seconds"] > 0).all()
    alone = vitrail.evaluate(view, "scenes:3", METHODS[:1], "sparseness", batch_size=8)
    first = rows[rows["method"] == "gen_att"]
    assert first["value"].to_numpy() == pytest.approx(alone["value"].to_numpy(), rel=1e-4)


def other_images(images: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"images": images + 0.1}


@pytest.mark.parametrize(
    "change",
    [
        other_images,
        lambda images: {"target": torch.tensor([1, 1])},
        lambda images: {"against": torch.tensor([2, 2])},
        lambda images: {"rule": "frozen"},
        lambda images: {"output": "probability"},
        lambda images: {"precise": True},
        lambda images: {"keep": {"A"}},
        lambda images: {"layers": [2]},
        lambda images: {"images": images[:1], "target": torch.tensor([1])},
    ],
)
def test_what_differs_is_not_shared(change: Callable[[torch.Tensor], dict[str, object]], made: list[Wish]) -> None:
    _, _, view = viewed("timm_vit")
    images, target = batch("timm_vit", 2), torch.tensor([1, 0])
    wish = Wish(frozenset({"x", "gx"}), frozenset({0, 1}))
    asked = {"images": images, "target": target, "keep": {"x"}, "layers": [1]}
    with shared(wish, view, images, target):
        first = trace(view, **asked)
        assert trace(view, **asked) is first
        assert len(made) == 1
        other = trace(view, **{**asked, **change(images)})
        assert other is not first
    assert len(made) == 2


def test_another_model_is_not_answered_and_nothing_is_left_behind(made: list[Wish]) -> None:
    view, twin = viewed("timm_vit")[2], vitrail.wrap(viewed("timm_vit")[1])
    images, target = batch("timm_vit", 2), torch.tensor([1, 0])

    def stopped() -> None:
        with shared(Wish(frozenset({"x"}), frozenset({0})), view, images, target):
            trace(view, images, target, keep={"x"}, layers=[0])
            trace(twin, images, target, keep={"x"}, layers=[0])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert len(made) == 2
    assert current() is None


def test_a_trace_that_is_found_made_is_accounted_for() -> None:
    _, _, view = viewed("timm_vit")
    images, target = batch("timm_vit", 2), torch.tensor([1, 0])
    with shared(Wish(frozenset({"x"}), frozenset({0})), view, images, target) as one:
        assert one is not None
        trace(view, images, target, keep={"x"}, layers=[0])
        assert one.taken() == 0
        trace(view, images, target, keep={"x"}, layers=[0])
        assert one.taken() == one.cost > 0
        assert one.taken() == 0


def test_wishes_of_one_kind_are_united_and_those_that_cannot_be_are_left_out() -> None:
    a, b = Wish(frozenset("x"), frozenset({0})), Wish(frozenset("A"), frozenset({1, 2}))
    lone = Wish(frozenset("x"), frozenset({0}), rule="frozen")
    assert united([a, b, lone]) == {a.kind: Wish(frozenset("xA"), frozenset({0, 1, 2}))}
    _, _, view = viewed("timm_vit")
    methods = [
        build_method("gen_att", view),
        build_method("rollout", view),
        build_method("rollout", view, start_layer=-1),
    ]
    assert max(common_wishes(methods)[a.kind].layers) < view.num_layers
    assert common_wishes(methods[:1] + methods[2:]) == {}
