"""Curves with patches taken out against the oracle: keys masked with −inf in the module's own recipe."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.helpers import crossed
from tests.metrics.common import CLOSE, PIXEL_KINDS, TOKEN_KINDS, Bench, agrees, bench, on_grid, tie, tied, two_classes
from tests.oracles import curves
from tests.oracles.masked_forward import masked_logits
from torch import Tensor

from vitrail import VitrailError
from vitrail.metrics import build_metric, list_metrics, measure

SOME = ["timm_vit", "timm_vit_gap", "timm_deit_distilled", "hf_deit_teacher", "timm_vit_not_square", "timm_siglip",
        "timm_dinov2_reg4", "timm_eva02_tiny", "timm_beit", "torchvision_vit", "hf_vit", "one_output", "multi_label",
        "four_patches", "pooled_nine"]  # fmt: skip
METRICS = {
    "token_deletion_accuracy": ("deletion", "accuracy"),
    "token_insertion_accuracy": ("insertion", "accuracy"),
    "token_deletion_aopc": ("deletion", "aopc"),
    "token_insertion_aopc": ("insertion", "aopc"),
}
TARGET = 1


def literal(
    of: Bench, image: Tensor, values: Tensor, name: str, protocol: str, truth: int, seed: int
) -> tuple[list[float], float]:
    kind, reading = METRICS[name]
    small, ties = on_grid(values, of.family.grid), tie(of.family.patches, seed)
    pools = of.view.pools_patches  # type: ignore[attr-defined]
    encode = of.subset(image, curves.order(small, ties)[0] if pools else None)
    if reading == "accuracy":
        return curves.token_curve(encode, small, truth, ties, kind, reading, protocol)
    place = of.softmax_logits(encode([0])[None], TARGET)[1]

    def read(kept: list[int]) -> Tensor:
        return of.softmax_logits(encode(kept)[None], TARGET)[0][0]

    return curves.token_curve(read, small, place, ties, kind, reading, protocol)


def test_every_token_metric_is_compared_here() -> None:
    masking = {name: info for name, info in list_metrics().items() if info.family == "token masking"}
    assert set(masking) == set(METRICS)
    assert all(info.protocols == ("default", "skipplus") for info in masking.values())


WAYS: list[tuple[tuple[str, ...], str, int | None, int]] = [
    (PIXEL_KINDS, "skipplus", 1, 0),
    (TOKEN_KINDS, "default", None, 4),
    (TOKEN_KINDS, "skipplus", 0, 0),
]


@pytest.mark.parametrize(("name", "way"), crossed(itertools.product(SOME, range(len(WAYS)))))
def test_token_curves_of_every_family(name: str, way: int) -> None:
    of, (kinds, protocol, label, seed) = bench(name), WAYS[way]
    maps = of.maps(kinds)
    for metric in METRICS:
        result = measure(metric, of.view, of.images, maps, TARGET, label=label, protocol=protocol, seed=seed)
        for i, values in enumerate(maps):
            image = of.images[i : i + 1]
            truth = of.top(image)[0] if label is None else label
            agrees(result[i], literal(of, image, values, metric, protocol, truth, seed))
            assert len(result[i].curve or ()) == 10


@pytest.mark.parametrize("name", ["timm_vit_gap", "timm_deit_distilled"])
def test_accuracy_curves_see_both_outcomes(name: str) -> None:
    of = bench(name)
    heights = set()
    for metric in ("token_deletion_accuracy", "token_insertion_accuracy"):
        for score in measure(metric, of.view, of.images, of.maps(TOKEN_KINDS), TARGET):
            heights |= set(score.curve or ())
    assert heights == {0.0, 1.0}


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_gap", "timm_deit_distilled", "hf_siglip", "timm_dinov3"])
def test_taking_patches_out_is_masking_their_keys(name: str) -> None:
    """Point by point, with the sets of patches made here: a tenth of the patches more at each point."""
    of = bench(name)
    values, image = of.maps(["tokens"])[0], of.images[:1]
    best = values.flatten().argsort(descending=True)
    counts = [math.floor(tenths * len(best) / 10) for tenths in range(1, 10)]

    def probability(kept: Tensor) -> float:
        logits = two_classes(masked_logits(of.family, of.module, image, kept[None]))
        return float(logits.softmax(1)[0, TARGET])

    whole = probability(best)
    for metric, sets in (
        ("token_deletion_aopc", [best[count:] for count in (0, *counts)]),
        ("token_insertion_aopc", [best[:count] for count in (*counts, len(best))]),
    ):
        (result,) = measure(metric, of.view, image, values, TARGET)
        for fall, kept in zip(result.curve or (), sets, strict=True):
            assert abs(fall - (whole - probability(kept))) < CLOSE


def test_a_head_that_pools_keeps_the_best_patch_where_a_tenth_is_none() -> None:
    """Nine patches: ten per cent are none. A head that reads a token sees none, a head that pools sees the best one."""
    for name in ("pooled_nine", "timm_vit_patch16"):
        of = bench(name)
        values, image = of.maps(["tokens"])[0], of.images[:1]
        assert of.family.patches == 9
        (result,) = measure("token_insertion_aopc", of.view, image, values, TARGET)
        best = int(values.argmax())
        kept = torch.tensor([[best]] if name == "pooled_nine" else [[]], dtype=torch.long)
        alone = masked_logits(of.family, of.module, image, kept).softmax(1)[0, TARGET]
        assert abs((result.curve or ())[0] - float(of.probabilities(image)[0, TARGET] - alone)) < CLOSE


@pytest.mark.parametrize("name", ["timm_vit", "timm_vit_gap", "timm_vit_not_square"])
@pytest.mark.parametrize("cells", [1, 2, 3])
def test_curves_by_squares_of_patches(name: str, cells: int) -> None:
    """Every square, also those that the border cuts, by the mean of its patches; the value is the mean height."""
    of = bench(name)
    (rows, columns), values, image = of.family.grid, of.maps(["tokens"])[0], of.images[:1]
    squares: dict[tuple[int, int], list[int]] = {}
    for row, column in itertools.product(range(rows), range(columns)):
        squares.setdefault((row // cells, column // cells), []).append(row * columns + column)
    mean = {key: float(values.flatten()[square].mean()) for key, square in squares.items()}
    order = sorted(squares, key=lambda key: -mean[key])

    def probability(kept: list[tuple[int, int]]) -> float:
        patches = torch.tensor(sorted(patch for key in kept for patch in squares[key]))
        return float(two_classes(masked_logits(of.family, of.module, image, patches[None])).softmax(1)[0, TARGET])

    whole, counts = probability(order), range(len(order))
    for metric, sets in (
        ("token_deletion_aopc", [order[count:] for count in counts]),
        ("token_insertion_aopc", [order[: count + 1] for count in counts]),
    ):
        (result,) = measure(metric, of.view, image, values, TARGET, cells=cells)
        falls = [whole - probability(kept) for kept in sets]
        agrees(result, (falls, sum(falls) / len(falls)))
    (accuracy,) = measure("token_insertion_accuracy", of.view, image, values, TARGET, label=TARGET, cells=cells)
    assert set(accuracy.curve or ()) <= {0.0, 1.0}
    assert len(accuracy.curve or ()) == len(order)
    assert accuracy.value == pytest.approx(sum(accuracy.curve or ()) / len(order))


def test_squares_are_of_one_patch_or_more_and_not_those_of_skipplus() -> None:
    for metric in METRICS:
        with pytest.raises(VitrailError, match="cells must be at least 1"):
            build_metric(metric, cells=0)
        with pytest.raises(VitrailError, match="leave cells= out"):
            build_metric(metric, cells=2, protocol="skipplus")


def test_squares_that_do_not_fit_on_the_grid_are_refused() -> None:
    of = bench("timm_vit_not_square")
    rows, columns = of.family.grid
    image, values, most = of.images[:1], of.maps(["tokens"])[0], min(rows, columns)
    assert rows != columns
    message = f"cells must be at most {most} on the {rows} × {columns} patches of .*, but got {most + 1}"
    for metric in METRICS:
        measure(metric, of.view, image, values, TARGET, label=TARGET, cells=most)
        with pytest.raises(VitrailError, match=message):
            measure(metric, of.view, image, values, TARGET, label=TARGET, cells=most + 1)


def test_skipplus_turns_round_what_should_be_small() -> None:
    of = bench("timm_vit_gap")
    maps = of.maps(TOKEN_KINDS)
    for metric in METRICS:
        default = measure(metric, of.view, of.images, maps, TARGET)
        published = measure(metric, of.view, of.images, maps, TARGET, protocol="skipplus")
        turned = metric in ("token_deletion_accuracy", "token_insertion_aopc")
        assert build_metric(metric).higher_is_better is not turned
        assert build_metric(metric, protocol="skipplus").higher_is_better
        for score, other in zip(default, published, strict=True):
            assert score.curve == other.curve
            assert other.value == pytest.approx(100 - 90 * score.value if turned else 90 * score.value, rel=CLOSE)


@pytest.mark.parametrize("name", ["timm_swin", "torchvision_swinv2", "hf_swin"])
def test_models_without_tokens_are_refused(name: str) -> None:
    of = bench(name)
    for metric in METRICS:
        with pytest.raises(VitrailError, match="needs a model with tokens"):
            measure(metric, of.view, of.images, of.maps(TOKEN_KINDS))


def test_ties_are_those_of_the_patches() -> None:
    of = bench("timm_vit")
    for metric in METRICS:
        for kinds in (TOKEN_KINDS, PIXEL_KINDS):
            maps = of.maps(kinds)
            for score, values in zip(measure(metric, of.view, of.images, maps, TARGET), maps, strict=True):
                assert score.extras["ties"] == pytest.approx(tied(on_grid(values, of.family.grid)))


def test_pixel_maps_are_averaged_over_patches_of_any_shape() -> None:
    of = bench("timm_dinov2")  # patches of 14 pixels
    maps = of.maps(PIXEL_KINDS)
    for values in maps:
        assert abs(of.case(values).on_grid.numpy() - on_grid(values, of.family.grid)).max() < 1e-14
    assert torch.equal(of.case(of.maps(["tokens"])[0]).on_grid, of.maps(["tokens"])[0])
