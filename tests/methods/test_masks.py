"""Mask methods against their literal oracles, given the same randomness, and what their papers promise."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests import helpers
from tests.families import FAMILIES, HIERARCHICAL, few
from tests.helpers import DOUBLE, batch, crossed, relative, viewed
from tests.oracles import atman, hsic, occlusion, pami, rise, score_cam, shapley, tis, vit_cx
from torch import Tensor

from vitrail import VitrailError
from vitrail.engine.kmeans import assign, kmeans, lloyd
from vitrail.engine.requests import Subsets
from vitrail.methods.masking import drawn
from vitrail.methods.occlusion import SmoothMasks
from vitrail.methods.pami import segmentations, shifted
from vitrail.methods.registry import build_method
from vitrail.methods.surrogate import coalitions, dependence, shapley_fit
from vitrail.methods.tis import Tis, mean_score
from vitrail.methods.vit_cx import VitCx, scaled, similarities
from vitrail.models.view import View

TARGET = 3
SOME = ["timm_vit", "timm_vit_avg", "timm_deit_distilled", "timm_dinov3", "timm_siglip", "timm_beit", "hf_dinov2"]


def scorer(view: View, output: str = "probability") -> Callable[[Tensor], Tensor]:
    target = torch.tensor([TARGET])
    return lambda images: view.score(view.logits(images), target.expand(len(images)), None, output).detach()


def explained(name: str, method: str, **params: object) -> Tensor:
    return build_method(method, viewed(name)[2], **params).attribute(batch(name, 1), TARGET)[0]


@pytest.mark.parametrize("name", few([*FAMILIES], 4))
def test_tis_with_every_channel_as_a_mask(name: str) -> None:
    family, module, _ = viewed(name)
    image = batch(name, 1)
    points = tis.features(family, module, image)
    ratios = (0.5, 0.3) if name in SOME else (0.5,)
    masks = tis.all_masks(points, list(ratios))
    expected = tis.tis_map(masks, tis.scores(family, module, image, masks, TARGET, "probability"))
    assert relative(explained(name, "tis", masks=10**6, ratio=ratios).flatten(), expected) < 1e-5


@pytest.mark.parametrize("name", SOME)
def test_tis_with_the_same_centroids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, module, view = viewed(name)
    image = batch(name, 1)
    method = Tis(view, masks=7)
    centroids = method.centroids(helpers.subject(method, image))
    assert centroids.shape == (7, family.patches)
    masks = tis.all_masks(centroids, [0.5])
    for output in ("probability", "logit"):
        expected = tis.tis_map(masks, tis.scores(family, module, image, masks, TARGET, output))
        assert relative(explained(name, "tis", masks=7, output=output).flatten(), expected) < 1e-5
    masks = tis.all_masks(centroids, [0.5, 0.3])
    noises = drawn("uniform", image, slice(0, 14), 0)
    expected = tis.tis_map(masks, tis.pixel_scores(family, module, image, masks, noises, TARGET))
    assert relative(explained(name, "tis", masks=7, ratio=(0.5, 0.3), space="pixels").flatten(), expected) < 1e-5


def test_kmeans_is_the_literal_one() -> None:
    family, module, _ = viewed("timm_vit")
    points = tis.features(family, module, batch("timm_vit", 1))
    first = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:9]]
    assert relative(kmeans(points, 9, seed=0), tis.kmeans(points, first)) < 1e-9
    assert torch.equal(kmeans(points, 9, seed=0), kmeans(points, 9, seed=0))
    assert not torch.equal(kmeans(points, 9, seed=0), kmeans(points, 9, seed=1))


def test_no_cluster_stays_empty() -> None:
    points = torch.cat([torch.zeros(5, 2), torch.ones(5, 2), torch.full((1, 2), 9.0)]).double()
    centroids = lloyd(points, torch.zeros(3, 2, dtype=DOUBLE))  # two of three start empty
    nearest, _ = assign(points, centroids)
    assert len(nearest.unique()) == 3


def test_identities_of_the_mean_score() -> None:
    draw = torch.Generator().manual_seed(0)
    chosen = (torch.rand(40, 9, generator=draw) < 0.5).double()
    scores = torch.rand(40, generator=draw).double()
    values, coverage = mean_score(chosen, scores)
    assert (values >= scores.min()).all()
    assert (values <= scores.max()).all()
    assert torch.allclose((coverage * values).sum(), (chosen.sum(1) * scores).sum())
    twice, _ = mean_score(torch.cat([chosen, chosen]), torch.cat([scores, scores]))
    order = torch.randperm(40, generator=draw)
    shuffled, _ = mean_score(chosen[order], scores[order])
    affine, _ = mean_score(chosen, 2 * scores + 1)
    assert torch.allclose(twice, values)
    assert torch.allclose(shuffled, values)
    assert torch.allclose(affine, 2 * values + 1)
    bare, _ = mean_score(chosen * torch.tensor([0.0] + [1.0] * 8), scores)
    assert torch.allclose(bare[0], scores.mean()), "a token in no mask gets the mean score"


@pytest.mark.parametrize("name", SOME)
def test_all_patches_kept_gives_the_probability_everywhere(name: str) -> None:
    view = viewed(name)[2]
    result = explained(name, "tis", masks=5, ratio=1.0)
    probability = view.probabilities(view.logits(batch(name, 1)))[0, TARGET].detach()
    assert torch.allclose(result, probability.expand_as(result), atol=1e-9)


def test_tis_peaks_at_the_token_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that only looks whether patch 5 is there."""
    sure = 100 * F.one_hot(torch.tensor(TARGET), 4).double()

    def logits(self: Subsets, parts: Any, present: Tensor, keep: Tensor) -> Tensor:
        return torch.where((keep == 5).any(1, keepdim=True), sure, -sure)

    monkeypatch.setattr(Subsets, "logits", logits)
    result = explained("timm_vit", "tis", masks=10**6)
    assert int(result.argmax()) == 5
    assert result.max() > 1 - 1e-9


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_vit_cx_on_hierarchical_features(name: str) -> None:
    view, image = viewed(name)[2], batch(name, 1)
    features = view.features(image)[0].detach()
    masks = vit_cx.masks_of(features, view.size, 0.05)
    plain = vit_cx.scores(scorer(view), image, masks, torch.zeros(len(masks), *image.shape[1:], dtype=DOUBLE))
    result = build_method("vit_cx", view, sigma=0.0).explain(image, TARGET)
    assert int(result.extras["masks"]) == len(masks)
    assert relative(result.map[0], vit_cx.saliency(masks, plain)) < 1e-5


