"""Expected gradients: the literal mean over draws, unbiased draws, completeness, and references as a parameter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.common import noise
from tests.families import FAMILIES, few
from tests.helpers import DOUBLE, batch, in_both_precisions, relative, viewed
from tests.oracles import gradients as literal
from torch import Tensor, nn

import vitrail
from vitrail.errors import VitrailError
from vitrail.methods.gradients import ExpectedGradients
from vitrail.methods.registry import build_method
from vitrail.models.preprocessing import Preprocess
from vitrail.models.view import View
from vitrail.samples import SAMPLES, open_sample

TARGET = torch.tensor([0, 3, 1])


def references(name: str, count: int = 3) -> Tensor:
    images = batch(name, 1)
    return torch.randn(count, *images.shape[1:], generator=torch.Generator().manual_seed(5), dtype=DOUBLE)


def built(name: str, dtype: torch.dtype = DOUBLE, **params: Any) -> ExpectedGradients:
    method = build_method("expected_gradients", viewed(name, dtype)[2], **params)
    assert isinstance(method, ExpectedGradients)
    return method


def drawn(method: ExpectedGradients) -> tuple[Tensor, list[float]]:
    """The references (samples, 3, H, W) and the α of all draws."""
    rows, places = method.draws(slice(0, method.samples))
    return method.images[method.order()][rows].to(DOUBLE), places.tolist()


@pytest.mark.parametrize(("name", "dtype"), in_both_precisions(few([*FAMILIES], 3)))
def test_maps_are_the_literal_mean_over_draws(name: str, dtype: torch.dtype) -> None:
    family, module, _ = viewed(name)
    for output in ("logit", "probability"):
        method = built(name, dtype, samples=5, seed=7, references=references(name), output=output)
        starts, alphas = drawn(method)
        expected = literal.expected_gradients(
            family, module, batch(name), TARGET, references=list(starts), alphas=alphas, output=output
        )
        maps = method.attribute(batch(name).to(dtype), TARGET)
        assert maps.shape == expected.shape
        assert relative(maps.to(DOUBLE), expected) < (1e-6 if dtype == DOUBLE else 1e-4)


def test_the_frozen_rule_is_that_of_the_oracle() -> None:
    family, module, _ = viewed("timm_vit")
    method = built("timm_vit", samples=4, references=references("timm_vit"), rule="frozen")
    starts, alphas = drawn(method)
    expected = literal.expected_gradients(
        family, module, batch("timm_vit"), TARGET, references=list(starts), alphas=alphas, frozen=True
    )
    assert relative(method.attribute(batch("timm_vit"), TARGET), expected) < 1e-6


@pytest.mark.parametrize(("samples", "count"), [(7, 3), (6, 3), (2, 3), (1, 1), (5, 1)])
def test_references_are_drawn_equally_often_at_stratified_places(samples: int, count: int) -> None:
    method = built("timm_vit", samples=samples, references=references("timm_vit", count))
    order, (rows, places) = method.order().tolist(), method.draws(slice(0, samples))
    assert len(set(order)) == len(order) == min(samples, count)
    draws = torch.bincount(rows, minlength=len(order))
    assert draws.max() - draws.min() <= 1
    for row, number in enumerate(draws.tolist()):
        strata = (places[rows == row] * number).floor()
        assert strata.tolist() == list(range(number))
    parts = [method.draws(slice(i, i + 1)) for i in range(samples)]
    assert torch.equal(torch.cat([part[1] for part in parts]), places), "draws do not depend on their company"


def test_every_reference_comes_first_for_some_seed() -> None:
    firsts = {int(built("timm_vit", samples=1, references=references("timm_vit"), seed=s).order()) for s in range(20)}
    assert firsts == {0, 1, 2}


def test_hierarchical_models_are_explained() -> None:
    view, image = viewed("timm_swin")[2], batch("timm_swin", 1)
    method = built("timm_swin", samples=3, references=references("timm_swin", 2))
    expected = torch.zeros_like(image)
    for start, alpha in zip(*drawn(method), strict=True):
        point = (start + alpha * (image - start)).requires_grad_()
        (gradient,) = torch.autograd.grad(view.staged(point, ())[0][0, 3], point)
        expected += (image - start) * gradient / 3
    assert relative(method.attribute(image, 3), expected.sum(1)) < 1e-6


def test_the_gap_shrinks_and_the_sum_is_right_in_the_mean() -> None:
    name = "timm_vit"
    view, images, starts = viewed(name)[2], batch(name), references(name)
    changes = view.logits(images).gather(1, TARGET[:, None])[:, 0] - view.logits(starts).mean(0)[TARGET]
    few_draws = [built(name, samples=6, references=starts, seed=seed).explain(images, TARGET) for seed in range(12)]
    sums = torch.stack([result.map.sum((1, 2)) for result in few_draws])
    error = sums.std(0) / len(sums) ** 0.5
    assert ((sums.mean(0) - changes).abs() < 4 * error).all()
    many = built(name, samples=240, references=starts).explain(images, TARGET)
    mean_gap = torch.stack([result.extras["completeness_gap"] for result in few_draws]).mean()
    assert many.extras["completeness_gap"].max() < mean_gap / 4


def test_the_score_is_split_by_the_references_that_were_drawn() -> None:
    view, images, starts = viewed("timm_vit")[2], batch("timm_vit"), references("timm_vit")
    method = built("timm_vit", samples=4, references=starts)
    result = method.explain(images, TARGET)
    scores = view.logits(drawn(method)[0])[:, TARGET].mean(0)
    torch.testing.assert_close(result.extras["score_baseline"], scores)
    torch.testing.assert_close(result.extras["score"], view.logits(images).gather(1, TARGET[:, None])[:, 0])
    torch.testing.assert_close(result.extras["score_patches"], result.map.sum((1, 2)))


@dataclass(eq=False, repr=False)
class Linear(View):
    """Logits that are linear in the pixels."""

    @property
    def num_outputs(self) -> int:
        return 4

    def logits(self, images: Tensor) -> Tensor:
        return self.module(images.flatten(1))  # type: ignore[no-any-return]

    def staged(self, images: Tensor, stages: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        return self.logits(images), []


def test_a_linear_model_is_explained_exactly() -> None:
    module = nn.Linear(3 * 8 * 8, 4, dtype=DOUBLE)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    method = build_method("expected_gradients", Linear(module, "linear", Preprocess((8, 8))), samples=10)
    assert isinstance(method, ExpectedGradients)
    result = method.explain(images, 2)
    weight = module.weight[2].detach().view(3, 8, 8)
    assert relative(result.map, ((images - method.images.mean(0)) * weight).sum(1)) < 1e-6
    assert result.extras["completeness_gap"].max() < 1e-6


def test_the_seed_decides() -> None:
    images = batch("timm_vit")
    first, same, other = (built("timm_vit", samples=4, seed=seed).attribute(images, TARGET) for seed in (7, 7, 8))
    assert torch.equal(first, same)
    assert relative(other, first) > 1e-3


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = []
    for chunk in (8, 3, 1):
        monkeypatch.setattr("vitrail.engine.scheduler.CPU_GRADIENTS", chunk)
        maps.append(built("timm_vit", samples=7).attribute(batch("timm_vit"), TARGET))
    assert relative(maps[1], maps[0]) < 1e-12
    assert relative(maps[2], maps[0]) < 1e-12


def test_by_default_the_references_are_the_bundled_pictures() -> None:
    view = viewed("timm_vit", torch.float32)[2]
    expected = torch.stack([view.preprocess(open_sample(file)) for file in SAMPLES])
    assert torch.equal(built("timm_vit", torch.float32).images, expected)
    assert build_method("expected_gradients", view).call == "expected_gradients"


def test_an_image_that_is_its_only_reference_gets_an_empty_map() -> None:
    image = torch.zeros_like(batch("timm_vit", 1))
    result = built("timm_vit", samples=3, references=image).explain(image, 0)
    assert torch.equal(result.map, torch.zeros_like(result.map))
    assert result.extras["completeness_gap"].max() < 1e-12


# References as a parameter


def test_references_stand_in_results_as_their_number_and_hash(tmp_path: Path) -> None:
    view, starts = viewed("timm_vit", torch.float32)[2], references("timm_vit", 2).float()
    explanation = vitrail.explain(view, noise(32, 32, 3), "expected_gradients", samples=2, references=starts)
    text = explanation.params["references"]
    assert text.startswith("2 images, ")
    assert explanation.call == f"expected_gradients(samples=2, references='{text}')"
    path = explanation.save(tmp_path / "map.png")
    assert json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["params"]["references"] == text
    opened = vitrail.open(path.with_suffix(".json"), image=noise(32, 32, 3), model=view)
    assert opened.call == explanation.call


def test_methods_with_other_references_are_rows_of_their_own() -> None:
    view, starts = viewed("timm_vit", torch.float32)[2], references("timm_vit", 2).float()
    methods = [ExpectedGradients(view, samples=2, references=images) for images in (starts, starts + 1)]
    rows = vitrail.evaluate(view, [noise(32, 32, 3)], methods, "sparseness, model_randomization(way=independent)")
    assert rows["params"].nunique() == 2
    assert rows["value"].notna().all()


def test_later_changes_of_the_tensor_do_not_matter() -> None:
    starts, images = references("timm_vit"), batch("timm_vit")
    method = built("timm_vit", samples=3, references=starts)
    before = method.attribute(images, TARGET)
    starts.zero_()
    assert torch.equal(method.attribute(images, TARGET), before)


SHAPE = batch("timm_vit", 1).shape[1:]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, but got 0"),
        ({"references": "/etc"}, "references must be a tensor .* in Python only, but got '/etc'"),
        ({"references": 3}, "references must be a tensor"),
        ({"references": torch.zeros(SHAPE)}, "references: .* takes normalised images of shape"),
        ({"references": torch.zeros(2, 3, 5, 5)}, "references: .* takes normalised images of shape"),
        ({"references": torch.zeros(1, *SHAPE, dtype=torch.uint8)}, "references: images must be a dense tensor"),
        ({"references": torch.zeros(0, *SHAPE)}, "references must be at least one image"),
        ({"references": torch.full((1, *SHAPE), torch.nan)}, "values finite"),
    ],
)
def test_bad_input(params: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        built("timm_vit", **params).attribute(batch("timm_vit"), TARGET)
