"""What is wrong is told in a sentence; whatever happens, model and random numbers stay as they were."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers import DOUBLE, assert_same_state, state_of
from tests.metrics.common import TOKEN_KINDS, bench
from torch import Tensor

from vitrail import VitrailError
from vitrail.methods.registry import build_method
from vitrail.metrics import Case, MapMetric, Scored, build_metric, list_metrics, measure, metric
from vitrail.metrics.curves import _gaussian, blurred

OF = "timm_vit_not_square"
SIZE = (24, 40)


def good() -> dict[str, Any]:
    """What every metric can be measured with."""
    of = bench(OF)
    masks = torch.zeros(2, *SIZE, dtype=torch.bool)
    masks[:, 3:9, 5:15] = True
    return {
        "model": of.view,
        "images": of.images,
        "maps": of.maps(TOKEN_KINDS),
        "target": [1, 0],
        "label": [1, 2],
        "masks": masks,
        "others": masks.flip(1),
        "ignore": masks.flip(2),
        "boxes": [[(5.0, 3.0, 15.0, 9.0)]] * 2,
        "method": build_method("gen_att", of.view),
    }


def attempt(name: str, **changes: Any) -> list[Scored]:
    """Measures with something changed; None takes it away. The model is as before, also after an error."""
    of = bench(OF)
    options = {key: value for key, value in {**good(), **changes}.items() if value is not None}
    before, drawn = state_of(of.module), random.getstate()
    try:
        return measure(name, **options)
    finally:
        assert_same_state(before, state_of(of.module))
        assert random.getstate() == drawn


SLOW = {"max_sensitivity": {"samples": 2}, "infidelity": {"samples": 2}}
MEASURED = [name for name in list_metrics() if name != "completeness"]


@pytest.mark.parametrize("name", MEASURED)
def test_good_input_leaves_everything_as_it_was(name: str) -> None:
    result = attempt(name, **SLOW.get(name, {}))
    assert len(result) == 2
    assert all(math.isfinite(scored.value) for scored in result)
    torch.manual_seed(123)
    again = attempt(name, **SLOW.get(name, {}))
    assert again == result, "global random numbers play no part"


@pytest.mark.parametrize("name", MEASURED)
def test_measuring_under_inference_mode(name: str) -> None:
    quick = SLOW.get(name, {"steps": 5} if "steps" in list_metrics()[name].params else {})
    unchanged = attempt(name, **quick)
    with torch.inference_mode():
        result = attempt(name, **quick)
    assert [scored.value for scored in result] == pytest.approx([scored.value for scored in unchanged], rel=1e-9)


def spoiled(value: float, place: int = 0) -> Tensor:
    maps = bench(OF).maps(TOKEN_KINDS)
    maps[place, 0, 1] = value
    return maps


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_maps_that_are_not_finite_are_refused(name: str, value: float) -> None:
    with pytest.raises(VitrailError, match="1 of 15 values are NaN or infinite"):
        attempt(name, maps=spoiled(value, 1))


REFUSED: list[tuple[str, dict[str, Callable[[], Any]], str]] = [
    ("insertion", {"maps": lambda: bench(OF).maps(TOKEN_KINDS)[:1]}, "2 images were given with 1 maps"),
    ("insertion", {"maps": lambda: bench(OF).maps(TOKEN_KINDS)[:, None]}, r"must be \(rows, columns\).*\(1, 3, 5\)"),
    ("insertion", {"images": lambda: bench(OF).images[..., :-1]}, r"\(B, 3, 24, 40\).*img_size="),
    ("insertion", {"images": lambda: bench(OF).images * math.nan}, "NaN or infinite"),
    ("insertion", {"target": lambda: 5}, "no class 5 .* expected 0…4"),
    ("insertion", {"target": lambda: -1}, "no class -1"),
    ("insertion", {"target": lambda: [0, 1, 2]}, "target names 3 classes for 2 images"),
    ("insertion", {"target": lambda: "tench"}, "no class names"),
    ("insertion", {"target": lambda: 1.5}, "an integer or a name"),
    ("positive_auc", {"label": lambda: [0, 7]}, "no class 7 .* expected 0…4"),
    ("positive_auc", {"label": lambda: [0, 1, 2]}, "label names 3 classes"),
    ("mean_iou", {"masks": lambda: torch.ones(2, 24, 24, dtype=torch.bool)}, r"\(24, 24\).*expected.*\(24, 40\)"),
    ("mean_iou", {"masks": lambda: torch.ones(1, *SIZE, dtype=torch.bool)}, "2 images were given with 1 masks"),
    ("discriminativity", {"others": lambda: torch.ones(2, 3, 5, dtype=torch.bool)}, r"others has shape \(3, 5\)"),
    ("discriminativity", {"others": lambda: torch.ones(3, *SIZE)}, "3 others"),
    ("segmentation_ap", {"ignore": lambda: torch.ones(2, 3, 5, dtype=torch.bool)}, r"ignore has shape \(3, 5\)"),
    ("mean_iou", {"masks": lambda: torch.rand(2, *SIZE)}, "masks must be true or false"),
    ("mean_iou", {"masks": lambda: np.ones((2, *SIZE), dtype=bool)}, "masks must be a tensor, but got ndarray"),
    ("mean_iou", {"masks": lambda: torch.full((2, *SIZE), 3)}, "masks must be true or false .* torch.int64 values"),
    ("box_localization", {"boxes": lambda: [[(0, 0, 2, 2)]]}, "2 images were given with 1 boxes"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_does_not_fit_is_refused(name: str, changes: dict[str, Callable[[], Any]], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        attempt(name, **{key: make() for key, make in changes.items()})


@pytest.mark.parametrize(
    ("name", "gone", "message"),
    [
        *((n, ("masks", "boxes"), "needs boxes or masks") for n in ("pointing_game", "energy_pointing_game")),
        *((n, ("masks",), "needs masks") for n in ("pixel_accuracy", "mean_iou", "mean_ap", "segmentation_ap")),
        ("discriminativity", ("others",), "needs objects of two classes"),
        ("discriminativity", ("masks", "boxes"), "needs objects of two classes"),
        ("box_localization", ("boxes",), "needs boxes"),
        ("max_sensitivity", ("method",), "explains again: give it the method="),
        ("model_randomization", ("method",), "explains again: give it the method="),
        ("completeness", (), "needs a method that promises to be complete"),
    ],
)
def test_metrics_say_what_they_lack(name: str, gone: tuple[str, ...], message: str) -> None:
    with pytest.raises(VitrailError, match=f"^{name} {message}"):
        attempt(name, **dict.fromkeys(gone))


def test_a_name_that_is_none_gets_a_hint() -> None:
    with pytest.raises(VitrailError, match=r"no metric 'insertoin'\. Did you mean insertion.*vitrail metrics"):
        attempt("insertoin")
    with pytest.raises(VitrailError, match=r"no metric 'q'\. `vitrail metrics` lists them"):
        attempt("q")
    with pytest.raises(VitrailError, match="cannot parse"):
        attempt("insertion(steps=3")
    assert attempt(" Insertion(steps=3) ") == attempt("insertion", steps=3)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("insertion", {"step": 3}, "insertion has no parameter step; it has: baseline=None, steps=224"),
        ("mean_iou", {"steps": 3}, "mean_iou has no parameter steps; it has: none"),
        ("insertion", {"steps": 0}, "steps must be at least 1, but got 0"),
        ("deletion", {"steps": -3, "protocol": "tis"}, "steps must be at least 1, but got -3"),
        ("insertion", {"steps": 0, "protocol": "rise"}, "steps must be at least 1"),
        ("aopc", {"steps": 0}, "steps must be at least 1"),
        ("insertion", {"steps": 2.5}, "steps must be an integer, but got 2.5"),
        ("insertion", {"steps": True}, "steps must be an integer"),
        ("insertion", {"baseline": "white"}, "baseline must be 'mean' or 'blur' or 'black' or 'random' or None"),
        ("insertion", {"protocol": "skipplus"}, "protocol must be 'default' or 'tis' or 'rise' or 'vit_cx'"),
        ("deletion", {"baseline": "blur", "protocol": "rise"}, "leave baseline= out"),
        ("insertion", {"baseline": "mean", "protocol": "vit_cx"}, "leave baseline= out"),
        ("aopc", {"protocol": "tis"}, "protocol must be 'default' or 'vtranm'"),
        ("token_deletion_aopc", {"seed": "x"}, "seed must be an integer"),
        ("pointing_game", {"tolerance": "wide"}, "tolerance must be a number"),
        ("box_localization", {"threshold": 0.0}, "threshold must be above 0 and at most 1"),
        ("box_localization", {"threshold": 1.01}, "threshold must be above 0 and at most 1"),
        ("box_localization", {"kind": "top5"}, "kind must be 'gt_known' or 'top1' or 'max_box_acc'"),
        ("box_localization", {"kind": "top1", "label": None}, "needs the true class"),
        ("discriminativity", {"reading": "rank"}, "reading must be 'mass' or 'hit'"),
        ("sparseness", {"protocol": "rise"}, "protocol must be"),
        ("max_sensitivity", {"samples": 0}, "samples must be at least 1, but got 0"),
        ("infidelity", {"samples": -1}, "samples must be at least 1"),
        ("infidelity", {"normalize": 1}, "normalize must be true or false"),
        ("infidelity", {"sigma": 0.0}, "sigma must be above 0"),
        ("saco", {"groups": 1}, "groups must be at least 2, but got 1"),
        ("saco", {"space": "patches"}, "space must be 'pixels' or 'tokens'"),
        ("saco", {"seed": -1}, "seed must be between 0 and"),
        ("idsds", {"seed": 1}, "idsds has no parameter seed; it has: none"),
        ("faithfulness_correlation", {"subset": 0.0}, "subset must be above 0 and below 1, .* but got 0.0"),
        ("faithfulness_correlation", {"subset": 1.0}, "subset must be above 0 and below 1"),
        ("faithfulness_correlation", {"runs": 1}, "runs must be at least 2, but got 1"),
        ("faithfulness_correlation", {"seed": 2**70}, "seed must be between 0 and"),
        ("road", {"order": "first"}, "order must be 'both' or 'morf' or 'lerf'"),
        ("road", {"sigma": -0.1}, "sigma must be at least 0, but got -0.1"),
        ("road", {"seed": -1}, "seed must be between 0 and"),
        ("pointing_game", {"max_area": -1.0}, "max_area must be above 0"),
        ("box_localization", {"iou": 7.0}, "iou must be above 0 and at most 1"),
        ("model_randomization", {"way": "up"}, "way must be 'cascading' or 'independent'"),
        ("model_randomization", {"reading": "hog"}, "reading must be 'rank' or 'ssim'"),
    ],
)
def test_wrong_parameters_are_refused(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        attempt(name, **params)


def test_a_metric_that_is_built_takes_no_parameters() -> None:
    with pytest.raises(VitrailError, match="aopc is built already"):
        measure(build_metric("aopc"), bench(OF).view, bench(OF).images, bench(OF).maps(TOKEN_KINDS), steps=4)


def test_an_image_too_small_to_blur_is_refused() -> None:
    with pytest.raises(VitrailError, match="larger than 5 pixels"):
        blurred(torch.zeros(1, 3, 5, 40), _gaussian(), "reflect")


def test_a_metric_of_ones_own() -> None:
    """Registered, listed, measured; the name of another's metric is refused."""

    @metric("tests_largest", higher_is_better=True)
    class Largest(MapMetric):
        """The largest value."""

        def score(self, case: Case) -> Scored:
            return Scored(float(case.map.max()))

    assert list_metrics("tests_*")["tests_largest"].summary == "The largest value."
    maps = bench(OF).maps(TOKEN_KINDS)
    assert [scored.value for scored in attempt("tests_largest")] == [float(values.max()) for values in maps]
    with pytest.raises(VitrailError, match="already a metric 'insertion'"):
        metric("insertion", higher_is_better=True)(Largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["insertion", "mean_iou", "mean_ap", "sparseness", "box_localization", "pointing_game"]
)
def test_maps_of_any_precision_are_measured(name: str, dtype: torch.dtype) -> None:
    maps = bench(OF).maps(["tied tokens", "tied tokens"])  # which every precision holds exactly
    unchanged, result = (attempt(name, maps=values) for values in (maps, maps.to(dtype)))
    if dtype == torch.float32:
        assert [scored.value for scored in result] == pytest.approx([scored.value for scored in unchanged], rel=1e-6)
    assert all(math.isfinite(scored.value) for scored in result)