@pytest.mark.parametrize(("name", "layer"), crossed(itertools.product(SOME, ["norm1", "attention"])))
def test_vit_cx_without_noise_is_exact(name: str, layer: str) -> None:
    view, image = viewed(name)[2], batch(name, 1)
    features = helpers.features(view, image, layer)
    for delta in (0.02, 0.1):
        masks = vit_cx.masks_of(features, view.size, delta)
        result = build_method("vit_cx", view, delta=delta, sigma=0.0, layer=layer).attribute(image, TARGET)[0]
        plain = vit_cx.scores(scorer(view), image, masks, torch.zeros(len(masks), *image.shape[1:], dtype=DOUBLE))
        assert relative(result, vit_cx.saliency(masks, plain)) < 1e-5
    for protocol, how in (("authors", "stretched"), ("vit_cx", "mean")):
        whole = vit_cx.masks_of(features, view.size, 0.1, how)
        result = build_method("vit_cx", view, sigma=0.0, layer=layer, protocol=protocol).attribute(image, TARGET)[0]
        plain = vit_cx.scores(scorer(view), image, whole, torch.zeros(len(whole), *image.shape[1:], dtype=DOUBLE))
        assert relative(result, vit_cx.saliency(whole, plain, authors=protocol == "authors")) < 1e-5


