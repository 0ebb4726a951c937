"""What must not change a map: the precision of the weights, the caller's modes; and what cannot be explained at all."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.families import FAMILIES, HIERARCHICAL
from tests.helpers import MODES, assert_same_state, batch, crossed, relative, required_parameters, state_of, viewed
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.calls import split_call
from vitrail.data import open_data
from vitrail.engine import scheduler as scheduling
from vitrail.methods.registry import build_method, get_method, list_methods
from vitrail.metrics.statistics import rank_correlation
from vitrail.models.view import View
from vitrail.models.wrapping import outline

SINGLE = torch.float32
HALVES = (torch.bfloat16, torch.float16)
DRAWN = ["rise(space=tokens)", "vit_cx(source=random)", "tis(space=pixels)", "pami(background=white)"]


def built(call: str, view: View) -> Any:
    """A method of few passes."""
    name, params = split_call(call)
    fewest = {"posterior": 8, "shapley": 4}.get(name, 3)
    quick = {
        key: fewest for key in ("steps", "samples", "masks", "permutations") if key in get_method(name).info.params
    }
    return build_method(name, view, **{**quick, **required_parameters(name, view), **params})


@pytest.fixture(autouse=True)
def _few_random_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.methods.vit_cx.RANDOM_MASKS", 20)


@functools.cache
def image(family: str) -> Tensor:
    return batch(family, 2, SINGLE)


@functools.cache
def undisturbed(call: str, family: str) -> Tensor:
    return built(call, viewed(family, SINGLE)[2]).attribute(image(family))


@functools.cache
def half(family: str, dtype: torch.dtype) -> tuple[View, View]:
    """A model in half precision, and one with the same weights in single precision."""
    module = {**FAMILIES, **HIERARCHICAL}[family].build(dtype)
    return vitrail.wrap(module), vitrail.wrap(copy.deepcopy(module).float())


@pytest.mark.parametrize(
    ("call", "dtype"), crossed(itertools.product([*list_methods(), "gradient(reduce=sum)", *DRAWN], HALVES))
)
def test_half_precision_weights_are_explained_in_single_precision(call: str, dtype: torch.dtype) -> None:
    narrow, wide = half("timm_vit", dtype)
    before = state_of(narrow.module)
    result = built(call, narrow).attribute(image("timm_vit"), [0, 3])
    assert result.dtype == SINGLE
    assert torch.equal(result, built(call, wide).attribute(image("timm_vit"), [0, 3]))
    assert_same_state(before, state_of(narrow.module))
    assert narrow.logits(image("timm_vit")).dtype == narrow.dtype == dtype, "the model itself keeps its precision"


@pytest.mark.parametrize(
    ("family", "call"),
    crossed(itertools.product(["timm_swin", "hf_swin"], ["grad_cam", "vit_cx", "occlusion", "integrated_gradients"])),
)
def test_half_precision_features_are_explained_in_single_precision(family: str, call: str) -> None:
    narrow, wide = half(family, torch.bfloat16)
    before = state_of(narrow.module)
    result, expected = (built(call, view).attribute(image(family), [0, 3]) for view in (narrow, wide))
    assert relative(result, expected) < 1e-5
    assert_same_state(before, state_of(narrow.module))


def test_relevance_of_pixels_is_that_of_double_precision() -> None:
    """Its denominators all but cancel: in single precision rounding would be a part of the map."""
    module = FAMILIES["timm_vit"].build(SINGLE)
    single, double = (vitrail.wrap(model) for model in (module, copy.deepcopy(module).double()))
    result, expected = (build_method("lrp", view).attribute(image("timm_vit"), 0) for view in (single, double))
    assert relative(result, expected) < 1e-6


def test_half_precision_maps_are_ranked_as_those_of_the_model() -> None:
    """The weights are rounded, but nothing else."""
    views = [vitrail.load("scenes", dtype=dtype) for dtype in ("float32", "bfloat16")]
    picture = open_data("scenes:1")[0].image
    for call in ("alti", "hires_cam", "occlusion", "vit_cx"):
        name, params = split_call(call)
        maps = [vitrail.explain(view, picture, name, 0, **params).map for view in views]
        assert rank_correlation(*maps) > 0.99, call


def test_a_shared_trace_serves_half_precision_too(monkeypatch: pytest.MonkeyPatch) -> None:
    views = half("timm_vit", torch.bfloat16)
    picture, produced = views[0].preprocessing.denormalise(image("timm_vit")[0]), []
    make = scheduling.make_traces
    monkeypatch.setattr(scheduling, "make_traces", lambda *args: produced.append(args) or make(*args))
    narrow, wide = (vitrail.evaluate(view, [picture], "gen_att, attn_cam", "sparseness") for view in views)
    assert len(produced) == 2, "one for each model"
    assert narrow["value"].tolist() == wide["value"].tolist()


@pytest.mark.parametrize(("call", "mode"), crossed(itertools.product([*list_methods(), *DRAWN], MODES)))
def test_the_callers_modes_change_no_map(call: str, mode: str) -> None:
    view, expected = viewed("timm_vit", SINGLE)[2], undisturbed(call, "timm_vit")
    with MODES[mode]():
        result = built(call, view).attribute(image("timm_vit"))
    assert torch.equal(result, expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", ["hires_cam", "vit_cx", "smooth_grad"])
def test_the_callers_modes_change_no_map_of_features(call: str, mode: str) -> None:
    expected, view = undisturbed(call, "timm_swin"), viewed("timm_swin", SINGLE)[2]
    with MODES[mode]():
        assert torch.equal(built(call, view).attribute(image("timm_swin")), expected)


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_modes_change_no_explanation(mode: str) -> None:
    view, data = vitrail.load("scenes"), open_data("scenes:1")
    picture, metrics = data[0].image, "insertion(steps=4), token_deletion_aopc, mean_iou, box_localization"

    def explained_and_scored() -> tuple[Tensor, float, list[float]]:
        explanation = vitrail.explain(view, picture)
        rows = vitrail.evaluate(view, data, "gen_att", metrics, images=1)
        return explanation.map, explanation.probability, rows["value"].tolist()

    expected = explained_and_scored()
    with MODES[mode]():
        again = explained_and_scored()
    assert torch.equal(again[0], expected[0])
    assert again[1:] == expected[1:]


def test_autocast_reaches_the_models_own_logits() -> None:
    """A view's logits are the caller's: only explanations leave the modes aside."""
    view = viewed("timm_vit", SINGLE)[2]
    exact = view.logits(image("timm_vit"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(view.logits(image("timm_vit")), exact)


IMAGE = torch.zeros(2, 3, 32, 32)
UNFIT: dict[str, tuple[Any, str]] = {
    "uint8": (IMAGE.byte(), "torch.uint8"),
    "int64": (IMAGE.long(), "torch.int64"),
    "bool": (IMAGE.bool(), "torch.bool"),
    "complex": (IMAGE.to(torch.complex64), "torch.complex64"),
    "meta": (IMAGE.to("meta"), "meta device, which holds no values"),
    "sparse": (IMAGE.to_sparse(), "layout torch.sparse_coo"),
    "nested": (torch.nested.nested_tensor(list(IMAGE), layout=torch.jagged), "nested tensor"),
    "array": (IMAGE.numpy(), "ndarray"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_no_normalised_image_can_be(kind: str) -> None:
    view = viewed("timm_vit", SINGLE)[2]
    images, message = UNFIT[kind]
    calls: list[Callable[[], Any]] = [
        lambda: build_method("gen_att", view).attribute(images),
        lambda: view.logits(images),
        lambda: vitrail.metrics.measure("insertion", view, images, torch.zeros(2, 4, 4)),
    ]
    if isinstance(images, Tensor) and not images.is_nested:  # explain takes an array for a picture
        calls.append(lambda: vitrail.explain(view, images))
    for call in calls:
        with pytest.raises(VitrailError, match=f"finite floats.*{message}|must be a tensor, but got {message}"):
            call()


def test_a_model_without_weights_says_so() -> None:
    view = outline(FAMILIES["timm_vit"].build().to("meta"))
    for call in (view.logits, build_method("gen_att", view).attribute, lambda images: vitrail.explain(view, images)):
        with pytest.raises(VitrailError, match="it is on the meta device"):
            call(IMAGE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_floats_of_any_precision_are_explained(dtype: torch.dtype) -> None:
    method, exact = build_method("gen_att", viewed("timm_vit", SINGLE)[2]), image("timm_vit").half()
    assert torch.equal(method.attribute(exact.to(dtype)), method.attribute(exact.float()))


def full(*_: Any, **__: Any) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: 1 bytes.")


@pytest.mark.parametrize("count", [1, 2])
def test_a_cpu_that_runs_out_of_memory_says_so(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view, images = viewed("timm_vit", SINGLE)[2], image("timm_vit")[:count]
    monkeypatch.setattr("torch.nn.functional.layer_norm", full)
    calls: list[Callable[[], Any]] = [
        lambda: built("gen_att", view).attribute(images, 0),
        lambda: built("occlusion", view).attribute(images, 0),
        lambda: built("rise", view).attribute(images, 0),
        lambda: vitrail.explain(view, images, "gen_att"),
        lambda: vitrail.metrics.measure("insertion", view, images, torch.zeros(count, 4, 4)),
        lambda: vitrail.evaluate(view, [view.preprocessing.denormalise(pixels) for pixels in images], "gen_att"),
    ]
    for call in calls:  # the scheduler halves a batch until one image is left
        with pytest.raises(VitrailError, match="one image at a time does not fit in memory"):
            call()
