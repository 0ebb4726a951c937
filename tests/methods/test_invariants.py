"""What the papers promise of their methods, and what must never happen."""

from __future__ import annotations

import functools

import pytest
import timm
import torch
import torch.nn.functional as F
from tests.families import FAMILIES, HIERARCHICAL, few, randomize
from tests.helpers import DOUBLE, answered, batch, in_both_precisions, relative, required_parameters, traced, viewed
from tests.oracles import cams
from tests.oracles import gradients as literal

import vitrail
from vitrail import VitrailError
from vitrail.core.lrp import AlphaBeta, PublishedAlphaBeta
from vitrail.core.operations import Walk
from vitrail.engine.requests import Batch, Traced
from vitrail.engine.trace import TraceSpec, trace
from vitrail.methods.decomposition import Alti
from vitrail.methods.markov import BidirectionalHead, Tam
from vitrail.methods.registry import ALIASES, build_method, get_method, list_methods
from vitrail.methods.vtranm import VTranM
from vitrail.models.view import View
from vitrail.targets import Target

TARGET = torch.tensor([0, 3, 1])
SOME = ["timm_vit", "timm_vit_avg", "timm_deit_distilled", "timm_dinov2_reg4", "timm_siglip", "timm_beit", "hf_dinov2"]
PLAIN = [name for name in SOME if name not in ("timm_siglip", "timm_beit")]


def explained(name: str, method: str, **params: object) -> torch.Tensor:
    return build_method(method, viewed(name)[2], **params).attribute(batch(name), TARGET)


@pytest.mark.parametrize("name", SOME)
def test_rollout_rows_sum_to_one(name: str) -> None:
    view = viewed(name)[2]
    method = build_method("raw_attention", view)
    computed = traced(method, batch(name), TARGET, method.specs(range(view.num_layers)))
    assert torch.allclose(method.rollout(computed, 0).sum(1), torch.ones(3, dtype=DOUBLE))


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("name", SOME)
def test_the_state_of_tam_doubles_with_each_layer(name: str, start: int) -> None:
    view = viewed(name)[2]
    method = Tam(view)
    depth = view.num_layers
    computed = traced(method, batch(name), TARGET, method.specs(range(depth)))
    steps = depth - start - (0 if method.pools_by_attention else 1)
    assert torch.allclose(method.state(computed, start).sum(1), torch.full((3,), 2.0**steps, dtype=DOUBLE))


@pytest.mark.parametrize("name", SOME)
def test_the_rows_of_bt_h_sum_to_two_to_the_number_of_layers(name: str) -> None:
    view = viewed(name)[2]
    method = BidirectionalHead(view)
    computed = traced(method, batch(name), TARGET, method.specs(range(view.num_layers)))
    rows = method.rows(computed, 0).sum(-1)
    assert torch.allclose(rows, torch.full_like(rows, 2.0**view.num_layers))


@pytest.mark.parametrize("name", PLAIN)
def test_relevance_stays_one_through_the_blocks(name: str) -> None:
    view = viewed(name)[2]
    layers = range(view.num_layers + 1)
    computed = trace(view, batch(name), TARGET, rule=AlphaBeta(), keep={"gx"}, layers=layers)
    published = trace(view, batch(name), TARGET, rule=PublishedAlphaBeta(), keep={"gx"}, layers=layers)
    for layer in layers:
        assert torch.allclose(computed["gx"][layer].sum((1, 2)), torch.ones(3, dtype=DOUBLE), atol=1e-5)
    assert (published["gx"][0].sum((1, 2)).abs() > 2).all(), "the published rule doubles at each linear layer"