def test_vit_cx_by_hand_with_its_own_masks_and_noise() -> None:
    """s_k = p(x⊙M + ε) − p(x + ε) + p(x), the same ε in both terms."""
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    method = VitCx(view, delta=0.05)
    coarse, _ = method.masks(helpers.features(view, image), helpers.subject(method, image))
    masks = F.interpolate(coarse[:, None], size=view.size, mode="bilinear")[:, 0]
    noises = 0.1 * drawn("normal", image, slice(0, len(masks)), 0)
    scores = vit_cx.scores(scorer(view), image, masks, noises)
    assert relative(method.attribute(image, TARGET)[0], vit_cx.saliency(masks, scores)) < 1e-5
    biased = VitCx(view, delta=0.05, pcb=False).attribute(image, TARGET)[0]
    assert relative(biased, vit_cx.saliency(masks, scores, pcb=False)) < 1e-5


def test_fewer_masks_for_a_larger_delta() -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    methods = [build_method("vit_cx", view, delta=delta) for delta in (0.0, 0.02, 0.05, 0.1, 0.3, 1.0, 2.0)]
    counts = [int(method.explain(image, 0).extras["masks"]) for method in methods]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 32
    assert counts[-1] == 1


def test_mask_similarities_on_the_grid_are_those_at_image_size() -> None:
    view = viewed("timm_vit_not_square")[2]
    features = helpers.features(view, batch("timm_vit_not_square", 1), "norm1")
    result = similarities(scaled(features, view.size), view.size)
    expected = 1 - vit_cx.cosine_distances(vit_cx.feature_masks(features, view.size))
    assert (result - expected).abs().max() < 1e-9


def test_variants_of_the_paper_run_and_differ() -> None:
    view, image = viewed("timm_vit")[2], batch("timm_vit", 1)
    maps = [build_method("vit_cx", view, **params).attribute(image, 0) for params in (
        {}, {"cluster": False}, {"debias": False}, {"pcb": False}, {"debias": False, "pcb": False},
    )]  # fmt: skip
    for i, saliency in enumerate(maps):
        assert saliency.isfinite().all()
        assert all(not torch.allclose(saliency, other) for other in maps[:i])


def test_rise_masks_are_the_literal_ones() -> None:
    masks = SmoothMasks(4, 5, 0.4, torch.zeros(24, 32, dtype=DOUBLE), seed=3)
    for i, result in enumerate(masks(slice(0, 4))):
        offset = (int(masks.offsets[0][i]), int(masks.offsets[1][i]))
        assert (result - rise.rise_mask(masks.grids[i], offset, (24, 32))).abs().max() < 1e-6
    many = SmoothMasks(400, 7, 0.3, torch.zeros(28, 28, dtype=DOUBLE), seed=0)
    assert abs(float(many(slice(0, 400)).mean()) - 0.3) < 0.02
    assert torch.equal(many(slice(7, 9)), many(slice(0, 20))[7:9]), "a mask does not depend on its chunk"
    assert torch.equal(
        SmoothMasks(2, 1, 1.0, torch.zeros(8, 8, dtype=DOUBLE), seed=0)(slice(0, 2)), torch.ones(2, 8, 8, dtype=DOUBLE)
    )


@pytest.mark.parametrize("name", [*SOME, "timm_swin", "hf_swinv2"])
def test_rise_is_its_literal_definition(name: str) -> None:
    view, image = viewed(name)[2], batch(name, 1)
    for ratio, params in ((0.25, {}), (0.25, {"output": "logit"}), (0.5, {"ratio": 0.5})):
        masks = SmoothMasks(6, 4, ratio, torch.zeros(view.size, dtype=DOUBLE), seed=0)(slice(0, 6))
        expected = rise.rise_map(scorer(view, params.get("output", "probability")), image, masks.to(DOUBLE), ratio)
        result = build_method("rise", view, masks=6, cells=4, **params).attribute(image, TARGET)[0]
        assert relative(result, expected) < 1e-5


@pytest.mark.parametrize("name", SOME)
def test_rise_by_tokens(name: str) -> None:
    family, module, _ = viewed(name)
    image = batch(name, 1)
    masks = torch.rand((9, family.patches), generator=torch.Generator().manual_seed(0)) < 0.25
    expected = rise.token_rise(family, module, image, masks, 0.25, TARGET)
    assert relative(explained(name, "rise", masks=9, space="tokens"), expected) < 1e-5


