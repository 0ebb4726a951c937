"""The mask oracles against identities, against captum, scipy and torch, and against the networks themselves."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from tests.families import FAMILIES, Family, build, expected_logits, images
from tests.oracles import atman, hsic, occlusion, pami, posterior, rise, score_cam, shapley, tis, vit_cx, vit_shapley
from tests.oracles.attention import softmax
from tests.oracles.masked_forward import masked_logits
from tests.oracles.recipe import describe
from torch import Tensor, nn

SIZE = (12, 16)
DTYPE = torch.float64
every_family = pytest.mark.parametrize("name", FAMILIES)
some_families = pytest.mark.parametrize("name", ["timm_vit", "timm_deit_distilled", "timm_siglip", "timm_vit_avgmax"])


@functools.cache
def case(name: str) -> tuple[Family, nn.Module, Tensor]:
    return FAMILIES[name], build(name, DTYPE), images(name, 1, dtype=DTYPE)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=rng(seed), dtype=DTYPE)


def random_masks(count: int, patches: int, seed: int = 0) -> Tensor:
    return torch.rand(count, patches, generator=rng(seed)) < 0.5


def toy(seed: int = 5) -> Callable[[Tensor], Tensor]:
    """A smooth classifier of small images that is not linear: the probability of its first class of three."""
    first, second = randn(8, 3 * SIZE[0] * SIZE[1], seed=seed) / 10, randn(3, 8, seed=seed + 1)
    return lambda x: softmax((x.flatten(1) @ first.T).tanh() @ second.T)[:, 0]


def constant(value: float) -> Callable[[Tensor], Tensor]:
    return lambda images: torch.full((len(images),), value, dtype=DTYPE)


def picture(seed: int = 0) -> Tensor:
    return randn(1, 3, *SIZE, seed=seed)


def close(a: Tensor, b: Tensor | float | list[float], atol: float = 1e-10) -> None:
    expected = b if isinstance(b, Tensor) else torch.tensor(b, dtype=DTYPE).expand(a.shape)
    torch.testing.assert_close(a, expected, atol=atol, rtol=0, check_dtype=False)


@every_family
def test_tis_features_are_the_outputs_of_the_blocks(name: str) -> None:
    family, module, x = case(name)
    X = tis.features(family, module, x)
    recipe = describe(family, module, x)
    assert X.shape == (len(recipe.blocks) * recipe.tokens.shape[-1], family.patches)
    if family.library != "hf":
        recorded: list[Tensor] = []
        paths = [path for path, _ in module.named_modules()]
        blocks = module.get_submodule(next(p for p in ("blocks", "encoder.blocks", "encoder.layers") if p in paths))
        handles = [block.register_forward_hook(lambda _, __, out: recorded.append(out)) for block in blocks]
        expected_logits(family, module, x)
        for handle in handles:
            handle.remove()
        recorded += recorded[-1:] * (len(recipe.blocks) - len(recorded))  # class attention leaves patches as they are
        close(X, torch.cat([out[0, -family.patches :].T for out in recorded]).detach())


@every_family
def test_tis_with_every_patch_is_the_probability(name: str) -> None:
    family, module, x = case(name)
    masks = torch.ones(2, family.patches, dtype=torch.bool)
    logits = expected_logits(family, module, x)
    for output, expected in (("probability", softmax(logits)), ("logit", logits)):
        scores = tis.scores(family, module, x, masks, 3, output)
        close(tis.tis_map(masks, scores), expected[0, 3].item())


@some_families
def test_tis_invariants(name: str) -> None:
    family, module, x = case(name)
    X = tis.features(family, module, x)
    chosen = X[torch.randperm(len(X), generator=rng())[:6]]
    centroids = tis.kmeans(X, chosen)
    kept = tis.kept_count(0.5, family.patches)
    masks = tis.binarise(centroids, kept)
    assert (masks.sum(dim=1) == kept).all()
    assert all(row[mask].min() >= row[~mask].max() for row, mask in zip(centroids, masks, strict=True))
    w = tis.scores(family, module, x, masks, 1)
    S = tis.tis_map(masks, w)
    assert w.min() - 1e-12 <= S.min() <= S.max() <= w.max() + 1e-12
    covered = masks.any(dim=0)
    close((masks.sum(dim=0) * S)[covered].sum(), kept * w.sum())
    close(tis.tis_map(torch.cat([masks, masks]), torch.cat([w, w])), S)
    close(tis.tis_map(masks.flip(0), w.flip(0)), S)
    close(tis.tis_map(masks, 3 * w - 2), 3 * S - 2)
    close(tis.min_max(S).max(), 1.0)
    close(tis.tis(family, module, x, chosen, [0.5], 1), S.view(family.grid))


def test_tis_several_ratios_and_uncovered_tokens() -> None:
    centroids = randn(5, 10)
    masks = tis.all_masks(centroids, [0.5, 0.29])
    assert masks.sum(dim=1).tolist() == [5] * 5 + [2] * 5
    masks, w = torch.tensor([[1, 1, 0], [0, 1, 0]], dtype=torch.bool), torch.tensor([0.2, 0.6], dtype=DTYPE)
    close(tis.tis_map(masks, w), [0.2, 0.4, 0.4])
    assert tis.min_max(torch.full((3,), 0.7)).tolist() == [0, 0, 0]
    masks = random_masks(40, 12)  # a model that answers "is token 7 there?"
    assert tis.tis_map(masks, masks[:, 7].to(DTYPE)).argmax() == 7


def test_kmeans_fixed_points_ties_and_empty_clusters() -> None:
    X = torch.cat([randn(6, 3), randn(6, 3, seed=1) + 20])
    centroids = tis.kmeans(X, X[[0, 1]])
    close(centroids.sort(dim=0).values, torch.stack([X[:6].mean(dim=0), X[6:].mean(dim=0)]).sort(dim=0).values)
    close(tis.kmeans(X, centroids), centroids)
    assert tis.assign(X[:1], X[[0, 0]]) == [0]
    start = torch.cat([centroids, torch.full((1, 3), 1e4, dtype=DTYPE)])
    close(tis.kmeans(X, start, empty="zero", iterations=1)[2], 0.0)
    close(tis.kmeans(X, start, empty="keep")[2], 1e4)
    close(tis.kmeans(X, X), X)
    assert tis.binarise(torch.zeros(1, 4), 2).tolist() == [[True, True, False, False]]


@some_families
def test_tis_in_pixels(name: str) -> None:
    family, module, x = case(name)
    noises = torch.rand(2, *x.shape[1:], generator=rng(), dtype=DTYPE)
    everything = torch.ones(1, family.patches, dtype=torch.bool)
    probability = softmax(expected_logits(family, module, x))[:, 2]
    close(tis.pixel_scores(family, module, x, everything, noises[:1], 2), probability)
    mask = random_masks(1, family.patches)
    enlarged = nn.functional.interpolate(mask.view(1, 1, *family.grid).to(DTYPE), family.image_size)
    painted = softmax(expected_logits(family, module, x * enlarged + noises[1:] * (1 - enlarged)))[:, 2]
    close(tis.pixel_scores(family, module, x, mask, noises[1:], 2), painted)


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(12, 16), (7, 5), (3, 9)])
def test_bilinear_is_torch_s(corners: bool, size: tuple[int, int]) -> None:
    maps = randn(2, 3, 4)
    expected = nn.functional.interpolate(maps[None], size, mode="bilinear", align_corners=corners)[0]
    close(vit_cx.bilinear(maps, size, corners), expected)


def test_vit_cx_masks() -> None:
    features = randn(10, 3, 4)
    features[4] = 7.0
    masks = vit_cx.feature_masks(features, SIZE)
    assert len(masks) == 9
    close(masks.amin(dim=(1, 2)), 0.0)
    close(masks.amax(dim=(1, 2)), 1.0)
    distances = vit_cx.cosine_distances(masks)
    counts = [len(vit_cx.clusters(distances, delta)) for delta in (0.0, 0.05, 0.1, 0.2, 0.4, 2.0)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[-1]) == (9, 1)
    authors = vit_cx.masks_of(features, SIZE, 0.2, "stretched")
    close(torch.stack([authors.amin(dim=(1, 2)), 1 - authors.amax(dim=(1, 2))]), 0.0, atol=0)


@pytest.mark.parametrize("delta", [0.05, 0.1, 0.2, 0.3, 0.4])
def test_complete_linkage_is_scipy_s(delta: float) -> None:
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    distances = vit_cx.cosine_distances(vit_cx.feature_masks(randn(24, 3, 4, seed=3), SIZE))
    symmetric = (distances + distances.T) / 2
    symmetric.fill_diagonal_(0)
    labels = fcluster(linkage(squareform(symmetric.numpy(), checks=False), "complete"), delta, "distance").tolist()
    groups = [[i for i in range(24) if labels[i] == label] for label in sorted(set(labels), key=labels.index)]
    assert vit_cx.clusters(distances, delta) == groups
    for group in groups:
        assert all(distances[i, j] < delta for i in group for j in group if i != j)


def test_a_merge_needs_a_distance_below_delta() -> None:
    distances = torch.tensor([[0.0, 0.25, 0.9], [0.25, 0.0, 0.5], [0.9, 0.5, 0.0]], dtype=DTYPE)
    assert vit_cx.clusters(distances, 0.25) == [[0], [1], [2]]
    assert vit_cx.clusters(distances, 0.26) == [[0, 1], [2]]
    assert vit_cx.clusters(distances, 0.9) == [[0, 1], [2]]


def test_vit_cx_scores() -> None:
    p, x = toy(), picture()
    masks = vit_cx.feature_masks(randn(4, 3, 4), SIZE)
    noises = 0.1 * randn(4, 3, *SIZE, seed=8)
    plain = vit_cx.scores(p, x, masks, debias=False)
    close(vit_cx.scores(p, x, masks, torch.zeros_like(noises)), plain)
    close(vit_cx.scores(p, x, torch.ones_like(masks), noises), p(x).expand(4))
    assert not torch.allclose(vit_cx.scores(p, x, masks, noises), plain)
    close(plain, p(torch.cat([x * mask for mask in masks])))
    pair: list[Tensor] = []
    vit_cx.scores(lambda images: (pair.append(images), p(images))[1], x, masks[:1], noises[:1])
    close(pair[0] - x * masks[0], pair[1] - x)


def test_vit_cx_map() -> None:
    p, x, features = toy(), picture(), randn(12, 3, 4)
    masks = vit_cx.masks_of(features, SIZE, 0.2)
    noises = 0.1 * randn(len(masks), 3, *SIZE, seed=8)
    s = vit_cx.scores(p, x, masks, noises)
    S = vit_cx.vit_cx(p, x, features, noises, 0.2)
    assert s.min() - 1e-12 <= S.min() <= S.max() <= s.max() + 1e-12
    close(vit_cx.saliency(masks, s, authors=True) * len(masks), S)
    close(vit_cx.vit_cx(p, x, features, noises, 0.2, pcb=False), S * masks.sum(dim=0))
    close(vit_cx.vit_cx(constant(0.3), x, features, noises, 0.2), 0.3)
    from_random_masks = vit_cx.vit_cx(p, x, features, None, debias=False, random_masks=masks)
    close(from_random_masks, vit_cx.vit_cx(p, x, features, None, 0.2, debias=False))
    hole = masks.clone()
    hole[:, 2, 3] = 0
    close(vit_cx.saliency(hole, s)[2, 3], 0.0, atol=0)


def test_rise_masks_mirror_as_scipy_does() -> None:
    from scipy.ndimage import map_coordinates

    grid = torch.rand(3, 3, generator=rng(), dtype=DTYPE)
    for offset in ((0, 0), (2, 3), (3, 4)):  # cells of 4 × 5 pixels
        rows, columns = torch.arange(11) + offset[0], torch.arange(14) + offset[1]
        places = torch.meshgrid((rows + 0.5) * 3 / 16 - 0.5, (columns + 0.5) * 3 / 20 - 0.5, indexing="ij")
        expected = map_coordinates(grid.numpy(), torch.stack(places).double().numpy(), order=1, mode="mirror")
        close(rise.rise_mask(grid, offset, (11, 14)), torch.from_numpy(expected), atol=1e-6)


def test_rise_mask_statistics_and_map() -> None:
    generator, p1, masks = rng(), 0.3, []
    for _ in range(60):
        grid = (torch.rand(4, 4, generator=generator) < p1).to(DTYPE)
        offset = torch.randint(0, 4, (2,), generator=generator).tolist()
        masks.append(rise.rise_mask(grid, (offset[0], offset[1]), SIZE))
    masks = torch.stack(masks)
    assert 0 <= masks.min() <= masks.max() <= 1
    assert abs(masks.mean() - p1) < 0.05
    close(rise.rise_map(constant(0.4), picture(), masks, p1), 0.4 * masks.mean(dim=0) / p1)


@every_family
def test_token_rise(name: str) -> None:
    family, module, x = case(name)
    masks = random_masks(3, family.patches)
    masks[1] = False
    expected = torch.zeros(family.patches, dtype=DTYPE)
    for mask in masks[[0, 2]]:
        probability = softmax(masked_logits(family, module, x, mask.nonzero().T))[0, 2]
        expected += probability * mask / (3 * 0.5)
    close(rise.token_rise(family, module, x, masks, 0.5, 2).flatten(), expected)


@pytest.mark.parametrize(("window", "stride"), [((4, 4), (4, 4)), ((5, 6), (3, 4)), ((12, 16), (1, 1))])
def test_occlusion_is_captum_s(window: tuple[int, int], stride: tuple[int, int]) -> None:
    from captum.attr import Occlusion

    p, x = toy(), picture()
    captum = Occlusion(p).attribute(x, (3, *window), strides=(3, *stride), baselines=0.25)
    close(occlusion.occlusion_map(p, x, window, stride, 0.25), captum[0, 0], atol=1e-6)


def test_occlusion_of_an_additive_model() -> None:
    weights, x = randn(3, *SIZE, seed=2), picture()
    drops = occlusion.occlusion_map(lambda images: (images * weights).sum(dim=(1, 2, 3)), x, (4, 4), (4, 4), 0.5)
    close(drops[::4, ::4], ((x[0] - 0.5) * weights).sum(dim=0).view(3, 4, 4, 4).sum(dim=(1, 3)))


@some_families
def test_token_occlusion(name: str) -> None:
    family, module, x = case(name)
    result = occlusion.token_occlusion(family, module, x, (1, 1), (1, 1), 2)
    present = torch.arange(family.patches) != 5
    full = softmax(expected_logits(family, module, x))[0, 2]
    removed = softmax(masked_logits(family, module, x, present.nonzero().T))[0, 2]
    close(result.flatten()[5], full - removed)
    everything = occlusion.token_occlusion(family, module, x, family.grid, (1, 1), 2)
    assert everything.max() - everything.min() < 1e-12


def test_score_cam() -> None:
    p, x, features = toy(), picture(), randn(6, 3, 4)
    masks = vit_cx.feature_masks(features, SIZE)
    close(score_cam.eq1(constant(0.3), x, features), 0.3 * masks.sum(dim=0))
    variant = vit_cx.vit_cx(p, x, features, None, clustering=False, debias=False)
    close(score_cam.eq1(p, x, features) / masks.sum(dim=0), variant)
    close(score_cam.library_weights(constant(0.3), x, features), 1 / 6)
    close(score_cam.library_weights(p, x, features).sum(), 1.0)
    result = score_cam.library(p, x, features)
    assert (result.shape, result.min()) == (SIZE, 0)
    assert abs(result.max() - 1) < 1e-5


@every_family
def test_atman_without_suppression_is_the_network(name: str) -> None:
    family, module, x = case(name)
    recipe = describe(family, module, x)
    logits = atman.suppressed_logits(recipe, torch.ones(family.tokens, dtype=DTYPE))
    close(logits.detach(), expected_logits(family, module, x))


@some_families
def test_atman_of_a_network(name: str) -> None:
    family, module, x = case(name)
    close(atman.atman(family, module, x, 2, factor=1.0, threshold=0.1), 0.0)
    alone = atman.atman(family, module, x, 2, factor=0.1)
    assert alone.abs().max() > 1e-4
    close(atman.atman(family, module, x, 2, factor=0.1, threshold=1.1), alone)
    assert not torch.allclose(atman.atman(family, module, x, 2, factor=0.1, threshold=0.0), alone, atol=1e-6)


def test_atman_factors() -> None:
    tokens = torch.tensor([[9.0, 9.0], [1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]], dtype=DTYPE)
    near = 0.9 * (1 - math.sqrt(0.5)) + 0.1
    close(atman.token_factors(tokens, 1, 0, 0.1, 0.6), [1, 0.1, near, 1])
    close(atman.token_factors(tokens, 1, 0, 0.1, -2.0), [1, 0.1, near, 1])
    close(atman.token_factors(tokens, 1, 0, 0.1, None), [1, 0.1, 1, 1])
    scores, factors = torch.tensor([[[-3, -1, 1], [1, 1, 0.1]]], dtype=DTYPE)[0]
    close(atman.suppress(scores, factors), [0.0, 2.0, 0.4])


def game(coalition: Tensor) -> float:
    """Players 0 and 1 are alike, player 4 does nothing."""
    a, b, c, d, _ = (float(entry) for entry in coalition)
    return 0.5 + a * b + 2 * c + math.sin(a + b + 3 * d) - 0.7 * c * d * (a + b)


def test_shapley_values_and_kernel_shap() -> None:
    phi, full = shapley.exact(game, 5), game(torch.ones(5))
    close(torch.stack([phi.sum(), phi[0] - phi[1], phi[4]]), [full - 0.5, 0.0, 0.0])
    close(shapley.exact(lambda s: 3 * float(s[0]) - float(s[1]) + 1, 3), [3.0, -1.0, 0.0])
    coalitions = shapley.subsets(5)
    values = torch.tensor([game(row) for row in coalitions], dtype=DTYPE)
    close(shapley.kernel_shap(coalitions, values, 0.5, full), phi)
    some = torch.cat([coalitions[3:15], ~coalitions[3:15]])
    sampled = shapley.kernel_shap(some, torch.tensor([game(row) for row in some]), 0.5, full, torch.ones(24))
    close(sampled.sum(), full - 0.5)


@some_families
def test_kernel_shap_of_a_network(name: str) -> None:
    """Four players: the patches in four groups."""
    family, module, x = case(name)
    group = torch.arange(family.patches) % 4

    def value(coalition: Tensor) -> float:
        return tis.scores(family, module, x, coalition[group][None], 2, "logit").item()

    coalitions = shapley.subsets(4)
    values = torch.tensor([value(row) for row in coalitions], dtype=DTYPE)
    close(shapley.kernel_shap(coalitions, values, values[0].item(), values[-1].item()), shapley.exact(value, 4), 1e-9)


def test_lime() -> None:
    samples = random_masks(30, 5)
    samples[:2] = torch.tensor([[True], [False]])
    weights = shapley.lime_weights(samples)
    close(weights[:2], [1.0, math.exp(-16)])
    slopes = torch.tensor([1.0, -2.0, 0.0, 0.5, 3.0], dtype=DTYPE)
    values = samples.to(DTYPE) @ slopes + 4
    computed, intercept = shapley.lime(samples, values, ridge=0.0)
    close(computed, slopes)
    assert intercept == pytest.approx(4)
    shrunk, _ = shapley.lime(samples, values, ridge=1.0)
    assert shrunk.norm() < slopes.norm()
    root = weights.sqrt()[:, None]
    z = torch.cat([samples.to(DTYPE), torch.ones(30, 1, dtype=DTYPE)], dim=1) * root
    penalty = torch.eye(5, 6, dtype=DTYPE)
    stacked = torch.linalg.lstsq(torch.cat([z, penalty]), torch.cat([values[:, None] * root, torch.zeros(5, 1)]))
    close(stacked.solution[:5, 0], shrunk)


def test_hsic() -> None:
    designs = shapley.subsets(5).to(DTYPE)
    outputs = 0.2 + 0.5 * designs[:, 0] + 0.2 * designs[:, 1] * designs[:, 2]
    scores = hsic.hsic(designs, outputs)
    assert scores.argmax() == 0
    assert scores[1] > 1e-4
    close(scores[1], scores[2])
    close(scores[3:], 0.0, atol=1e-12)
    close(hsic.hsic(designs, torch.zeros(32)), 0.0)
    assert hsic.bandwidth(torch.tensor([0.1, 0.4, 0.2, 0.9])) == pytest.approx(0.3)
    assert hsic.bandwidth(torch.tensor([0.0, 0.0, 1.0])) == 1
    designs = random_masks(80, 6).to(DTYPE)
    scores = hsic.hsic(designs, 0.1 + designs[:, 2] * 0.8)
    assert scores[2] > 10 * scores[[0, 1, 3, 4, 5]].max()
    assert scores.min() > -1e-12


def test_pami() -> None:
    p, x, background = toy(), picture(), picture(3)
    halves = (torch.arange(SIZE[1]) >= 6).long().expand(SIZE)
    rows = torch.arange(SIZE[0])[:, None].expand(SIZE) // 4
    result = pami.pami(p, x, [halves, rows], background)
    left = p(torch.where(halves == 0, x, background))[0]
    top = p(torch.where(rows == 0, x, background))[0]
    close(result[0, 0], (left + top) / 2)
    assert 0 <= result.min() <= result.max() <= 1
    close(pami.pami(p, x, [torch.zeros_like(rows)], background), p(x).expand(SIZE))
    close(pami.pami(p, x, [torch.where(rows == 0, -1, rows)], background)[:4], 0.0, atol=0)


def test_posterior_is_the_conditional_of_one_large_gaussian() -> None:
    """Trend and effects together, the trend with a variance so large that it is all but free."""
    subsets, y = random_masks(30, 9), randn(30)
    K = posterior.kernel(randn(9, 5), 3, 2.0)
    close(K, K.T)
    close(K.diagonal(), 1.0)
    assert torch.linalg.eigvalsh(K).min() > 0.04
    fitted, free = posterior.conditioned(subsets, y, K, 0.7), 1e7
    X = torch.cat([posterior.trend_columns(subsets), subsets.to(DTYPE)], dim=1)
    prior = torch.block_diag(free * torch.eye(3, dtype=DTYPE), K)
    gain = prior @ X.T @ torch.linalg.inv(X @ prior @ X.T + 0.7 * torch.eye(30, dtype=DTYPE))
    close(gain @ y, torch.cat([fitted.trend, fitted.effects]), atol=1e-4)
    close((prior - gain @ X @ prior)[3:, 3:] * fitted.variance, fitted.covariance, atol=1e-4)


def test_posterior_smooths_without_changing_the_sum() -> None:
    S = posterior.smoother(12, 4, 0.7)
    close(S.sum(dim=0), 1.0)
    assert (S.diagonal() == S.max(dim=0).values).all()
    close(posterior.smoother(12, 4, 0.0), torch.eye(12, dtype=DTYPE))
    assert posterior.squared_distance(0, 11, 4) == 2**2 + 3**2


def test_the_block_of_an_explainer_is_that_of_torch() -> None:
    block = nn.TransformerEncoderLayer(64, 2, 96, 0.0, "gelu", batch_first=True, norm_first=True, dtype=DTYPE)
    tensors = {
        f"b.{name}": randn(*tensor.shape, seed=i) / 4 for i, (name, tensor) in enumerate(block.state_dict().items())
    }
    block.load_state_dict({name.removeprefix("b."): tensor for name, tensor in tensors.items()})
    x = randn(2, 7, 64)
    close(vit_shapley.run_block(tensors, "b", x), block(x).detach())


def test_directions_of_classes() -> None:
    weight = randn(4, 6)
    rows = vit_shapley.directions([weight, weight + 1])
    close(rows.norm(dim=1), 1.0)
    close(rows, vit_shapley.directions([3 * weight + randn(6)]))
    single = vit_shapley.directions([weight[:1]])
    close(single[0], -single[1])
    close(single[1] * weight[0].norm(), weight[0])
    logits = randn(3, 1)
    close(vit_shapley.probabilities(logits, "softmax").sum(dim=1), 1.0)
    close(vit_shapley.probabilities(randn(3, 4), "softmax"), softmax(randn(3, 4)))