MISUSED: list[tuple[str, str, dict[str, Callable[[], Any]], str]] = [
    ("a parameter given twice", "insertion(steps=5)", {"steps": lambda: 3}, "steps is given twice"),
    ("a parameter called name", "insertion(name=5)", {}, "insertion has no parameter name"),
    ("whole numbers", "sparseness", {"maps": lambda: torch.ones(2, 3, 5, dtype=torch.long)}, "of floats.*torch.int64"),
    ("no cells", "insertion", {"maps": lambda: torch.ones(2, 0, 5, dtype=DOUBLE)}, r"of floats.*\(0, 5\)"),
    ("arrays", "insertion", {"maps": lambda: torch.ones(2, 3, 5).numpy()}, "must be a tensor.*torch.as_tensor"),
    ("a box inside out", "box_localization", {"boxes": lambda: [[(9, 9, 2, 2)]] * 2}, "x0 < x1 and y0 < y1"),
    ("pixel maps", "model_randomization", {"maps": lambda: torch.rand(2, *SIZE)}, "maps that this method made"),
    ("a method by name", "model_randomization", {"method": lambda: "gen_att"}, r"give it the method= \(an object\)"),
    (
        "another's method",
        "max_sensitivity",
        {"method": lambda: build_method("gen_att", bench("multi_label").view)},
        "explains another model",
    ),
    ("a long seed", "insertion", {"seed": lambda: 2**70}, "seed must be between 0 and"),
    ("a seed below zero", "insertion", {"seed": lambda: -1}, "seed must be between 0 and"),
    ("a radius below zero", "max_sensitivity", {"radius": lambda: -1.0}, "radius must be at least 0"),
    ("a tolerance below zero", "pointing_game", {"tolerance": lambda: -5.0}, "tolerance must be at least 0"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"), [misuse[1:] for misuse in MISUSED], ids=[misuse[0] for misuse in MISUSED]
)
def test_misuse_is_told(name: str, changes: dict[str, Callable[[], Any]], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        attempt(name, **{key: make() for key, make in changes.items()})


def test_a_box_is_cut_at_the_border_of_the_input() -> None:
    maps = torch.zeros(2, *SIZE, dtype=DOUBLE)
    maps[:, :10, :10] = 1
    for box in ((-10.0, -10.0, 10.0, 10.0), (0.0, 0.0, 10.0, 10.0)):
        result = attempt("box_localization", maps=maps, boxes=[[box]] * 2, iou=1.0)
        assert [scored.value for scored in result] == [1, 1]
    half = attempt("box_localization", maps=maps, boxes=[[(-9.0, -9.0, -1.0, -1.0)], [(0.0, 0.0, 10.0, 10.0)]])
    assert math.isnan(half[0].value), "nothing of the box is in the picture"
    assert half[1].value == 1


def test_a_picture_of_unknown_pixels_has_no_precision() -> None:
    result = attempt("segmentation_ap", ignore=torch.ones(2, *SIZE, dtype=torch.bool))
    assert all(math.isnan(scored.value) for scored in result)


def test_a_box_of_three_numbers_is_told() -> None:
    with pytest.raises(VitrailError, match="a box is"):
        attempt("box_localization", boxes=[[(1, 2, 3)]] * 2, masks=None)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *itertools.product(["max_sensitivity", "infidelity"], [-1, 2**70]),
        ("model_randomization", -1),
        ("model_randomization", 2**70),
    ],
)
def test_seeds_of_metrics_that_explain_again(name: str, seed: int) -> None:
    """Either they take any number, or they say which."""
    with contextlib.suppress(VitrailError):
        assert len(attempt(name, seed=seed, **SLOW.get(name, {}))) == 2
