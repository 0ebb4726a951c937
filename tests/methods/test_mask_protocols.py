"""Protocols, variants, randomness and limits of the mask methods."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from tests import helpers
from tests.families import FAMILIES, images
from tests.helpers import DOUBLE, batch, refusals, relative, viewed
from tests.oracles import pami, rise, tis, vit_cx
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.engine.requests import Pictures
from vitrail.methods.masking import drawn
from vitrail.methods.occlusion import SmoothMasks
from vitrail.methods.pami import segmentations
from vitrail.methods.registry import build_method
from vitrail.methods.tis import Tis
from vitrail.methods.vit_cx import VitCx, divided, mean_similarity, scaled, similarities
from vitrail.models.view import View

TARGET = 3


def scorer(view: View, output: str = "probability") -> Callable[[Tensor], Tensor]:
    target = torch.tensor([TARGET])
    return lambda images: view.score(view.logits(images), target.expand(len(images)), None, output).detach()


def explained(name: str, method: str, **params: object) -> Tensor:
    return build_method(method, viewed(name)[2], **params).attribute(batch(name, 1), TARGET)[0]


def literal_map(view: View, image: Tensor, masks: Tensor, sigma: float = 0.0, **how: bool) -> Tensor:
    """ViT-CX with the noise of seed 0."""
    noises = sigma * drawn("normal", image, slice(0, len(masks)), 0)
    return vit_cx.saliency(masks, vit_cx.scores(scorer(view), image, masks, noises), **how)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_avg", "timm_vit_not_square", "timm_swin", "hf_swinv2"])
def test_a_pixel_that_no_mask_covers_is_zero(name: str, dtype: torch.dtype) -> None:
    """One mask that reaches 0 somewhere: there is a hole."""
    view, image = viewed(name)[2], batch(name, 1)
    masks = vit_cx.masks_of(helpers.features(view, image, "norm1"), view.size, 2.0)
    expected = literal_map(view, image, masks, authors=True)
    method = build_method("vit_cx", viewed(name, dtype)[2], delta=2.0, sigma=0.0, protocol="authors")
    result = method.attribute(batch(name, 1, dtype), TARGET)[0]
    assert len(masks) == 1
    assert torch.equal(result == 0, masks[0] == 0)
    assert relative(result, expected) < (1e-9 if dtype == DOUBLE else 1e-4)


@pytest.mark.parametrize(("grid", "size"), [((14, 14), (224, 224)), ((7, 9), (70, 90)), ((16, 16), (300, 224))])
def test_single_precision_finds_the_same_holes(grid: tuple[int, int], size: tuple[int, int]) -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        maps = torch.randn(1, *grid, generator=draw)
        single, double = (scaled(maps.to(dtype), size) for dtype in (torch.float32, DOUBLE))
        holes = divided(double[0], double, size) == 0
        assert holes.any()
        assert torch.equal(divided(single[0], single, size) == 0, holes)


def test_random_masks_are_the_second_variant_and_holes_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    for count in (1, 40):
        monkeypatch.setattr("vitrail.methods.vit_cx.RANDOM_MASKS", count)
        grids = torch.rand((count, *view.grid), generator=torch.Generator().manual_seed(0)) < 0.5
        masks = vit_cx.bilinear(grids.double(), view.size)
        result = build_method("vit_cx", view, source="random").explain(image, TARGET)
        assert (count == 1) == bool((result.map == 0).any())
        assert relative(result.map[0], literal_map(view, image, masks, 0.1)) < 1e-5
        assert int(result.extras["masks"]) == count


def test_masks_of_ones_give_the_probability_whatever_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    monkeypatch.setattr(VitCx, "random_grids", lambda self, grid, image: torch.ones(3, *view.grid, dtype=DOUBLE))
    result = build_method("vit_cx", view, source="random", sigma=5.0).attribute(image, TARGET)
    assert (result - scorer(view)(image)).abs().max() < 1e-12


@pytest.mark.parametrize("how", ["average", "single"])
def test_other_linkages_are_those_of_scipy(how: str) -> None:
    view, image, delta = viewed("timm_vit")[2], batch("timm_vit", 1), 0.1
    masks = vit_cx.feature_masks(helpers.features(view, image, "norm1"), view.size)
    distances = vit_cx.cosine_distances(masks)
    distances = ((distances + distances.T) / 2).fill_diagonal_(0)
    labels = fcluster(linkage(squareform(distances.numpy(), checks=False), how), delta, "distance")
    groups = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)]
    assert len(groups) < len(vit_cx.clusters(distances, delta)), "it must differ from complete linkage"
    result = build_method("vit_cx", view, linkage=how, delta=delta, sigma=0.0).attribute(image, TARGET)[0]
    assert relative(result, literal_map(view, image, vit_cx.cluster_masks(masks, groups))) < 1e-9


def test_without_coverage_correction_the_map_is_a_sum_which_the_authors_divide() -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    features = helpers.features(view, image, "norm1")
    for protocol, how in (("default", "stretched"), ("vit_cx", "mean"), ("authors", "stretched")):
        masks = vit_cx.masks_of(features, view.size, 0.1, how)
        result = build_method("vit_cx", view, sigma=0.0, pcb=False, protocol=protocol).attribute(image, TARGET)[0]
        assert relative(result, literal_map(view, image, masks, pcb=False, authors=protocol == "authors")) < 1e-9


def test_a_large_offset_of_a_feature_map_costs_no_precision() -> None:
    maps = torch.randn(24, 14, 14, generator=torch.Generator().manual_seed(0))
    maps[:12] += 3000
    exact = similarities(scaled(maps.double(), (224, 224)), (224, 224))
    assert (similarities(scaled(maps, (224, 224)), (224, 224)) - exact).abs().max() < 1e-5
    constant = torch.full_like(maps[:1], 0.1)
    assert len(scaled(torch.cat([maps, constant]), (224, 224))) == 24, "a constant map masks nothing"
    with pytest.raises(VitrailError, match="constant"):
        scaled(constant, (224, 224))


def test_similarity_is_that_of_pairs_of_two_maps() -> None:
    similarity = torch.tensor([[1.0, 0.1, 0.2], [0.1, 1.0, 0.6], [0.2, 0.6, 1.0]])
    assert float(mean_similarity(similarity)) == pytest.approx((0.1 + 0.2 + 0.6) / 3)
    assert float(mean_similarity(torch.ones(1, 1))) == 1


@pytest.mark.parametrize("gamma", [1e-2, 1e-3, 1e-4])
def test_single_precision_finds_the_same_masks_where_maps_hardly_vary(gamma: float) -> None:
    result = []
    for dtype in (torch.float32, DOUBLE):
        module = FAMILIES["timm_vit"].build(dtype)
        with torch.no_grad():
            module.blocks[-1].norm1.weight[:8] = gamma
            module.blocks[-1].norm1.bias[:8] = 1.0
        result.append(build_method("vit_cx", vitrail.wrap(module)).explain(images("timm_vit", 1, dtype=dtype), TARGET))
    single, double = result
    assert int(single.extras["masks"]) == int(double.extras["masks"])
    assert abs(float(single.extras["mask_similarity"] - double.extras["mask_similarity"])) < 1e-5
    assert relative(single.map, double.map) < 1e-4


def centroids(method: Tis, image: Tensor) -> Tensor:
    return method.centroids(helpers.subject(method, image))


@pytest.mark.parametrize("protocol", ["authors", "tis"])
def test_tis_of_the_authors_ends_with_min_max(protocol: str) -> None:
    family, module, view = viewed("timm_vit")
    image = batch("timm_vit", 1)
    masks = tis.all_masks(centroids(Tis(view, masks=7), image), [0.5])
    expected = tis.min_max(tis.tis_map(masks, tis.scores(family, module, image, masks, TARGET)))
    assert relative(explained("timm_vit", "tis", masks=7, protocol=protocol).flatten(), expected) < 1e-5


def test_kmeans_runs_only_where_there_are_more_channels_than_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    family, module, view = viewed("timm_vit")
    image = batch("timm_vit", 1)
    points = tis.features(family, module, image)
    calls: list[int] = []

    def kmeans(points: Tensor, clusters: int, seed: int) -> Tensor:
        calls.append(clusters)
        return points[:clusters]

    monkeypatch.setattr("vitrail.methods.tis.kmeans", kmeans)
    for masks in (len(points), len(points) + 1):
        assert relative(centroids(Tis(view, masks=masks), image), points) < 1e-9
    assert calls == []
    assert len(centroids(Tis(view, masks=len(points) - 1), image)) == len(points) - 1
    assert calls == [len(points) - 1]


@pytest.mark.parametrize(
    ("protocol", "output"), [("tis", "logit"), ("authors", "probability"), ("rise", "probability")]
)
def test_protocols_of_rise(protocol: str, output: str) -> None:
    """A tenth of the cells kept; all images of a run share their masks."""
    view, pictures = viewed("timm_vit")[2], batch("timm_vit", 2)
    masks = SmoothMasks(6, 8, 0.1, pictures, seed=0)(slice(0, 6))
    result = build_method("rise", view, masks=6, protocol=protocol).attribute(pictures, TARGET)
    for saliency, image in zip(result, pictures.split(1), strict=True):
        assert relative(saliency, rise.rise_map(scorer(view, output), image, masks, 0.1)) < 1e-5


def test_how_many_masks_the_protocols_of_rise_take(monkeypatch: pytest.MonkeyPatch) -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    recorded: list[int] = []

    def logits(self: Pictures, parts: Any, images: Tensor) -> Tensor:
        recorded.append(len(images))
        return torch.zeros(len(images), view.num_outputs)

    monkeypatch.setattr(Pictures, "logits", logits)
    for protocol, count in (("default", 4000), ("authors", 6000), ("rise", 6000), ("tis", 4000)):
        recorded.clear()
        result = build_method("rise", view, protocol=protocol).explain(image, TARGET)
        assert int(result.extras["masks"]) == sum(recorded) == count


def test_pami_of_the_authors_moves_its_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, scales in (("FELZENSZWALB", ()), ("SLIC", (10,)), ("WATERSHED", ())):
        monkeypatch.setattr(f"vitrail.methods.pami.{name}", scales)
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    method = build_method("pami", view, protocol="authors")
    maps = [*segmentations(np.asarray(view.preprocessing.denormalise(image[0])), (24, 30, 36))]
    expected = pami.pami(scorer(view), image, [torch.from_numpy(labels) for labels in maps], method.rest(image))
    assert len(maps) == 13
    assert relative(method.attribute(image, TARGET)[0], expected) < 1e-9
    assert relative(explained("timm_vit", "pami"), expected) > 1e-3


SEEDED: dict[str, dict[str, Any]] = {
    "tis": {"masks": 7}, "vit_cx": {}, "rise": {"masks": 20}, "lime": {"samples": 40}, "kernel_shap": {"samples": 40},
    "hsic": {"samples": 40}, "posterior": {"masks": 20}, "shapley": {"permutations": 4},
}  # fmt: skip


@pytest.mark.parametrize("method", [*SEEDED, "pami"])
def test_a_seed_decides_the_map_to_the_last_bit(method: str) -> None:
    params = SEEDED.get(method, {})
    first = explained("timm_vit", method, **params)
    assert torch.equal(first, explained("timm_vit", method, **params))
    if method in SEEDED:
        assert torch.equal(first, explained("timm_vit", method, seed=0, **params))
        assert relative(explained("timm_vit", method, seed=1, **params), first) > 1e-5


def test_wrong_parameters_are_told() -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    swin, pixels = viewed("timm_swin")[2], batch("timm_swin", 1)
    for call, message in (
        (lambda: build_method("tis", view, ratio=0.0).attribute(image), "ratio"),
        (lambda: build_method("tis", view, ratio=1.5).attribute(image), "ratio"),
        (lambda: build_method("tis", view, masks=0).attribute(image), "masks"),
        (lambda: build_method("vit_cx", view, delta=-1.0).attribute(image), "delta"),
        (lambda: build_method("rise", view, ratio=2.0).attribute(image), "ratio"),
        (lambda: build_method("rise", view, masks=0).attribute(image), "masks"),
        (lambda: build_method("occlusion", view, window=999).attribute(image), "window"),
        (lambda: build_method("occlusion", view, window=0).attribute(image), "window"),
        (lambda: build_method("occlusion", view, window=2, stride=5, space="tokens").attribute(image), "stride"),
        (lambda: build_method("lime", view, sigma=0.0).attribute(image), "sigma"),
        (lambda: build_method("atman", view, factor=-1.0).attribute(image), "factor"),
        (lambda: build_method("atman", view, output="logit"), "no parameter output"),
        (lambda: build_method("hsic", view, cells=3, space="tokens").attribute(image), "cells"),
        (lambda: build_method("tis", view, ratio=math.nan).attribute(image), "ratio"),
        (lambda: build_method("tis", view, seed=2**64), "seed"),
        (lambda: build_method("vit_cx", view, delta=math.nan).attribute(image), "delta"),
        (lambda: build_method("vit_cx", view, sigma=math.nan).attribute(image), "sigma"),
        (lambda: build_method("lime", view, sigma=math.nan).attribute(image), "sigma"),
        (lambda: build_method("atman", view, factor=math.nan).attribute(image), "factor"),
        (lambda: build_method("pami", view, shifts=(300,)).attribute(image), "shifts"),
        (lambda: build_method("pami", view, shifts=(223,)).attribute(image), "shifts"),
        (lambda: build_method("hsic", view, cells=200).attribute(image), "21201 cells"),
        (lambda: build_method("rise", view, space="tokens", cells=5).attribute(image), "cells"),
        (lambda: build_method("lime", view, space="tokens", baseline=1.0).attribute(image), "baseline"),
        (lambda: build_method("kernel_shap", view, space="tokens", baseline=1.0).attribute(image), "baseline"),
        (lambda: build_method("occlusion", view, space="tokens", baseline=1.0).attribute(image), "baseline"),
        (lambda: build_method("vit_cx", swin, layer="attention").attribute(pixels), "layer"),
        (lambda: build_method("score_cam", swin, layer="attention").attribute(pixels), "layer"),
        (lambda: build_method("tis", swin), "no fixed tokens"),
        (lambda: build_method("posterior", swin), "no fixed tokens"),
        (lambda: build_method("rise", swin, space="tokens", masks=2).attribute(pixels), "needs tokens"),
    ):
        with pytest.raises(VitrailError, match=message):
            call()
    assert ("tis", "hierarchical") in refusals()
