"""Products in half precision: gradients within its range, values beyond it computed again; forced on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tests.families import FAMILIES
from tests.helpers import answered, batch, relative, wrapped
from torch import Tensor

import vitrail
from vitrail.core.operations import embed
from vitrail.core.parts import Embedding, Norm
from vitrail.core.precision import HALF, PEAK, Scaling, lowered
from vitrail.core.rules import RULES, Plain
from vitrail.engine.requests import Batch, Pictures, PixelGradients, Traced
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.errors import VitrailError
from vitrail.methods.masking import MaskMethod
from vitrail.methods.registry import METHODS, build_method
from vitrail.metrics import measure
from vitrail.metrics.statistics import rank_correlation
from vitrail.models import view as views
from vitrail.models.plain import VisionTransformer
from vitrail.models.view import View
from vitrail.targets import ClassScore, Target

FAMILY = "timm_vit"
SPEC = TraceSpec.of({"x", "u", "gx", "gu", "gmid", "A", "G", "v", "gv", "bias"}, range(2), reduced=True)


@pytest.fixture
def view() -> View:
    return wrapped(FAMILY, FAMILIES[FAMILY].build())  # weights are changed


def images() -> Tensor:
    return batch(FAMILY, 2, torch.float32)


def target() -> Target:
    return Target(torch.tensor([1, 2]))


def traced(view: View, spec: TraceSpec) -> Trace:
    trace: Trace = answered(Traced(Batch(view, images()), target(), spec))
    return trace


def values(trace: Trace) -> dict[tuple[str, int], Tensor]:
    kept = {(name, layer): t for name, layers in trace.kept.items() for layer, t in layers.items()}
    return {**kept, **{("bias", layer): t for layer, t in trace.bias.items()}}


@torch.no_grad()
def shrink(view: View, factor: float) -> None:
    """The logits times a factor, and all gradients with them."""
    for linear in view.architecture().head.linears:
        linear.weight.mul_(factor)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_values_and_gradients_are_those_of_full_precision(rule: str, view: View) -> None:
    spec = replace(SPEC, rule=rule)
    half, full = traced(view, spec), traced(view, replace(spec, reduced=False))
    assert not torch.equal(half["x"][1], full["x"][1]), "half precision was not used"
    for key, expected in values(full).items():
        assert values(half)[key].dtype == torch.float32
        assert relative(values(half)[key], expected) < 0.01, key


def test_gradients_below_the_range_of_half_precision_keep_every_bit(view: View) -> None:
    """Scaling by powers of two is exact: gradients of 2⁻⁴⁰ the size are those gradients, 2⁻⁴⁰ the size."""
    before = traced(view, SPEC)
    shrink(view, 2.0**-40)
    after = traced(view, SPEC)
    for name in ("gx", "gu", "gmid", "G", "gv"):
        for layer, gradient in before[name].items():
            assert gradient.any()
            assert torch.equal(after[name][layer], gradient * 2.0**-40), (name, layer)


def test_gradients_enter_the_blocks_between_the_peak_and_its_double() -> None:
    scaling, x = Scaling(), torch.randn(4, 3, 5, requires_grad=True)
    upstream = torch.randn(4, 3, 5) * torch.tensor([1e-30, 1.0, 3e20, 0.0])[:, None, None]
    scaling.enter(x).backward(upstream)
    assert x.grad is not None
    peaks = x.grad.abs().amax((1, 2))
    assert ((peaks[:3] >= PEAK) & (peaks[:3] < 2 * PEAK)).all()
    assert peaks[3] == 0, "no gradient has no size"
    assert torch.equal(scaling.leave(x.grad), upstream)


@pytest.mark.parametrize("every_layer", [False, True])
def test_a_trace_beyond_the_range_is_made_again(every_layer: bool, view: View) -> None:
    spec = replace(SPEC, every_layer=every_layer)
    overflow(view)
    half, full = traced(view, spec), traced(view, replace(spec, reduced=False))
    assert all(torch.equal(values(half)[key], expected) for key, expected in values(full).items())
    assert torch.equal(half.logits, full.logits)


def test_scores_beyond_the_range_are_computed_again(view: View) -> None:
    overflow(view)
    request = Pictures(
        view=view,
        count=2,
        length=view.num_tokens,
        reading=ClassScore(),
        about=(1,),
        products=HALF,
        make=lambda part: images()[part],
    )
    scores = answered(request)
    assert scores.isfinite().all()
    assert torch.equal(scores, answered(replace(request, products=None)))


def test_pixel_gradients_beyond_the_range_are_computed_again(view: View) -> None:
    request = PixelGradients(
        view=view,
        count=2,
        make=lambda part: images()[part],
        fold=lambda gradient, _: gradient.sum(0),
        target=Target(torch.tensor([1])),
        reduced=True,
    )
    exact = answered(replace(request, reduced=False))
    assert 0 < relative(answered(request), exact) < 0.01
    overflow(view)
    exact = answered(replace(request, reduced=False))
    assert torch.equal(answered(request), exact)


@torch.no_grad()
def overflow(view: View) -> None:
    """Hidden values of the first MLP beyond the largest number of half precision; the next layer makes them small."""
    mlp = view.architecture().blocks[0].mlp
    mlp.fc1.weight.mul_(2.0**20)
    mlp.fc2.weight.mul_(2.0**-20)
    x = torch.randn(1, mlp.fc1.weight.shape[1])
    assert (x @ mlp.fc1.weight.T).abs().max() > torch.finfo(HALF).max


def test_embedded_patches_are_normalised_in_the_precision_of_the_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    images, weight = (  # whole numbers, whose products have no error
        torch.randint(-4, 5, shape, generator=generator).float() for shape in ((2, 3, 4, 6), (8, 3, 2, 2))
    )
    scale, shift = torch.randn(2, 8, generator=generator)
    embedding = Embedding(weight.to(HALF), None, torch.zeros(1, 8), patch_norm=Norm(8, 1e-6, scale, shift))
    patches = embed(embedding, images, Plain())[:, 1:]
    expected = F.layer_norm(F.conv2d(images, weight, stride=2).flatten(2).mT, (8,), scale, shift, 1e-6)
    assert relative(patches, expected) < 1e-6


def test_queries_keys_and_values_share_the_memory_of_one_layer(view: View) -> None:
    for block in lowered(view.architecture()).blocks:
        attention, together = block.attention, block.attention.together
        assert together is not None
        three = (attention.q, attention.k, attention.v)
        assert torch.equal(together.weight, torch.cat([linear.weight for linear in three]))
        assert together.bias is not None
        assert torch.equal(together.bias, torch.cat([linear.bias for linear in three if linear.bias is not None]))
        assert together.weight.data_ptr() == attention.q.weight.data_ptr()


# --- scores on a CPU --------------------------------------------------------------------------------------------------


@pytest.fixture
def able_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that gains from bf16, whether this one does or not."""
    monkeypatch.setattr(views, "cpu_multiplies_bf16", lambda: True)
    monkeypatch.delenv("VITRAIL_PRECISION", raising=False)


