"""How a score splits: the parts add up to it, and so do the shares that are drawn."""

from __future__ import annotations

import pytest
import torch
from tests import families
from tests.common import noise
from tests.helpers import batch, viewed

import vitrail
from vitrail.calls import split_call
from vitrail.methods.registry import build_method

COMPLETE = ("decompx", "decompx(start_layer=1)", "decompx.plus", "decompx.skipplus", "full_grad(rule=frozen)",
            "full_grad.skipplus(rule=frozen)", "kernel_shap(samples=40)", "integrated_gradients(steps=8)",
            "expected_gradients(samples=200)")  # fmt: skip


@pytest.mark.parametrize("against", [None, 1])
@pytest.mark.parametrize("name", families.few([*families.FAMILIES], 7))
@pytest.mark.parametrize("call", COMPLETE[:6])
def test_patches_prefix_tokens_and_biases_add_up_to_the_score(call: str, name: str, against: int | None) -> None:
    view, images = viewed(name)[2], batch(name, 2)
    method, params = split_call(call)
    result = build_method(method, view, **params).explain(images, 0, against)
    logits = view.logits(images)
    score = logits[:, 0] - (0 if against is None else logits[:, against])
    parts = result.extras
    torch.testing.assert_close(parts["score"], score)
    torch.testing.assert_close(parts["score_patches"] + parts["score_prefix"] + parts["score_biases"], score)
    torch.testing.assert_close(result.map.sum((1, 2)) / parts["score_layers"], parts["score_patches"])


@pytest.mark.parametrize("call", COMPLETE)
def test_an_explanation_says_how_its_score_splits(call: str) -> None:
    method, params = split_call(call)
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(32, 32, 3), method, **params)
    assert ex.split is not None
    parts = {name: value for name, value in ex.split.items() if name != "score"}
    tolerance = 0.02 if method.endswith("_gradients") else 1e-4  # few steps or draws
    assert sum(parts.values()) == pytest.approx(ex.split["score"], rel=tolerance, abs=tolerance)
    assert 0 <= ex.patch_share <= 1
    for name, value in parts.items():
        assert f"{name} {value:+.2f}".replace("-", "−") in ex.score_line
    assert ex.to_dict()["split"] == ex.split
    order, drawn = ex.map.flatten().argsort(), ex.shares.flatten().argsort()
    assert torch.equal(order, drawn), "what is drawn has the order of the map"
    if "biases" in parts:
        assert float(ex.shares.sum()) == pytest.approx(ex.split["score"], abs=1e-4)


@pytest.mark.parametrize(
    "call", ["gen_att", "rollout", "full_grad", "full_grad_plus", "tis(masks=16)", "posterior(masks=16)", "random"]
)
def test_other_methods_promise_no_sum(call: str) -> None:
    method, params = split_call(call)
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(32, 32, 3), method, **params)
    assert (ex.split, ex.patch_share, ex.score_line) == (None, None, None)
    assert torch.equal(ex.shares, ex.map)


def test_a_score_among_the_extras_of_another_method_is_no_split() -> None:
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(32, 32, 3), "gen_att")
    ex.extras = {"score": 0.7}
    assert (ex.split, ex.patch_share, ex.score_line) == (None, None, None)


def test_a_split_that_does_not_add_up_is_marked() -> None:
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(32, 32, 3), "integrated_gradients", steps=40)
    assert " = patches" in ex.score_line
    ex.extras["completeness_gap"] = 0.02
    assert " ≈ patches" in ex.score_line


def test_a_contrast_that_the_model_decides_otherwise_sums_to_the_opposite() -> None:
    view = viewed("timm_vit", torch.float32)[2]
    image = noise(32, 32, 3)
    (first, *_), (second, *_) = vitrail.explain(view, image).top[:2]
    ex = vitrail.explain(view, image, target=second, against=first)
    assert float(ex.shares.sum()) < 0
    assert ex.score_line.startswith("logit difference −")