@pytest.mark.parametrize("name", [*SOME, "torchvision_swin"])
def test_occlusion_is_its_literal_definition(name: str) -> None:
    view, image = viewed(name)[2], batch(name, 1)
    scale = 2 if "swin" in name else 1  # a larger image
    for window, stride, baseline in ((8 * scale, 8 * scale, 0.0), (10 * scale, 7 * scale, 0.3)):
        expected = occlusion.occlusion_map(scorer(view), image, (window, window), (stride, stride), baseline)
        method = build_method("occlusion", view, window=window, stride=stride, baseline=baseline)
        assert relative(method.attribute(image, TARGET)[0], expected) < 1e-5


@pytest.mark.parametrize("name", SOME)
def test_occlusion_by_tokens(name: str) -> None:
    family, module, _ = viewed(name)
    image = batch(name, 1)
    for window, stride in ((1, 1), (2, 1)):
        expected = occlusion.token_occlusion(family, module, image, (window, window), (stride, stride), TARGET)
        assert relative(explained(name, "occlusion", window=window, stride=stride, space="tokens"), expected) < 1e-5


@pytest.mark.parametrize("name", [*SOME, "timm_swin", "torchvision_swinv2", "hf_swin"])
def test_score_cam_is_its_literal_definition(name: str) -> None:
    view, image = viewed(name)[2], batch(name, 1)
    features = helpers.features(view, image, "norm1")
    for output, params in (("logit", {}), ("probability", {"output": "probability"})):
        expected = score_cam.eq1(scorer(view, output), image, features)
        assert relative(build_method("score_cam", view, **params).attribute(image, TARGET)[0], expected) < 1e-5
    expected = score_cam.library(scorer(view, "logit"), image, features)
    result = build_method("score_cam", view, variant="library").attribute(image, TARGET)[0]
    assert float((result - expected).abs().max()) < 1e-5


ATMAN = ((0.1, 0.6), (0.3, None), (0.05, 0.1))


@pytest.mark.parametrize(("name", "params"), crossed(itertools.product(FAMILIES, ATMAN)))
def test_atman_is_its_literal_definition(name: str, params: tuple[float, float | None]) -> None:
    family, module, _ = viewed(name)
    expected = atman.atman(family, module, batch(name, 1), TARGET, *params)
    factor, threshold = params
    assert relative(explained(name, "atman", factor=factor, threshold=threshold), expected) < 1e-5


@pytest.mark.parametrize("name", SOME)
def test_atman_that_suppresses_nothing_is_zero(name: str) -> None:
    assert explained(name, "atman", factor=1.0, threshold=None).abs().max() < 1e-9


def literal_scores(name: str, present: Tensor, output: str, space: str, baseline: float) -> Tensor:
    """Of sets of patches: those that are absent painted by hand, or hidden from every query."""
    family, module, _ = viewed(name)
    image = batch(name, 1)
    if space == "tokens":
        return tis.scores(family, module, image, present, TARGET, output)
    paint = torch.full((len(present), *image.shape[1:]), baseline, dtype=DOUBLE)
    return tis.pixel_scores(family, module, image, present, paint, TARGET, output)


@pytest.mark.parametrize(
    ("name", "removal"), crossed(itertools.product(SOME, [("pixels", 0.0), ("pixels", 0.7), ("tokens", 0.0)]))
)
def test_fits_are_the_literal_least_squares(name: str, removal: tuple[str, float]) -> None:
    """In token space the empty set of a head that pools patches is the mean-colour image."""
    view, image = viewed(name)[2], batch(name, 1)
    players, how = view.grid[0] * view.grid[1], dict(zip(("space", "baseline"), removal, strict=True))
    outputs = (("logit", {}), ("probability", {"output": "probability"}))
    present = torch.rand((60, players), generator=torch.Generator().manual_seed(0)) < 0.5
    for output, params in outputs:
        fit = build_method("lime", view, samples=60, sigma=0.4, ridge=0.5, **params, **how)
        expected, _ = shapley.lime(present, literal_scores(name, present, output, **how), 0.4, 0.5)
        assert relative(fit.attribute(image, TARGET)[0].flatten(), expected) < 1e-6
    fit = build_method("kernel_shap", view, samples=80, **how)
    present = coalitions(80, players, 0)
    ends = torch.tensor([[False] * players, [True] * players])
    empty, full, *scores = literal_scores(name, torch.cat([ends, present]), "probability", **how)
    expected = shapley.kernel_shap(present, torch.stack(scores), float(empty), float(full), torch.ones(80))
    result = fit.explain(image, TARGET)
    assert relative(result.map[0].flatten(), expected) < 1e-6
    assert float(result.extras["completeness_gap"]) < 1e-9
    present = torch.quasirandom.SobolEngine(players, scramble=True, seed=0).draw(40) < 0.5
    for output, params in outputs:
        fit = build_method("hsic", view, samples=40, **params, **how)
        expected = hsic.hsic(present.double(), literal_scores(name, present, output, **how))
        assert relative(fit.attribute(image, TARGET)[0].flatten(), expected) < 1e-6