@pytest.fixture(scope="module")
def scenes() -> View:
    return vitrail.load("scenes", device="cpu")


@pytest.fixture(scope="module")
def pixels(scenes: View) -> Tensor:
    return scenes.preprocess(Image.fromarray(vitrail.data.Scenes(1, seed=5)[0].image))[None]


@pytest.mark.usefixtures("able_cpu")
def test_a_cpu_scores_in_bf16_where_that_is_faster(scenes: View, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (scenes.gains_from_bf16, scenes.gains_from_half) == (True, False)
    narrow = vitrail.wrap(
        VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=3)
    )
    assert not narrow.gains_from_bf16, "conversions would cost more than products gain"
    for dtype in ("float64", "float16", "bfloat16"):
        assert not vitrail.load("scenes", device="cpu", dtype=dtype).gains_from_bf16
    monkeypatch.setenv("VITRAIL_PRECISION", "full")
    assert not scenes.gains_from_bf16
    monkeypatch.setenv("VITRAIL_PRECISION", "")
    assert scenes.gains_from_bf16


def test_a_wrong_precision_of_the_environment_is_told_on_every_machine(
    scenes: View, pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITRAIL_PRECISION", "half")
    for name in ("gen_att", "rise"):
        with pytest.raises(VitrailError, match="VITRAIL_PRECISION must be auto or full, but is half"):
            build_method(name, scenes).attribute(pixels)


MASKED = {
    name: entry
    for name, entry in METHODS.entries().items()
    if isinstance(entry, type) and issubclass(entry, MaskMethod)
}


@pytest.mark.usefixtures("able_cpu")
def test_only_methods_that_bear_bf16_ask_for_it(scenes: View) -> None:
    """Which do was measured on real networks: docs/results/precision.csv."""
    asking = {name for name in MASKED if build_method(name, scenes).products is not None}
    assert asking == {name for name, entry in MASKED.items() if entry.bears_bf16}
    assert asking == {"tis", "posterior", "rise", "score_cam"}
    assert all(build_method(name, scenes, precision="full").products is None for name in asking)
    assert build_method("score_cam", scenes, variant="library").products is None, "its softmax magnifies rounding"


@pytest.mark.usefixtures("able_cpu")
@pytest.mark.parametrize("name", sorted(name for name, entry in MASKED.items() if entry.bears_bf16))
def test_maps_from_scores_in_bf16_keep_their_ranks(name: str, scenes: View, pixels: Tensor) -> None:
    params = {"masks": 96} if "masks" in METHODS[name].parameters() else {}
    auto, full = (
        build_method(name, scenes, **params, precision=precision).attribute(pixels) for precision in ("auto", "full")
    )
    assert not torch.equal(auto, full), "bf16 was not used"
    assert rank_correlation(auto[0], full[0]) > 0.999


@pytest.mark.usefixtures("able_cpu")
def test_traces_and_measurements_on_a_cpu_are_those_of_full_precision(
    scenes: View, pixels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers() -> list[object]:
        methods = ("decompx.skipplus", "gen_att", "integrated_gradients")
        maps = [build_method(name, scenes).attribute(pixels) for name in methods]
        curve = measure("insertion", scenes, pixels, maps[0], scenes.logits(pixels).argmax(1), steps=16)
        return [*(values.tolist() for values in maps), curve]

    auto = answers()
    monkeypatch.setenv("VITRAIL_PRECISION", "full")
    assert auto == answers()
