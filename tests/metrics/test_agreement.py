"""SaCo, IDSDS and faithfulness correlation against the oracle, and what must hold of them."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tests.helpers import DOUBLE
from tests.metrics.common import CLOSE, PIXEL_KINDS, TOKEN_KINDS, Bench, background, bench, on_input, tie, tied
from tests.oracles import agreement
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.data import Scenes
from vitrail.methods.registry import build_method
from vitrail.metrics import list_metrics, measure
from vitrail.metrics.agreement import ordered_share, random_subsets
from vitrail.models.view import View

SOME = ["timm_vit", "timm_vit_gap", "timm_deit_distilled", "timm_vit_not_square", "timm_siglip", "torchvision_vit",
        "one_output", "multi_label", "four_patches", "pooled_nine"]  # fmt: skip
METRICS = ("saco", "idsds", "faithfulness_correlation")
QUICK: dict[str, dict[str, Any]] = {"faithfulness_correlation": {"runs": 20}}
TARGET = 1


def without_patches(of: Bench, image: Tensor, output: str) -> agreement.Score:
    encode, patches = of.subset(image), range(of.family.patches)

    def score(removed: list[int]) -> float:
        logits = encode([patch for patch in patches if patch not in removed])
        if output == "logit":
            return float(logits[TARGET])
        paired, place = of.softmax_logits(logits[None], TARGET)
        return float(paired.softmax(1)[0, place])

    return score


def without_pixels(of: Bench, image: Tensor, output: str, grid: tuple[int, int] | None = None) -> agreement.Score:
    classifier = of.logits if output == "logit" else of.probabilities
    return agreement.without_pixels(classifier, image, background(of, image, "default", "mean"), TARGET, grid)


def values_of(name: str, of: Bench, maps: Tensor, **params: Any) -> list[float]:
    return [score.value for score in measure(name, of.view, of.images, maps, TARGET, **params)]


def test_every_metric_of_agreement_is_compared_here() -> None:
    known = {name: info for name, info in list_metrics().items() if info.family == "agreement"}
    assert set(known) == set(METRICS)
    assert all(info.higher_is_better for info in known.values())
    assert {name: info.needs for name, info in known.items()} == {
        "saco": "map",
        "idsds": "tokens",
        "faithfulness_correlation": "map",
    }


@pytest.mark.parametrize("name", [*SOME, "timm_swin"])
def test_saco_of_pixels(name: str) -> None:
    of = bench(name)
    for kinds, groups, seed in ((PIXEL_KINDS, 10, 0), (TOKEN_KINDS, 7, 3)):
        maps = of.maps(kinds)
        result = measure("saco", of.view, of.images, maps, TARGET, groups=groups, seed=seed)
        for i, values in enumerate(maps):
            score = without_pixels(of, of.images[i : i + 1], "probability")
            expected = agreement.saco(score, on_input(values, of.size), groups, tie(of.cells, seed))
            assert abs(result[i].value - expected) < 1e-6
            assert result[i].extras["ties"] == pytest.approx(tied(on_input(values, of.size)))


@pytest.mark.parametrize("name", SOME)
def test_saco_of_tokens(name: str) -> None:
    """Ten groups of sixteen or fifteen patches differ in size; of four patches there are four groups."""
    of = bench(name)
    for kinds, groups, seed in ((PIXEL_KINDS, 3, 0), (TOKEN_KINDS, 10, 2)):
        maps = of.maps(kinds)
        result = measure("saco", of.view, of.images, maps, TARGET, groups=groups, space="tokens", seed=seed)
        for i, values in enumerate(maps):
            score = without_patches(of, of.images[i : i + 1], "probability")
            small = agreement.cell_means(values, of.family.grid)
            expected = agreement.saco(score, small, groups, tie(of.family.patches, seed))
            assert abs(result[i].value - expected) < 1e-6
            assert result[i].extras["ties"] == pytest.approx(tied(small))


@pytest.mark.parametrize("name", SOME)
def test_idsds(name: str) -> None:
    of = bench(name)
    for kinds in (PIXEL_KINDS, TOKEN_KINDS):
        maps = of.maps(kinds)
        for i, value in enumerate(values_of("idsds", of, maps)):
            score = without_patches(of, of.images[i : i + 1], "logit")
            assert abs(value - agreement.idsds(score, agreement.cell_means(maps[i], of.family.grid))) < 1e-6


@pytest.mark.parametrize("name", [*SOME, "timm_swin"])
def test_faithfulness_correlation(name: str) -> None:
    of = bench(name)
    cells = of.view.cells
    for kinds, subset, space, seed in (
        (PIXEL_KINDS, 0.2, "pixels", 0),
        (TOKEN_KINDS, 0.6, "pixels", 4),
        (TOKEN_KINDS, 0.2, "tokens", 0),
    ):
        if space == "tokens" and not of.view.has_tokens:
            continue
        maps, options = of.maps(kinds), {"subset": subset, "runs": 12, "space": space, "seed": seed}
        drawn = random_subsets(math.prod(cells), subset, 12, seed)
        subsets = [row.nonzero()[:, 0].tolist() for row in drawn]
        for i, value in enumerate(values_of("faithfulness_correlation", of, maps, **options)):
            image = of.images[i : i + 1]
            tokens = space == "tokens"
            score = without_patches(of, image, "logit") if tokens else without_pixels(of, image, "logit", cells)
            expected = agreement.faithfulness_correlation(score, agreement.cell_means(maps[i], cells), subsets)
            assert abs(value - expected) < 1e-6


def test_subsets_have_one_size_and_differ() -> None:
    for cells, share, size in ((196, 0.2, 39), (4, 0.01, 1), (4, 0.99, 3), (2, 0.5, 1)):
        drawn = random_subsets(cells, share, 50, seed=1)
        assert drawn.sum(1).unique().tolist() == [size]
        assert len(drawn.unique(dim=0)) > 1
        assert drawn.any(0).all()


@pytest.mark.parametrize(
    ("metric", "space"),
    [("idsds", "tokens"), *itertools.product(["saco", "faithfulness_correlation"], ["pixels", "tokens"])],
)
def test_factors_and_offsets_change_nothing_and_the_sign_turns_round(metric: str, space: str) -> None:
    of = bench("timm_vit")
    params = {**QUICK.get(metric, {}), **({} if metric == "idsds" else {"space": space})}
    if metric == "saco":
        params["groups"] = 8  # which divide pixels and patches: groups of −m are those of m
    maps = of.maps(["pixels", "pixels"]) if space == "pixels" else of.maps(["tokens", "tokens"])
    unchanged = values_of(metric, of, maps, **params)
    assert all(-1 <= value <= 1 and value != 0 for value in unchanged)
    for changed in (3.7 * maps, 1e-12 * maps, maps + 10):
        assert values_of(metric, of, changed, **params) == pytest.approx(unchanged, abs=1e-6)
    assert values_of(metric, of, -maps, **params) == pytest.approx([-value for value in unchanged], abs=CLOSE)


@pytest.mark.parametrize("level", [0.0, 0.1, -3.0])
@pytest.mark.parametrize("metric", METRICS)
def test_a_constant_map_agrees_with_nothing(metric: str, level: float) -> None:
    of = bench("timm_vit_not_square")
    for size in (of.family.grid, of.size):
        assert values_of(metric, of, torch.full((2, *size), level, dtype=DOUBLE), **QUICK.get(metric, {})) == [0, 0]


def test_the_falls_themselves_agree_perfectly() -> None:
    """A map of the falls is ordered as they are; the opposite map in no pair."""
    of, image = bench("timm_vit_not_square"), bench("timm_vit_not_square").images[:1]
    score = without_patches(of, image, "logit")
    falls = [score([]) - score([patch]) for patch in range(of.family.patches)]
    ideal = torch.tensor(falls, dtype=DOUBLE).view(of.family.grid)
    for sign in (1, -1):
        (result,) = measure("idsds", of.view, image, sign * ideal, TARGET)
        assert result.value == pytest.approx(sign)
    score = without_patches(of, image, "probability")
    falls = [score([]) - score([patch]) for patch in range(of.family.patches)]
    ideal = torch.tensor(falls, dtype=DOUBLE).view(of.family.grid)
    for sign in (1, -1):
        (result,) = measure("saco", of.view, image, sign * ideal, TARGET, groups=of.family.patches, space="tokens")
        assert result.value == pytest.approx(sign)


def test_ordered_share_of_three_groups() -> None:
    salience = torch.tensor([5.0, 3.0, 0.0])
    for falls, expected in (((3, 2, 1), 1), ((1, 2, 3), -1), ((2, 3, 1), (5 + 3 - 2) / 10), ((1, 1, 1), 1)):
        assert ordered_share(salience, torch.tensor(falls)) == pytest.approx(expected)
    assert ordered_share(torch.zeros(3), torch.tensor([1, 2, 3])) == 0


@functools.cache
def scenes() -> tuple[View, Tensor, list[int]]:
    view = vitrail.load("scenes")
    images = torch.stack([view.preprocess(Image.fromarray(scene.image)) for scene in Scenes(6, seed=11, objects=1)])
    return view, images, view.module(images).argmax(1).tolist()


@pytest.mark.parametrize("metric", METRICS)
def test_a_random_map_agrees_by_chance_only(metric: str) -> None:
    view, images, targets = scenes()
    params = QUICK.get(metric, {})

    def scores(method: str, **options: Any) -> list[float]:
        maps = build_method(method, view, **options).attribute(images, targets)
        return [score.value for score in measure(metric, view, images, maps, targets, **params)]

    drawn = np.concatenate([scores("random", seed=seed) for seed in range(8)])
    error = drawn.std() / math.sqrt(len(drawn))
    assert error < 0.1
    assert abs(drawn.mean()) < 3.5 * error
    assert np.mean(scores("decompx.skipplus")) > drawn.mean() + 3.5 * error


@pytest.mark.parametrize("metric", ["saco", "faithfulness_correlation"])
def test_token_space_needs_tokens(metric: str) -> None:
    of = bench("timm_swin")
    with pytest.raises(VitrailError, match=r'space="tokens" needs tokens, which .* does not have: use space="pixels"'):
        values_of(metric, of, of.maps(TOKEN_KINDS), space="tokens")


def test_idsds_is_refused_without_tokens() -> None:
    of = bench("timm_swin")
    with pytest.raises(VitrailError, match="idsds needs a model with tokens"):
        values_of("idsds", of, of.maps(TOKEN_KINDS))


def test_a_single_patch_cannot_be_removed() -> None:
    module = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=3, embed_dim=24, num_heads=3, depth=1)
    view, images = vitrail.wrap(module.eval()), torch.zeros(1, 3, 16, 16)
    for call in ("idsds", "saco(space=tokens)", "faithfulness_correlation(space=tokens)"):
        with pytest.raises(VitrailError, match="has only 1: use a model with more patches"):
            measure(call, view, images, torch.ones(1, 1, 1), 0)