def test_relevance_of_one_linear_layer_in_closed_form() -> None:
    from vitrail.core.parts import Linear

    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 4, dtype=DOUBLE, requires_grad=True), torch.randn(3, 4, dtype=DOUBLE)
    incoming = torch.rand(2, 5, 3, dtype=DOUBLE)
    out = AlphaBeta().linear(x, Linear(weight, torch.randn(3, dtype=DOUBLE)))
    (computed,) = torch.autograd.grad(out, x, incoming)
    contributions = (x.detach()[..., None, :] * weight).clamp(min=0)  # (2, 5, 3, 4)
    expected = (contributions / contributions.sum(-1, keepdim=True) * incoming[..., None]).nan_to_num().sum(-2)
    reached = contributions.sum(-1) > 0  # an output without any positive contribution loses its relevance
    assert torch.allclose(computed, expected.nan_to_num(), atol=1e-6)
    assert torch.allclose(computed.sum(-1), (incoming * reached).sum(-1), atol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_gen_att_is_at_least_the_identity_and_vtranm_without_measures_is_gen_att(name: str) -> None:
    view = viewed(name)[2]
    assert (explained(name, "gen_att") >= 0).all()
    plain = explained(name, "vtranm", length=False, necc=False)
    assert relative(plain, explained(name, "gen_att") * 2**view.num_layers) < 1e-12
    assert (explained(name, "vtranm") >= 0).all()


@pytest.mark.parametrize("name", SOME)
def test_necc_sums_to_one(name: str) -> None:
    view = viewed(name)[2]
    method = VTranM(view, length=False)
    computed = traced(method, batch(name), TARGET, method.specs(range(view.num_layers)))
    for layer in range(view.num_layers):
        assert torch.allclose(method.mlp_weight(computed, layer).sum(1), torch.ones(3, dtype=DOUBLE))


@pytest.mark.parametrize("name", SOME)
def test_alti_rows_sum_to_one(name: str) -> None:
    view = viewed(name)[2]
    method = Alti(view)
    computed = traced(method, batch(name), TARGET, method.specs(range(view.num_layers)))
    for layer in range(view.num_layers):
        matrix = method.layer_map(computed, layer)
        assert torch.allclose(matrix.sum(-1), torch.ones_like(matrix[..., 0]))
        assert (matrix >= 0).all()


@pytest.mark.parametrize("method", ["attin", "attin_residual", "globenc", "globenc.plus", "attin_residual.rollout"])
def test_skipplus_leaves_out_the_biases_of_the_values_and_nothing_else(method: str) -> None:
    module = FAMILIES["timm_vit"].build(DOUBLE)
    images = batch("timm_vit")

    def both() -> list[torch.Tensor]:
        view = vitrail.wrap(module)
        return [build_method(method, view, protocol=p).attribute(images) for p in ("default", "skipplus")]

    assert relative(*both()) > 1e-3
    with torch.no_grad():
        for block in module.blocks:
            block.norm1.bias.zero_()
            block.attn.qkv.bias[2 * block.attn.qkv.in_features :] = 0
    assert relative(*both()) < 1e-12


def test_alti_in_chunks_is_alti_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = explained("timm_vit", "alti")
    monkeypatch.setattr("vitrail.methods.decomposition.CHUNK", 1)
    assert relative(explained("timm_vit", "alti"), whole) < 1e-12


@pytest.mark.parametrize("name", SOME)
def test_hires_cam_is_input_x_gradient_at_that_layer(name: str) -> None:
    for layer in range(viewed(name)[2].num_layers):
        computed = explained(name, "hires_cam", layer=layer, protocol="signed")
        assert torch.equal(computed, explained(name, "input_x_gradient", start_layer=layer))


@pytest.mark.parametrize("name", SOME)
def test_positive_elements_of_both_signs_make_hires_cam(name: str) -> None:
    """The contrast the other way round has the opposite gradient: E(g) − E(−g) is the whole product."""
    view, images, rival = viewed(name)[2], batch(name), torch.tensor([1, 1, 2])
    elements, whole = (
        build_method(method, view, protocol="signed") for method in ("grad_cam_elementwise", "hires_cam")
    )
    forth = elements.attribute(images, TARGET, against=rival)
    back = elements.attribute(images, rival, against=TARGET)
    expected = whole.attribute(images, TARGET, against=rival)
    assert (forth >= 0).all()
    assert (forth - back - expected).abs().max() < 1e-9 * forth.abs().max()


@pytest.mark.parametrize("name", SOME)
def test_integrated_gradients_add_up_to_the_change_of_the_score(name: str) -> None:
    view, images = viewed(name)[2], batch(name)
    for output in ("logit", "probability"):
        computed = build_method("integrated_gradients", view, steps=60, output=output).explain(images, TARGET)
        ends = [view.score(view.logits(x), TARGET, None, output) for x in (images, torch.zeros_like(images))]
        assert torch.allclose(computed.map.sum((1, 2)), ends[0] - ends[1], atol=1e-4)
        assert computed.extras["completeness_gap"].max() < 1e-4


@pytest.mark.parametrize("name", SOME)
def test_frozen_full_grad_is_complete(name: str) -> None:
    view, images = viewed(name)[2], batch(name)
    computed = build_method("full_grad", view, rule="frozen").explain(images, TARGET)
    plain = build_method("full_grad", view).explain(images, TARGET)
    assert computed.extras["completeness_gap"].max() < 1e-12
    assert plain.extras["completeness_gap"].max() > 1e-3, "ordinary gradients are not complete"


def test_epsilon_lrp_goes_to_gradient_x_input_of_the_frozen_network() -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit")
    pixels = images.clone().requires_grad_()
    from vitrail.core.rules import Frozen

    walk = Walk(view.architecture(), Frozen())
    y = walk.encode(walk.embed(pixels)).gather(1, TARGET[:, None]).sum()
    (gradient,) = torch.autograd.grad(y, pixels)
    assert relative(explained("timm_vit", "epsilon_lrp", epsilon=1e-13), (images * gradient).sum(1)) < 1e-9


@pytest.mark.parametrize(("name", "dtype"), in_both_precisions(few([*FAMILIES], 3)))
def test_smooth_grad_against_the_literal_mean_of_absolute_gradients(name: str, dtype: torch.dtype) -> None:
    family, module, _ = viewed(name)
    images, view = batch(name), viewed(name, dtype)[2]
    draw = torch.Generator().manual_seed(7)
    noises = [0.3 * torch.randn(images.shape[1:], generator=draw).to(DOUBLE).expand_as(images) for _ in range(4)]
    expected = literal.smooth_grad(family, module, images, TARGET, noises=noises)
    maps = build_method("smooth_grad", view, samples=4, sigma=0.3, seed=7).attribute(images.to(dtype), TARGET)
    assert maps.shape == expected.shape
    assert relative(maps.to(DOUBLE), expected) < (1e-9 if dtype == DOUBLE else 1e-4)


def test_another_seed_draws_another_smooth_grad() -> None:
    seven, eight = (explained("timm_vit", "smooth_grad", samples=4, sigma=0.3, seed=seed) for seed in (7, 8))
    assert relative(eight, seven) > 1e-3


@pytest.mark.parametrize("method", ["tam", "bt_h", "bt_t"])
def test_the_integral_costs_one_short_trace_per_step(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T scaled images cost T forwards, and only the last block is differentiated there."""
    view, recorded = viewed("timm_vit")[2], []
    encode = Walk.encode

    def counted(self: Walk, x: torch.Tensor) -> torch.Tensor:
        recorded.append(x)
        return encode(self, x)

    monkeypatch.setattr(Walk, "encode", counted)
    explained("timm_vit", method, steps=6)
    assert len(recorded) <= 6 + 3
    last = view.num_layers - 1
    computed = trace(view, batch("timm_vit"), TARGET, keep={"G"}, layers=[last])
    assert set(computed["G"]) == {last}


@functools.cache
def blind_view() -> View:
    """A head that ignores its input: every gradient is zero."""
    module = FAMILIES["timm_vit"].build(DOUBLE)
    with torch.no_grad():
        module.head.weight.zero_()
    return vitrail.wrap(module)


@pytest.mark.filterwarnings("ignore:.* gave the same score whatever was removed")
@pytest.mark.parametrize("name", [n for n in list_methods() if n not in ("random",)])
def test_zero_gradients_give_a_defined_map(name: str) -> None:
    """Nothing may become NaN."""
    view = blind_view()
    fewest = {"posterior": 8, "shapley": 4}.get(name, 2)
    quick = {
        key: fewest for key in ("steps", "samples", "masks", "permutations") if key in get_method(name).info.params
    }
    method = build_method(name, view, **quick, **required_parameters(name, view))
    computed = method.attribute(batch("timm_vit"), TARGET)
    assert computed.isfinite().all()
    if get_method(name).info.class_specific and get_method(name).info.family not in ("mask", "control"):
        assert computed.abs().max() < 1e-12


def features_and_gradient(view: View, images: torch.Tensor, target: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the second-to-last stage, (B, C, h, w) each."""
    stage = view.num_stages - 2
    request = Traced(
        Batch(view, images), Target(torch.tensor(target)), TraceSpec.of({"features", "gfeatures"}, [stage])
    )
    computed = answered(request)
    return computed["features"][stage], computed["gfeatures"][stage]


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_cams_on_hierarchical_features(name: str) -> None:
    _, module, view = viewed(name)
    images = batch(name, 2)
    h, g = features_and_gradient(view, images, [0, 1])
    expected = (h * g.mean((2, 3), keepdim=True)).sum(1)
    computed = build_method("grad_cam", view, protocol="signed").attribute(images, [0, 1])
    assert relative(computed, expected) < 1e-12
    shifted = expected.clamp(min=0) - expected.clamp(min=0).amin((1, 2), keepdim=True)
    for protocol in ("default", "authors"):
        computed = build_method("grad_cam", view, protocol=protocol).attribute(images, [0, 1])
        assert relative(computed, shifted / (shifted.amax((1, 2), keepdim=True) + 1e-7)) < 1e-12
    assert torch.allclose(h, view.features(images))
    assert not any(m._forward_hooks for m in module.modules())
    with pytest.raises(VitrailError, match="tokens and blocks"):
        build_method("grad_cam", view, rule="frozen").attribute(images)


def test_gradients_on_hierarchical_features_by_finite_differences() -> None:
    """Nudge the output of the watched block and compare the change of the logit."""
    _, module, view = viewed("timm_swin")
    images = batch("timm_swin", 1)
    _, g = features_and_gradient(view, images, [2])
    direction = torch.randn(g.shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    block = module.layers[-2].blocks[-1]
    scores = []
    for sign in (1, -1):
        nudge = sign * 1e-6 * direction.permute(0, 2, 3, 1)
        hook = block.register_forward_hook(lambda _, __, out, nudge=nudge: out + nudge)
        scores.append(float(module(images)[0, 2].detach()))
        hook.remove()
    assert abs((scores[0] - scores[1]) / 2e-6 - float((g * direction).sum())) < 1e-5


def test_rollout_options() -> None:
    view, images = viewed("timm_vit")[2], batch("timm_vit")
    maps = trace(view, images, keep={"A"})["A"]
    fusions = {"mean": lambda a: a.mean(1), "min": lambda a: a.amin(1), "max": lambda a: a.amax(1)}
    for fusion, fuse in fusions.items():
        row = F.one_hot(torch.zeros(3, dtype=torch.long), maps[0].shape[-1]).to(DOUBLE)
        for layer in reversed(range(view.num_layers)):
            matrix = fuse(maps[layer])
            row = 0.5 * row + 0.5 * torch.einsum("bi,bij->bj", row, matrix / matrix.sum(-1, keepdim=True))
        computed = build_method("rollout", view, fusion=fusion, protocol="rollout").attribute(images)
        assert relative(computed, row[:, view.num_prefix :].reshape(computed.shape)) < 1e-12
    canonical = build_method("rollout", view).attribute(images)
    assert relative(build_method("rollout", view, discard=0.5).attribute(images), canonical) > 1e-3
    with pytest.raises(VitrailError, match="discard"):
        build_method("rollout", view, discard=1.0).attribute(images)


@functools.cache
def deep_view(depth: int) -> View:
    module = timm.models.VisionTransformer(16, 8, num_classes=4, embed_dim=8, depth=depth, num_heads=2)
    randomize(module, seed=1)
    return vitrail.wrap(module.to(DOUBLE).eval())


@pytest.mark.parametrize(("method", "start"), [("rollout", 1), ("tam", 4), ("bt_h", 3), ("bt_t", 5)], ids=str)
def test_the_first_block_is_the_authors(method: str, start: int) -> None:
    """At most the last block; protocols that start at the first one say so."""
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    all_blocks = "rollout" if method == "rollout" else "tis"
    quick = {} if method == "rollout" else {"steps": 2}

    def computed(depth: int, **params: object) -> torch.Tensor:
        return build_method(method, deep_view(depth), **quick, **params).attribute(images, 1)

    assert torch.equal(computed(7), computed(7, start_layer=start))
    assert torch.equal(computed(7), computed(7, protocol="authors"))
    assert torch.equal(computed(7, protocol=all_blocks), computed(7, start_layer=0))
    assert relative(computed(7), computed(7, start_layer=0)) > 1e-3
    assert torch.equal(computed(1), computed(1, start_layer=0))


@pytest.mark.parametrize("method", [*cams.CAMS, "attn_cam"])
def test_the_default_of_cams_is_the_authors(method: str) -> None:
    maps = explained("timm_vit", method)
    assert torch.equal(maps, explained("timm_vit", method, protocol="authors"))
    assert maps.min() >= 0
    assert explained("timm_vit", f"{method}.plus").equal(explained("timm_vit", f"{method}.plus", protocol="signed"))


def test_vit_explain_rollout_step_by_step() -> None:
    """protocol="tis": 0.9 of the entries zeroed but (0, 0), columns divided by row sums, product, row 0, maximum 1."""
    view, images = viewed("timm_vit")[2], batch("timm_vit", 1)
    maps = trace(view, images, keep={"A"})["A"]
    tokens = maps[0].shape[-1]
    result = torch.eye(tokens, dtype=DOUBLE)
    for layer in range(view.num_layers):
        fused = maps[layer][0].mean(0).flatten().clone()
        for index in fused.argsort()[: int(0.9 * len(fused))]:
            if index != 0:
                fused[index] = 0
        a = (fused.view(tokens, tokens) + torch.eye(tokens, dtype=DOUBLE)) / 2
        result = (a / a.sum(-1)) @ result
    expected = result[0, 1:] / result[0, 1:].max()
    computed = build_method("rollout", view, protocol="tis").attribute(images)
    assert relative(computed.flatten(), expected) < 1e-12


def test_aliases_resolve() -> None:
    for alias, name in ALIASES.items():
        assert get_method(alias) == get_method(name)
    assert get_method("tokentm").info.name == "vtranm"
