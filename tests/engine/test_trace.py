"""The engine against the literal forward decomposition, and against autograd."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.families import FAMILIES, few
from tests.helpers import DOUBLE, batch, in_both_precisions, relative, viewed
from tests.oracles.attention import attention_maps, pool_map
from tests.oracles.decompx import decompose
from torch import Tensor

from vitrail import VitrailError
from vitrail.core.rules import RULES, activation_gate, get_rule
from vitrail.engine.trace import Trace, trace

TARGET = torch.tensor([0, 3, 1])
SHARES = {"x", "gx", "bias"}


@functools.cache
def frozen(name: str, dtype: torch.dtype = DOUBLE) -> Trace:
    _, _, view = viewed(name, dtype)
    depth = view.num_layers
    return trace(view, batch(name, dtype=dtype), TARGET, rule="frozen", keep=SHARES, layers=range(depth + 1))


def shares(result: Trace, layer: int) -> Tensor:
    return (result["x"][layer] * result["gx"][layer]).sum(-1)


@pytest.mark.parametrize(("name", "dtype"), in_both_precisions(few([*FAMILIES], 2)))
def test_one_backward_is_the_forward_decomposition_from_every_layer(name: str, dtype: torch.dtype) -> None:
    family, module, _ = viewed(name)
    tolerance = 1e-9 if dtype == DOUBLE else 1e-4
    result, rows = frozen(name, dtype), torch.arange(len(TARGET))
    for layer in range(result.num_layers + 1):
        contributions, bias = decompose(family, module, batch(name), layer)
        assert relative(shares(result, layer).to(DOUBLE), contributions[rows, :, TARGET]) < tolerance
        assert relative(result.bias_from(layer).to(DOUBLE), bias[rows, TARGET]) < tolerance


@pytest.mark.parametrize(("name", "dtype"), in_both_precisions(FAMILIES))
def test_shares_and_biases_add_up_to_the_logit_at_every_layer(name: str, dtype: torch.dtype) -> None:
    result = frozen(name, dtype)
    for layer in range(result.num_layers + 1):
        gap = result.y - shares(result, layer).sum(1) - result.bias_from(layer)
        assert (gap.abs() / result.y.abs().clamp(min=1)).max() < (1e-12 if dtype == DOUBLE else 1e-5)


@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip", "timm_dinov2_giant"])
def test_the_share_that_a_layer_adds_is_its_biases(name: str) -> None:
    result = frozen(name)
    for layer in range(result.num_layers):
        step = shares(result, layer + 1).sum(1) - shares(result, layer).sum(1)
        assert torch.allclose(step, result.bias[layer].sum(1), atol=1e-12)


@pytest.mark.parametrize("name", ["timm_vit", "timm_deit_distilled", "timm_beit", "timm_eva02_base", "hf_dinov2"])
def test_plain_gradients_are_those_of_the_module(name: str) -> None:
    family, module, view = viewed(name)
    images = batch(name)
    result = trace(view, images, TARGET, keep={"x", "gx"}, layers=[0])
    tokens = view.embed(images).detach().requires_grad_()
    pixels = images.clone().requires_grad_()
    logits = module(pixels) if family.library == "timm" else module(pixels).logits
    (expected,) = torch.autograd.grad(logits.gather(1, TARGET[:, None]).sum(), pixels)
    (through,) = torch.autograd.grad(view.embed(again := images.clone().requires_grad_()), again, result["gx"][0])
    assert relative(through, expected) < 1e-9
    assert torch.equal(result["x"][0], tokens.detach())


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_maps_are_the_literal_ones_and_reading_them_changes_nothing(name: str) -> None:
    family, module, view = viewed(name)
    images = batch(name)
    result = trace(view, images, TARGET, keep={"A", "G", "v"})
    for layer, expected in enumerate(attention_maps(family, module, images)):
        assert relative(result["A"][layer], expected) < 1e-9
        assert result["G"][layer].shape == expected.shape
    pool = pool_map(family, module, images)
    assert (result.num_layers in result["A"]) == (pool is not None)
    if pool is not None:
        assert relative(result["A"][result.num_layers], pool) < 1e-9
    assert relative(result.logits, view.logits(images)) < 1e-9


@pytest.mark.parametrize("rule", ["plain", "frozen"])
def test_attention_gradients_by_finite_differences(rule: str) -> None:
    """∂y/∂A, with the map of one block nudged by hand in the literal forward."""
    _, module, view = viewed("timm_vit")
    images = batch("timm_vit", 1)
    last = view.num_layers - 1
    kept = {"A", "G", "v", "attention_out", "mid"}
    result = trace(view, images, torch.tensor([2]), rule=rule, keep=kept, layers=[last])
    block = module.blocks[last]
    direction = torch.randn(result["A"][last].shape, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    step = 1e-6

    def score(sign: int) -> Tensor:
        mixed = ((result["A"][last] + sign * step * direction) @ result["v"][last]).transpose(1, 2).flatten(2)
        stream = result["mid"][last] - result["attention_out"][last] + block.attn.proj(mixed)
        return module.forward_head(module.norm(stream + block.mlp(block.norm2(stream))))[0, 2]

    slope = (score(1) - score(-1)) / (2 * step)
    exact = (result["G"][last] * direction).sum()
    if rule == "plain":
        assert abs(slope - exact) < 1e-6 * abs(exact)
    else:  # frozen gates and norms behind the map: another slope, on purpose
        assert abs(slope - exact) > 1e-3 * abs(exact)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip", "timm_vit_max", "timm_beit"])
def test_batches_do_not_mix(name: str, rule: str) -> None:
    """Another order, another company, another target per image: the same maps."""
    _, _, view = viewed(name)
    images, keep = batch(name, 4), {"x", "gx", "A", "G", "bias"}
    target, order = torch.tensor([0, 3, 1, 4]), torch.tensor([2, 0, 3, 1])
    together = trace(view, images, target, rule=rule, keep=keep)
    shuffled = trace(view, images[order], target[order], rule=rule, keep=keep)
    alone = [trace(view, images[i : i + 1], target[i : i + 1], rule=rule, keep=keep) for i in range(4)]
    for kind in ("gx", "G"):
        for layer, value in together[kind].items():
            assert relative(shuffled[kind][layer], value[order]) < 1e-9
            assert relative(torch.cat([t[kind][layer] for t in alone]), value) < 1e-9
    assert relative(torch.cat([t.bias_from(0) for t in alone]), together.bias_from(0)) < 1e-9


def test_the_graph_is_cut_below_the_lowest_layer() -> None:
    _, _, view = viewed("timm_vit")
    whole = trace(view, batch("timm_vit"), TARGET, keep=SHARES)
    upper = trace(view, batch("timm_vit"), TARGET, keep=SHARES, layers=[1])
    assert set(upper["x"]) == set(upper["gx"]) == {1}
    assert torch.equal(upper["gx"][1], whole["gx"][1])
    assert min(upper.bias) == 1
    assert torch.allclose(upper.bias_from(1), whole.bias_from(1))


def test_against_and_probability() -> None:
    _, _, view = viewed("timm_vit")
    images, rival = batch("timm_vit"), torch.tensor([1, 1, 2])
    chosen, other = (trace(view, images, t) for t in (TARGET, rival))
    both = trace(view, images, TARGET, against=rival)
    assert relative(both["gx"][0], chosen["gx"][0] - other["gx"][0]) < 1e-9
    assert torch.allclose(both.y, chosen.y - other.y)
    by_probability = trace(view, images, TARGET, output="probability")
    p = chosen.logits.softmax(1)
    every = torch.stack([trace(view, images, torch.full((3,), c))["gx"][0] for c in range(5)])  # (C, B, n, d)
    expected = p.gather(1, TARGET[:, None])[..., None] * (chosen["gx"][0] - torch.einsum("bc,cbnd->bnd", p, every))
    assert relative(by_probability["gx"][0], expected) < 1e-9


def test_default_target_is_the_predicted_class() -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit")
    predicted = view.logits(images).argmax(1)
    assert torch.equal(trace(view, images)["gx"][0], trace(view, images, predicted)["gx"][0])


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"])
def test_gates_are_the_quotient_and_finite_at_zero(kind: str) -> None:
    z = torch.cat([torch.linspace(-12, 12, 2001, dtype=DOUBLE), torch.tensor([0.0, -1e-12, 1e-300], dtype=DOUBLE)])
    gate = activation_gate(z, kind)
    assert gate.isfinite().all()
    assert torch.allclose(gate * z, get_rule("plain").activate(z, kind), atol=1e-12)
    assert kind == "relu" or gate[z == 0][0] == 0.5


def test_errors_say_what_is_expected() -> None:
    _, _, view = viewed("timm_vit")
    images = batch("timm_vit")
    for arguments, message in (
        ({"keep": {"nonsense"}}, "nonsense"),
        ({"layers": [99]}, "does not fit|do not fit"),
        ({"layers": []}, "do not fit"),
        ({"rule": "nonsense"}, "unknown rule"),
        ({"output": "nonsense"}, "logit"),
    ):
        with pytest.raises(VitrailError, match=message):
            trace(view, images, **arguments)
    with pytest.raises(KeyError, match="not kept"):
        trace(view, images)["A"]


def test_nothing_of_the_model_is_in_the_graph() -> None:
    family = FAMILIES["timm_vit"]
    module = family.build()
    import vitrail

    result = trace(vitrail.wrap(module), batch("timm_vit", dtype=torch.float32))
    assert not any(t.requires_grad for t in result["x"].values())
    assert all(p.grad is None for p in module.parameters())
