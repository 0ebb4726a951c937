"""ROAD against the oracle, and what must hold of imputed pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers import DOUBLE
from tests.metrics.common import CLOSE, PIXEL_KINDS, TOKEN_KINDS, bench, on_input, tie, tied
from tests.oracles import agreement

import vitrail
from vitrail.data import Scenes
from vitrail.engine.noise import noise
from vitrail.methods.registry import build_method
from vitrail.metrics import build_metric, measure
from vitrail.metrics.imputation import SHARES, factorised, imputed, iterated

ORDERS = ("both", "morf", "lerf")
TARGET = 1


@pytest.mark.parametrize("name", ["four_patches", "six_patches", "pooled_nine"])
def test_road(name: str) -> None:
    of = bench(name)
    for kinds, sigma, seed in ((PIXEL_KINDS, 0.01, 0), (TOKEN_KINDS, 0.3, 5)):
        maps = of.maps(kinds)
        drawn = noise("normal", (3, *of.size), range(len(SHARES)), seed, torch.device("cpu")).double() * sigma
        for i, values in enumerate(maps):
            on, image = on_input(values, of.size), of.images[i : i + 1]
            expected = agreement.road(of.probabilities, image, on, TARGET, list(drawn), tie(of.cells, seed))
            for order in ORDERS:
                (result,) = measure("road", of.view, image, values, TARGET, order=order, sigma=sigma, seed=seed)
                assert abs(result.value - expected[order]) < 1e-6
                assert result.extras["ties"] == pytest.approx(tied(on))


@pytest.mark.parametrize("size", [(12, 9), (7, 16)])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_imputed_pixels_are_means_of_their_neighbours(size: tuple[int, int], share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(1, 3, *size, generator=generator, dtype=DOUBLE)
    removed = torch.rand(size, generator=generator) < share
    cells = removed.flatten().nonzero()[:, 0].tolist()
    for result in (factorised(image, removed), iterated(image, removed[None, None])):
        assert torch.equal(result[:, :, ~removed], image[:, :, ~removed])
        assert (result - agreement.imputed(image, cells)).abs().max() < CLOSE
        for channel in range(3):
            assert result[0, channel].min() >= image[0, channel].min() - CLOSE
            assert result[0, channel].max() <= image[0, channel].max() + CLOSE


def test_all_masks_are_imputed_together() -> None:
    generator = torch.Generator().manual_seed(4)
    image = torch.randn(1, 3, 24, 20, generator=generator, dtype=DOUBLE)
    values = torch.rand(24, 20, generator=generator)
    removed = torch.stack([values < share for share in (0.0, 0.2, 0.9, 0.97)])
    expected = torch.cat([factorised(image, mask) for mask in removed])
    assert torch.equal(imputed(image, removed), expected)
    assert (iterated(image, removed[:, None]) - expected).abs().max() < CLOSE


def test_a_ramp_is_imputed_exactly_and_a_flat_image_stays() -> None:
    rows, columns = torch.meshgrid(torch.arange(9.0), torch.arange(8.0), indexing="ij")
    ramp = (2 * rows - 3 * columns).double().expand(1, 3, 9, 8)
    removed = torch.zeros(9, 8, dtype=torch.bool)
    removed[2:6, 1:7] = True
    assert (imputed(ramp, removed[None]) - ramp).abs().max() < CLOSE
    flat = torch.full((1, 3, 9, 8), 0.3, dtype=DOUBLE)
    removed[:] = True
    removed[4, 4] = False
    assert (imputed(flat, removed[None]) - flat).abs().max() < CLOSE


def test_road_knows_order_only() -> None:
    """No factor, offset or monotone change matters; the opposite map exchanges the two orders."""
    of = bench("four_patches")
    for kinds in (PIXEL_KINDS, TOKEN_KINDS):
        maps = of.maps(kinds)
        both, morf, lerf = ([s.value for s in measure("road", of.view, of.images, maps, 1, order=o)] for o in ORDERS)
        for value, most, least in zip(both, morf, lerf, strict=True):
            assert value == pytest.approx((least - most) / 2, abs=CLOSE)
            assert -0.5 <= value <= 0.5
            assert 0 <= most <= 1
        for changed in (3.7 * maps, 1e-9 * maps):
            assert [s.value for s in measure("road", of.view, of.images, changed, 1)] == pytest.approx(both, abs=CLOSE)
        turned = [s.value for s in measure("road", of.view, of.images, -maps, 1)]
        assert turned == pytest.approx([-value for value in both], abs=CLOSE)


def test_the_direction_follows_the_order() -> None:
    assert [build_metric("road", order=order).higher_is_better for order in ORDERS] == [True, False, True]


def test_hierarchical_models_are_measured_too() -> None:
    of = bench("timm_swin")
    for score in measure("road", of.view, of.images, of.maps(TOKEN_KINDS), TARGET):
        assert -0.5 <= score.value <= 0.5


def test_both_orders_of_a_random_map_agree() -> None:
    view = vitrail.load("scenes")
    images = torch.stack([view.preprocess(Image.fromarray(scene.image)) for scene in Scenes(6, seed=12, objects=1)])
    targets = view.module(images).argmax(1).tolist()

    def scores(method: str, **options: int) -> list[float]:
        maps = build_method(method, view, **options).attribute(images, targets)
        return [score.value for score in measure("road", view, images, maps, targets)]

    drawn = np.concatenate([scores("random", seed=seed) for seed in range(5)])
    error = drawn.std() / math.sqrt(len(drawn))
    assert error < 0.05
    assert abs(drawn.mean()) < 3.5 * error
    assert np.mean(scores("decompx.skipplus")) > 0.1