def test_kernel_shap_of_all_coalitions_is_exact() -> None:
    """Efficiency, symmetry, dummy: a game of six players, two alike, one without effect."""

    def value(row: Tensor) -> float:
        a, b, c, d, e, _ = row.double().tolist()
        return 2 * a + 3 * b * c + d * e + a * d * e

    every = shapley.subsets(6)[1:-1]
    sizes = every.sum(1)
    copies = [round(6000 * shapley.shapley_kernel(6, int(s))) for s in sizes]
    present = every.repeat_interleave(torch.tensor(copies), dim=0)
    scores = torch.tensor([value(row) for row in present], dtype=DOUBLE)
    full = torch.tensor(value(torch.ones(6)), dtype=DOUBLE)
    result = shapley_fit(present, scores, torch.tensor(0.0, dtype=DOUBLE), full)
    assert (result - shapley.exact(value, 6)).abs().max() < 1e-3
    assert abs(float(result[5])) < 1e-3
    assert torch.allclose(result[3], result[4], atol=1e-3)
    assert torch.allclose(result.sum(), full)


def test_coalitions_come_in_opposite_pairs_with_kernel_sizes() -> None:
    drawn_sets = coalitions(4000, 8, 0)
    assert torch.equal(drawn_sets[0::2], ~drawn_sets[1::2])
    sizes = torch.bincount(drawn_sets.sum(1), minlength=9)[1:8] / 4000
    odds = torch.tensor([1 / (s * (8 - s)) for s in range(1, 8)])
    assert (sizes - odds / odds.sum()).abs().max() < 0.03


def test_a_dead_cell_has_no_dependence() -> None:
    present = torch.quasirandom.SobolEngine(6, scramble=True, seed=1).draw(512) < 0.5
    scores = present[:, 0].double() + 0.5 * present[:, 1].double() + 0.2
    result = dependence(present, scores)
    assert int(result.argmax()) == 0
    assert result[2:].max() < 0.02 * result[0]
    assert dependence(present, torch.zeros(512).double()).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("timm_vit", {}),
        ("hf_dinov2", {"shifts": (24,), "background": "black"}),
        pytest.param("timm_swin", {"background": "white"}, marks=pytest.mark.full),
    ],
)
def test_pami_is_its_literal_definition(name: str, params: dict[str, Any]) -> None:
    view, image = viewed(name)[2], batch(name, 1)
    method = build_method("pami", view, **params)
    pixels = np.asarray(view.preprocessing.denormalise(image[0]))
    maps = [torch.from_numpy(labels) for labels in segmentations(pixels, method.shifts or ())]
    expected = pami.pami(scorer(view), image, maps, method.rest(image))
    result = method.explain(image, TARGET)
    assert relative(result.map[0], expected) < 1e-9
    assert len(maps) == 20 * (1 + 4 * len(method.shifts or ()))
    assert result.map.max() <= 1


def test_shifted_regions_leave_nothing_behind() -> None:
    labels = np.arange(12).reshape(3, 4)
    assert shifted(labels, 1, 0).tolist() == [[-1] * 4, [0, 1, 2, 3], [4, 5, 6, 7]]
    assert shifted(labels, 0, -2).tolist() == [[2, 3, -1, -1], [6, 7, -1, -1], [10, 11, -1, -1]]


def test_pami_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "skimage.segmentation", None)
    with pytest.raises(VitrailError, match=r"vitrail\[data\]"):
        explained("timm_vit", "pami")
