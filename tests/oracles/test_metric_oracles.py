"""The metric oracles against hand-computed cases and against other libraries, those of them that are installed."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy
import torch
import torchvision
from captum import metrics as captum
from tests.oracles import agreement, curves, localization, quality
from torch import Tensor
from torch.nn.functional import interpolate
from torchmetrics.functional.classification import binary_average_precision, binary_jaccard_index
from torchmetrics.functional.image import structural_similarity_index_measure

DTYPE = torch.float64
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = (6, 10)
PIXELS = SIZE[0] * SIZE[1]
ONES, ZEROS = torch.ones(1, 3, *SIZE, dtype=DTYPE), torch.zeros(1, 3, *SIZE, dtype=DTYPE)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(seed: int = 0, size: tuple[int, int] = SIZE) -> Tensor:
    return torch.from_numpy(rng(seed).normal(size=(1, 3, *size)))


def tied_map(seed: int = 0, size: tuple[int, int] = SIZE, levels: int = 5) -> np.ndarray:
    return rng(seed).integers(0, levels, size).astype(np.float64)


def mask(seed: int = 0, size: tuple[int, int] = SIZE, share: float = 0.3) -> np.ndarray:
    return rng(seed).random(size) < share


def toy(x: Tensor) -> Tensor:
    """Logits of three classes from a small smooth network."""
    first, second = rng(7).normal(size=(8, 3 * PIXELS)) / 10, rng(8).normal(size=(3, 8))
    return (x.flatten(1) @ torch.from_numpy(first).T).tanh() @ torch.from_numpy(second).T


def toy_probabilities(x: Tensor) -> Tensor:
    return toy(x).softmax(dim=1)


def brightness(x: Tensor) -> Tensor:
    """Class 0: the mean of all values, class 1 the rest."""
    mean = x.flatten(1).mean(dim=1)
    return torch.stack([mean, 1 - mean], dim=1)


def same(a: Any, b: Any, atol: float = 1e-10) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, atol=atol, rtol=0)


def same_curve(result: curves.Curve, points: Any, value: float) -> None:
    same([*result[0], result[1]], [*points, value])


def test_order_and_ties() -> None:
    assert curves.order([[1, 3], [3, 2]], [3, 2, 1, 0]) == [2, 1, 3, 0]
    assert curves.order([[1, 3], [3, 2]]) == [1, 2, 3, 0]
    assert curves.order(-np.array([1.0, 3, 3, 2]), [3, 2, 1, 0]) == [0, 3, 2, 1]
    tie = rng().permutation(PIXELS)
    for sign in ("positive", "negative"):
        assert curves.ranked(np.zeros(PIXELS), tie, sign) == np.argsort(tie).tolist()


@pytest.mark.parametrize("size", [(12, 20), (7, 5), (13, 4), (6, 10), (1, 1)])
def test_sizes_as_torch(size: tuple[int, int]) -> None:
    small = rng().normal(size=(4, 5))
    tensor = torch.from_numpy(small)[None, None]
    same(curves.bilinear(small, size), interpolate(tensor, size, mode="bilinear", align_corners=False)[0, 0])
    same(curves.nearest(small, size), interpolate(tensor, size, mode="nearest-exact")[0, 0])
    same(curves.nearest(small, (12, 20)), np.kron(small, np.ones((3, 4))))


def test_kernels_and_blurs() -> None:
    rise, gaussian = curves.rise_kernel(), curves.gaussian_kernel()
    same(rise, scipy.ndimage.gaussian_filter(np.pad([[1.0]], 5), 5))
    same([rise[5, 5], rise[0, 0], gaussian[5, 5], gaussian[0, 0]], [0.00883, 0.00774, 0.01196, 0.00440], 5e-6)
    assert [curves.mirrored(i, 4) for i in range(-4, 8)] == [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]
    x = picture(size=(9, 14))
    expected = torchvision.transforms.functional.gaussian_blur(x, [11, 11], [5.0, 5.0])
    same(curves.blurred(x, gaussian, "reflect"), expected, 1e-7)
    kernels = torch.from_numpy(rise).expand(3, 1, 11, 11)
    same(curves.rise_baseline(x, "insertion"), torch.nn.functional.conv2d(x, kernels, padding=5, groups=3))
    assert (curves.rise_baseline(x, "deletion") == 0).all()
    ramp, three = np.arange(30.0).reshape(5, 6), np.ones((3, 3))
    for padding, around in (("reflect", np.pad(ramp, 1, mode="reflect")), ("zeros", np.pad(ramp, 1))):
        same(curves.convolved(ramp, three, padding), scipy.signal.correlate2d(around, three, mode="valid"))


def test_baselines() -> None:
    x, noise = picture(size=(8, 9)), torch.from_numpy(rng(3).random((1, 3, 8, 9)))
    baselines = {kind: curves.baseline(x, kind, MEAN, STD, noise) for kind in ("mean", "black", "blur", "random")}
    for c in range(3):
        same(baselines["black"][0, c], np.full((8, 9), -MEAN[c] / STD[c]))
        same(baselines["mean"][0, c], x[0, c].mean().expand(8, 9))
        same(baselines["random"][0, c] * STD[c] + MEAN[c], noise[0, c])
    same(baselines["blur"], curves.tis_baseline(x, "blur"))
    same(curves.tis_baseline(x, "random", noise), noise)
    same(curves.tis_baseline(x, "black"), 0 * x)
    same(curves.tis_baseline(x, "mean"), x.mean().expand(x.shape))
    same(curves.normalised(curves.denormalised(x, MEAN, STD), MEAN, STD), x)


def test_counts() -> None:
    assert (curves.default_counts(10, 4), curves.default_counts(3, 50)) == ([0, 2, 5, 7, 10], [0, 1, 2, 3])
    assert (curves.tis_counts(10, 4), curves.tis_counts(10, 6)) == ([3, 6, 9, 10], [2, 4, 6, 8, 10, 10])
    assert curves.rise_counts(10, 4) == [0, 4, 8, 10]
    assert curves.level_counts(30) == [0, 1, 3, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22, 24, 25, 27, 28, 30]
    assert curves.token_counts(196) == [19, 39, 58, 78, 98, 117, 137, 156, 176]


def test_a_linear_model_has_a_linear_curve() -> None:
    run = functools.partial(curves.insertion_deletion, brightness, ONES, ZEROS, tied_map(), 0)
    same_curve(run(kind="deletion", steps=4), [1, 0.75, 0.5, 0.25, 0], 0.5)
    same_curve(run(kind="insertion", steps=4), [0, 0.25, 0.5, 0.75, 1], 0.5)
    same_curve(run(steps=4, protocol="tis"), [0.75, 0.5, 0.25, 0], 0.375)
    same_curve(run(steps=25, protocol="rise"), [1, 35 / 60, 10 / 60, 0], (0.5 + 35 / 60 + 10 / 60) / 3)
    same_curve(curves.aopc(brightness, ONES, ZEROS, tied_map(), 0), np.linspace(0, 1, 21), 0.5)
    assert (ONES == 1).all()


def test_curves_of_three_pixels() -> None:
    """They weigh 4, 2 and 1; deleted from the left, inserted from the right."""
    x, weights = torch.ones(1, 3, 1, 3, dtype=DTYPE), torch.tensor([4.0, 2, 1], dtype=DTYPE)

    def model(images: Tensor) -> Tensor:
        return (images[:, 0, 0] @ weights / 7)[:, None]

    deleted = curves.insertion_deletion(model, x, 0 * x, [[3, 2, 1]], 0, steps=3)
    same_curve(deleted, [1, 3 / 7, 1 / 7, 0], (0.5 + 3 / 7 + 1 / 7) / 3)
    inserted = curves.insertion_deletion(model, x, 0 * x, [[0, 0, 0]], 0, tie=[2, 1, 0], kind="insertion", steps=9)
    same_curve(inserted, [0, 1 / 7, 3 / 7, 1], (1 / 7 + 3 / 7 + 0.5) / 3)
    drops = [0.0] * 7 + [4 / 7] * 7 + [6 / 7] * 6 + [1]
    same_curve(curves.aopc(model, x, 0 * x, [[3, 2, 1]], 0), drops, (7 * 4 + 6 * 6 + 7) / 7 / 21)


def test_insertion_mirrors_the_deletion_of_the_negated_map() -> None:
    x, other, values = picture(), picture(1), rng(5).normal(size=SIZE)
    inserted, a = curves.insertion_deletion(toy_probabilities, x, other, values, 1, kind="insertion", steps=10)
    deleted, b = curves.insertion_deletion(toy_probabilities, x, other, -values, 1, kind="deletion", steps=10)
    same([*inserted, a], [*deleted[::-1], b])
    same([inserted[-1], deleted[-1]], [toy_probabilities(x)[0, 1], toy_probabilities(other)[0, 1]])
    rise = curves.insertion_deletion(toy_probabilities, x, other, values, 1, kind="insertion", steps=6, protocol="rise")
    same_curve(rise, inserted, np.trapezoid(inserted, np.linspace(0, 1, 11)))


def test_perturbation_accuracy() -> None:
    """Half of a white image decides: class 0 while its left half has a mean of at least a half."""

    def model(images: Tensor) -> Tensor:
        left = images[:, 0, :, : SIZE[1] // 2].flatten(1).mean(dim=1)
        return torch.stack([left, torch.full_like(left, 0.49)], dim=1)

    values = np.tile(np.arange(10.0)[::-1], (6, 1))  # columns from the left
    run = functools.partial(curves.perturbation, model, ONES, ZEROS, values)
    same_curve(run(0), [1] * 6 + [0] * 15, 0.275)  # 25 %: 15 pixels, half of the left half
    same_curve(run(0, sign="negative"), [1] * 16 + [0] * 5, 0.775)
    same_curve(run(1), [0] * 6 + [1] * 15, 0.725)
    run = functools.partial(curves.chefer_perturbation, model, ONES, ZEROS, values)
    same_curve(run(0), [1] * 2 + [0] * 7, 0.15)
    same_curve(run(0, sign="negative"), [1] * 7 + [0] * 2, 0.65)


def test_log_odds() -> None:
    x, other, values = picture(), picture(1), tied_map()
    odds = curves.log_odds(toy, x, other, values, 2)
    drops, _ = curves.aopc(toy_probabilities, x, other, values, 2)
    changes = [math.log(1 - drop / float(toy_probabilities(x)[0, 2])) for drop in drops]
    same_curve(odds, changes, sum(changes) / 21)
    far = curves.log_odds(lambda images: 1e5 * toy(images), x, other, values, 2)[0]
    expected = (1e5 * toy(other)).log_softmax(1)[0, 2] - (1e5 * toy(x)).log_softmax(1)[0, 2]
    assert far[-1] == pytest.approx(float(expected))
    assert all(map(math.isfinite, far))


def test_token_curves() -> None:
    """Twenty patches; the logit of class 0 counts the kept patches below 10, that of class 1 is 4.5."""
    recorded: list[list[int]] = []

    def encode(kept: list[int]) -> Tensor:
        recorded.append(kept)
        return torch.tensor([sum(i < 10 for i in kept), 4.5], dtype=DTYPE)

    def p(count: int) -> float:
        return 1 / (1 + math.exp(4.5 - count))

    run = functools.partial(curves.token_curve, encode, np.arange(20.0)[::-1], 0)  # patch 0 first
    same_curve(run(), [1] * 3 + [0] * 7, 0.25 / 0.9)  # 10, 8, 6, 4 … of the patches are left
    assert recorded[2] == list(range(2, 20))
    same_curve(run(kind="insertion"), [0] * 2 + [1] * 8, 0.75 / 0.9)
    assert recorded[-1] == list(range(20))
    same([run(kind=kind, protocol="skipplus")[1] for kind in ("deletion", "insertion")], [75, 75])
    left = {"deletion": [10, 8, 6, 4, 2, 0, 0, 0, 0, 0], "insertion": [2, 4, 6, 8, 10, 10, 10, 10, 10, 10]}
    for kind, counts in left.items():
        drops = [p(10) - p(count) for count in counts]
        area = np.trapezoid(drops, dx=0.1)
        same_curve(run(kind=kind, reading="aopc"), drops, area / 0.9)
        turned = 100 * area if kind == "deletion" else 100 - 100 * area
        same_curve(run(kind=kind, reading="aopc", protocol="skipplus"), drops, turned)
    curves.token_curve(encode, np.zeros(20), 0, tie=list(range(20))[::-1])
    assert recorded[-9] == list(range(18))


def test_pointing_game() -> None:
    values, truth = np.zeros((5, 6)), np.zeros((5, 6), dtype=bool)
    values[1, 1] = values[3, 4] = 1
    truth[4, 5] = True
    game, tie = localization.pointing_game, np.arange(30)[::-1]
    assert (localization.maximum(values), localization.maximum(values, tie)) == ((1, 1), (3, 4))
    assert [game(values, truth, tie, tolerance) for tolerance in (0, 1, 1.41, 1.42, 2)] == [False] * 3 + [True] * 2
    assert [game(values, truth, None, tolerance) for tolerance in (4, 5)] == [False, True]  # 3-4-5
    truth[3, 4] = True
    assert (game(values, truth, tie), game(values, truth), game(values, 0 * truth)) == (True, False, False)
    half = np.arange(30).reshape(5, 6) < 15
    assert (game(values, half), game(values, half, max_area=0.51)) == (None, True)


def test_energy_and_discriminativity() -> None:
    own, other = np.array([[1, 1, 0, 0]], dtype=bool), np.array([[0, 0, 1, 0]], dtype=bool)
    energy, split = localization.energy_pointing_game, localization.discriminativity
    cases = [[[1, 2, 3, 5]], [[-1, 2, 3, 5]], [[1] * 4], [[-1] * 4], [[0] * 4]]
    same([energy(values, own) for values in cases], [1 / 7, 0.2, 0, 0, 0])  # the first: masses 0 1 2 4
    same([energy(values, own, "tis") for values in cases], [3 / 11, 3 / 11, 0.5, 0.5, 0])
    cases = [[[1, 4, 3, 2]], [[1, 2, 3, 5]], [[2, 2, 2, 5]], [[5, 5, 5, 0]]]
    same(
        [split(values, own, other, [2, 1, 0, 3]) for values in cases],
        [(0.6, True), (1 / 3, False), (0.5, False), (2 / 3, False)],
    )


def test_segmentation_by_hand_and_as_torchmetrics() -> None:
    values, truth = [[0, 1], [2, 9]], [[0, 0], [1, 1]]  # mean 3: only the last pixel is foreground
    constant, nothing = np.full((2, 2), 7.0), np.zeros((2, 2))
    assert localization.foreground(values).tolist() == [[False, False], [False, True]]
    assert localization.areas(localization.foreground(values), truth) == (3, 4, [2, 1], [3, 2])
    same(localization.segmentation_over([values], [truth]), [0.75, (2 / 3 + 1 / 2) / 2])
    assert not localization.foreground(constant).any()
    assert localization.mean_iou(constant, nothing) == 0.5  # no foreground anywhere: its IoU is 0
    same(localization.segmentation_over([values, constant], [truth, nothing]), [7 / 8, (6 / 7 + 1 / 2) / 2])
    for seed in range(3):
        values, truth = tied_map(seed), mask(seed + 10)
        predicted, target = torch.from_numpy(localization.foreground(values)).int(), torch.from_numpy(truth).int()
        both = binary_jaccard_index(predicted, target), binary_jaccard_index(1 - predicted, 1 - target)
        same(localization.mean_iou(values, truth), sum(both) / 2, 1e-6)
        assert localization.pixel_accuracy(values, truth) == (predicted == target).double().mean().item()


@pytest.mark.parametrize("levels", [1, 2, 5, 1000])
def test_average_precision_as_others(levels: int) -> None:
    values, truth = tied_map(1, levels=levels).ravel() / 1000, mask(2).ravel()
    scaled = localization.min_max(values)
    scores, labels = np.concatenate([1 - scaled, scaled]), np.concatenate([~truth, truth])
    ours, both = localization.segmentation_ap(values, truth), localization.mean_ap(values, truth)
    assert localization.segmentation_ap(np.exp(3 * values), truth) == ours
    same(ours, binary_average_precision(torch.from_numpy(values), torch.from_numpy(truth).int()), 1e-6)
    same(both, binary_average_precision(torch.from_numpy(scores), torch.from_numpy(labels).int()), 1e-6)
    sklearn = pytest.importorskip("sklearn.metrics")
    same(ours, sklearn.average_precision_score(truth, values))
    same(both, sklearn.average_precision_score(labels, scores))


def test_average_precision_by_hand() -> None:
    same(localization.average_precision([4, 3, 2, 1], [1, 0, 1, 0]), 0.5 + 0.5 * 2 / 3)
    assert localization.average_precision([2, 2, 1, 1], [1, 0, 1, 0]) == 0.5
    assert localization.average_precision([1, 2], [0, 0]) is None
    assert localization.mean_ap([[0, 1]], [[0, 1]]) == 1
    values, truth, ignore = [[5, 4, 3, 2]], [[1, 1, 0, 1]], [[1, 0, 0, 1]]
    ap = functools.partial(localization.segmentation_ap, values, truth)
    same([ap(), ap(ignore), ap(ignore, "skipplus")], [11 / 12, 1, 0.5])


@pytest.mark.parametrize("seed", range(4))
def test_components_as_scipy(seed: int) -> None:
    region = mask(seed, (12, 15), 0.35)
    labels, count = scipy.ndimage.label(region, structure=np.ones((3, 3)))
    regions = localization.components(region)
    assert len(regions) == count
    for number, pixels in enumerate(regions, start=1):
        assert sorted(pixels) == [tuple(pixel) for pixel in np.argwhere(labels == number).tolist()]
    measure = pytest.importorskip("skimage.measure")
    properties = measure.regionprops(measure.label(region, connectivity=2))
    top, left, bottom, right = max(properties, key=lambda p: p.area).bbox
    assert localization.predicted_box(region, 0.5) == (left, top, right, bottom)


def test_boxes() -> None:
    values = np.array([[0, 0, 0, 0, 9], [9, 0, 0, 8, 0], [9, 0, 0, 0, 1], [0, 0, 3, 0, 0]])
    box = localization.predicted_box  # at 0.5 two components have two pixels: the first
    assert [box(values, t) for t in (0, 0.5, 1)] == [(0, 0, 5, 4), (3, 0, 5, 2), (0, 1, 1, 3)]
    assert [box(np.ones((2, 2)), t) for t in (0, 0.1)] == [(0, 0, 2, 2), None]
    truths = [(0, 0, 1, 4), (3, 0, 5, 3)]
    localise = functools.partial(localization.box_localization, values, truths, 0.5)
    same(
        [localise(0.6, 3, 3), localise(0.7, 3, 3), localise(0.6, 3, 4)],
        [(2 / 3, True, True), (2 / 3, False, False), (2 / 3, True, False)],
    )
    assert localization.box_localization(np.ones((4, 5)), truths, 0.5) == (0, False, False)
    boxes = [(x, y, x + w, y + h) for x, y, w, h in itertools.product((0, 2), (0, 1), (2, 3), (1, 4))]
    tensor = torch.tensor(boxes).double()
    same([[localization.box_iou(a, b) for b in boxes] for a in boxes], torchvision.ops.box_iou(tensor, tensor))


def test_max_box_acc() -> None:
    """Above 0.4 the first box is exact, from 0.01 to 0.3 the second: no threshold serves both at δ = 0.7."""
    first, second = np.zeros((4, 8)), np.zeros((4, 8))
    first[:, :4], second[:, 4:] = 0.4, 0.3
    first[:2, :2], second[:, 4:6] = 1, 1
    maps, boxes = [first, second], [[(0, 0, 2, 2)], [(4, 0, 8, 4)]]
    assert [localization.best_iou(first, boxes[0], t) for t in (0, 0.4, 0.41)] == [1 / 8, 1 / 4, 1]
    assert [localization.best_iou(second, boxes[1], t) for t in (0, 0.3, 0.31)] == [1 / 2, 1, 1 / 2]
    assert localization.max_box_acc(maps, boxes) == (pytest.approx(2.5 / 3), [1, 1, 0.5])


def test_gini() -> None:
    one_hot = np.eye(1, 20, 13) * 3
    same([quality.gini(one_hot), quality.gini(one_hot - 1), quality.gini(one_hot, "tis")], [0.95] * 3, 1e-5)
    same([quality.gini(np.full(9, k), protocol) for k in (-1, 0, 1) for protocol in ("default", "tis")], [0] * 6)
    same(quality.gini(np.arange(100000)), 1 / 3, 1e-4)
    values = rng().random(30) + 1
    same(quality.gini(values), sum(abs(a - b) for a in values for b in values) / (2 * 30**2 * values.mean()))
    same(quality.gini(values, "tis"), quality.gini(values - values.min() + 1e-7))
    assert quality.gini(values, "tis") > quality.gini(values)


def test_max_sensitivity_as_captum() -> None:
    x, noises = picture(), torch.from_numpy(rng(1).uniform(-0.02, 0.02, (5, 3, *SIZE)))

    def explain(images: Tensor) -> Tensor:
        return images.sin().sum(dim=1) ** 2

    options = {"perturb_func": lambda images: (images + noises,), "n_perturb_samples": 5}
    theirs = captum.sensitivity_max(lambda images: (explain(images[0]),), x, **options)
    same(quality.max_sensitivity(explain, x, noises), theirs[0])
    assert quality.max_sensitivity(torch.zeros_like, x, noises) == 0
    same(quality.max_sensitivity(lambda images: images - x, x, noises[:1]), noises[0].norm())
    same(quality.max_sensitivity(lambda images: 3 * images, x, [x, -2 * x]), 2)


@pytest.mark.parametrize("normalise", [False, True])
def test_infidelity_as_captum(normalise: bool) -> None:
    x, attribution, weights = picture(), picture(1) / 10, picture(3)
    samples = torch.from_numpy(rng(2).normal(size=(6, 3, *SIZE)))

    def linear(images: Tensor) -> Tensor:
        return (images * weights).flatten(1).sum(dim=1)

    options = {"target": 1, "n_perturb_samples": 6, "normalize": normalise}
    theirs = captum.infidelity(toy, lambda images: (samples, images - samples), x, attribution, **options)
    same(quality.infidelity(lambda images: toy(images)[:, 1], attribution, x, samples, normalise), theirs[0])
    squares = float(linear(samples).square().mean())
    expected = [squares, 0, 0 if normalise else squares]
    same([quality.infidelity(linear, k * weights, x, samples, normalise) for k in range(3)], expected)


@pytest.mark.parametrize("levels", [2, 6, 1000])
def test_rank_correlation_as_scipy(levels: int) -> None:
    a, b = tied_map(1, levels=levels), tied_map(2, levels=levels)
    same(quality.ranks(a), scipy.stats.rankdata(a))
    same(quality.rank_correlation(a, b), scipy.stats.spearmanr(a.ravel(), b.ravel()).statistic)
    same([quality.rank_correlation(a, other) for other in (a**3, -a, np.ones_like(a))], [1, -1, 0])


def test_ssim_as_others() -> None:
    a, b = rng(1).normal(size=(2, 16, 21))
    b += a
    low, high = localization.min_max(a), localization.min_max(b)
    tensors = [torch.from_numpy(values)[None, None] for values in (low, high)]
    same(quality.ssim(a, b), structural_similarity_index_measure(*tensors, data_range=1.0))
    same([quality.ssim(a, 3 * a + 2), quality.ssim(b, a)], [1, quality.ssim(a, b)])
    assert quality.ssim(np.ones((8, 8)), np.zeros((8, 8))) == pytest.approx(1)
    skimage = pytest.importorskip("skimage.metrics")
    options = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1, "full": True}
    mean, image = skimage.structural_similarity(low, high, **options)
    inner = quality.ssim_image(low, high)[5:-5, 5:-5]  # scikit-image treats the edges otherwise, and leaves them out
    same(inner, image[5:-5, 5:-5])
    same(inner.mean(), mean)


def additive(weights: list[float]) -> agreement.Score:
    """The score is the sum of the weights of the cells that are there."""
    return lambda removed: sum(weight for cell, weight in enumerate(weights) if cell not in removed)


def test_saco_by_hand() -> None:
    """Groups of two with saliences 9, 5, 1 (means) and falls 3, 7, 1: one of three pairs is in the wrong order."""
    values, score = [10, 8, 6, 4, 2, 0], additive([1, 2, 3, 4, 1, 0])
    same(agreement.saco(score, values, 3), (8 + 4 - 4) / 16)
    same(agreement.saco(score, [-value for value in values], 3), -(8 + 4 - 4) / 16)
    same([agreement.saco(additive(w), values, 3) for w in (values, values[::-1])], [1, -1])
    same(agreement.saco(score, [[2, 2, 2], [2, 2, 2]], 3), 0)
    same(agreement.saco(score, [0, 5, 5, 0, 0, 0], 99), 0.5)  # both lose against the cell that weighs 4, of four each


def test_idsds_as_scipy() -> None:
    weights, values = rng(1).normal(size=12), tied_map(2, (3, 4))
    expected = scipy.stats.spearmanr(values.ravel(), weights).statistic
    same(agreement.idsds(additive(weights.tolist()), values), expected)
    same([agreement.idsds(additive(weights.tolist()), sign * weights) for sign in (1, -1)], [1, -1])


def test_faithfulness_correlation_as_numpy() -> None:
    weights, values = rng(1).normal(size=20), rng(2).normal(size=(4, 5))
    subsets = [rng(seed).permutation(20)[:4].tolist() for seed in range(30)]
    sums, falls = values.ravel()[subsets].sum(1), weights[subsets].sum(1)
    faithful = functools.partial(agreement.faithfulness_correlation, subsets=subsets)
    same(faithful(additive(weights.tolist()), values), np.corrcoef(sums, falls)[0, 1])
    same([faithful(additive(weights.tolist()), k * weights) for k in (2, -1, 0)], [1, -1, 0])


def test_cells_of_a_grid() -> None:
    values = rng().normal(size=(6, 10))
    for grid in ((3, 5), (4, 7), (8, 14)):
        tensor = torch.from_numpy(values)[None]
        same(agreement.cell_means(values, grid), torch.nn.functional.adaptive_avg_pool2d(tensor, grid)[0])
    assert agreement.pixels_of([1, 2], (2, 2), (4, 4)) == [2, 3, 6, 7, 8, 9, 12, 13]
    x, score = picture(), agreement.without_pixels(brightness, ONES, ZEROS, 0, (2, 2))
    same([score([]), score([0]), score([0, 1, 2, 3])], [1, 0.75, 0])
    same(agreement.without_pixels(toy, x, ZEROS, 1)(list(range(PIXELS))), toy(ZEROS)[0, 1])


def test_imputation_by_hand() -> None:
    """Inside: four sixths and four twelfths. In a corner: two sixths and a twelfth, made to sum to one."""
    x = torch.arange(9, dtype=DTYPE).view(1, 1, 3, 3).expand(1, 3, 3, 3).square()
    same(agreement.imputed(x, [4])[0, 0, 1, 1], (1 + 9 + 25 + 49) / 6 + (0 + 4 + 36 + 64) / 12)
    same(agreement.imputed(x, [0])[0, 2, 0, 0], 0.4 * 1 + 0.4 * 9 + 0.2 * 16)
    assert all(sum(agreement.neighbours(pixel, (3, 4)).values()) == pytest.approx(1) for pixel in range(12))
    both = agreement.imputed(x, [0, 1])[0, 0]
    same(both[0, 0], 0.4 * both[0, 1] + 0.4 * 9 + 0.2 * 16)
    assert (agreement.imputed(x, []) == x).all()


def test_road_of_brightness() -> None:
    """A left half that is white and right half that is black: what is imputed beside it has its colour."""
    x = torch.cat([ONES[..., :5], ZEROS[..., 5:]], dim=3)
    values = np.tile(np.arange(10.0)[::-1], (6, 1))  # columns from the left
    none = [torch.zeros(3, *SIZE, dtype=DTYPE)] * 7
    result = agreement.road(brightness, x, values, 0, none)
    assert result["both"] == (result["lerf"] - result["morf"]) / 2
    assert result["morf"] < 0.5 < result["lerf"]
    turned = agreement.road(brightness, x, -values, 0, none)
    same([turned["morf"], turned["lerf"]], [result["lerf"], result["morf"]])
    same(agreement.road(brightness, 0.5 * ONES, values, 0, none)["both"], 0)
    lifted = agreement.road(brightness, 0 * ONES, values, 0, [noise + 1 for noise in none])
    same(lifted["morf"], 3.1 / 7)


def test_completeness_and_bootstrap() -> None:
    assert quality.completeness_gap([[1, 2], [-4, 0.5]], 0.25) == 0.75
    values, indices = rng().normal(size=12), rng(1).integers(0, 12, (200, 12))
    same(quality.bootstrap_interval(values, indices), np.percentile(values[indices].mean(axis=1), [2.5, 97.5]))
    same(quality.bootstrap_interval([1.0, 3.0], [[0, 0], [1, 1]]), [1.05, 2.95])
    assert quality.bootstrap_interval([5.0], [[0]]) == (5, 5)
