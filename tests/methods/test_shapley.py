"""Shapley values: the literal average over permutations, exact over all of them, honest errors."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
from tests.helpers import DOUBLE, batch, relative, viewed
from tests.oracles import shapley, tis
from torch import Tensor

import vitrail
from vitrail.errors import VitrailError
from vitrail.methods.registry import build_method
from vitrail.methods.shapley import Shapley

TARGET = 3


def literal(name: str, places: Tensor, output: str) -> Tensor:
    """(permutations, N): what each patch adds when it joins those before it, one subset at a time."""
    family, module, _ = viewed(name)
    known: dict[tuple[bool, ...], float] = {}

    def value(present: list[bool]) -> float:
        key = tuple(present)
        if key not in known:
            known[key] = float(tis.scores(family, module, batch(name, 1), torch.tensor([key]), TARGET, output))
        return known[key]

    rows = []
    for permutation in places.tolist():
        added = [0.0] * len(permutation)
        present = [False] * len(permutation)
        for place in range(len(permutation)):
            patch = permutation.index(place)
            without = value(present)
            present[patch] = True
            added[patch] = value(present) - without
        rows.append(added)
    return torch.tensor(rows, dtype=DOUBLE)


@pytest.mark.parametrize("name", ["timm_vit", "timm_deit_distilled"])
@pytest.mark.parametrize("output", ["probability", "logit"])
def test_values_and_errors_are_those_of_the_permutations(name: str, output: str) -> None:
    view = viewed(name)[2]
    method = build_method("shapley", view, permutations=6, output=output)
    assert isinstance(method, Shapley)
    places = method.places(view.grid[0] * view.grid[1])
    assert (places[::2] + places[1::2] == places.shape[1] - 1).all()  # pairs run in opposite directions
    assert all(sorted(row) == list(range(places.shape[1])) for row in places.tolist())
    result = method.explain(batch(name, 1), TARGET)
    added = literal(name, places, output)
    pairs = (added[::2] + added[1::2]) / 2
    assert relative(result.map[0].flatten(), pairs.mean(0)) < 1e-7
    assert result.error is not None
    assert relative(result.error[0].flatten(), pairs.std(0) / 3**0.5) < 1e-6


def test_all_permutations_give_the_exact_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a game of four players, the rows of patches."""
    name = "timm_vit"
    view, rows = viewed(name)[2], viewed(name)[2].grid[0]
    group = torch.arange(rows * view.grid[1]) // view.grid[1]
    orders = torch.tensor(list(itertools.permutations(range(rows))))
    # whole rows join one after another: within a row the places ascend, and what a row adds is the sum of its patches
    places = orders[:, group] * view.grid[1] + torch.arange(rows * view.grid[1]) % view.grid[1]
    monkeypatch.setattr(Shapley, "places", lambda self, patches: places)
    result = build_method("shapley", view, output="logit").attribute(batch(name, 1), TARGET)[0]
    family, module, _ = viewed(name)

    def value(coalition: Tensor) -> float:
        return float(tis.scores(family, module, batch(name, 1), coalition[group][None], TARGET, "logit"))

    assert relative(result.sum(1), shapley.exact(value, rows)) < 1e-8


def test_values_add_up_and_the_first_permutations_stay() -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit", 2)
    result = build_method("shapley", view, permutations=4).explain(images, TARGET)
    gained = result.extras["score"] - result.extras["score_baseline"]
    assert torch.allclose(result.map.sum((1, 2)), gained)
    assert torch.allclose(result.extras["score_patches"], gained)
    assert result.error is not None
    assert (result.error > 0).all()
    few, many = (build_method("shapley", view, permutations=count) for count in (4, 10))
    assert isinstance(few, Shapley)
    assert isinstance(many, Shapley)
    assert torch.equal(few.places(9), many.places(9)[:4])


def test_a_single_patch_has_the_whole_difference() -> None:
    view = vitrail.wrap(timm.create_model("vit_tiny_patch16_224", img_size=16, depth=1, num_classes=5))
    result = build_method("shapley", view).explain(torch.rand(1, 3, 16, 16), 2)
    assert torch.allclose(result.map.flatten(), result.extras["score"] - result.extras["score_baseline"])


def test_errors_are_the_deviation_over_seeds() -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    runs = [build_method("shapley", view, permutations=16, seed=seed).explain(image, TARGET) for seed in range(24)]
    deviation = torch.stack([run.map for run in runs]).std(0)
    claimed = torch.stack([run.error for run in runs if run.error is not None]).square().mean(0).sqrt()
    assert 0.8 < float((claimed / deviation).mean()) < 1.25


@pytest.mark.parametrize("count", [0, 2, 5])
def test_permutations_come_in_pairs(count: int) -> None:
    with pytest.raises(VitrailError, match="even and at least 4"):
        build_method("shapley", viewed("timm_vit")[2], permutations=count)
