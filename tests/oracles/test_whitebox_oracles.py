"""The white-box oracles against the invariants of the specifications, in double precision."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from tests.families import FAMILIES, Family, build, expected_logits, images
from tests.oracles import cams, decomposition, gradients, lrp, markov, network, relevance, transformation
from tests.oracles.attention import readout
from tests.oracles.decompx import decompose
from tests.oracles.network import Recorded, run
from torch import Tensor, nn

TARGET = torch.tensor([1, 3])
DIVERSE = (
    "timm_vit timm_vit_avg timm_vit_max timm_deit_distilled timm_vit_qk_norm timm_siglip timm_eva02_clip "
    "timm_aimv2 hf_dinov2_swiglu hf_beit_token"
).split()
WITHOUT_INNER_NORM = [name for name in DIVERSE if name != "timm_eva02_clip"]
FOR_LRP = "timm_vit timm_vit_avg timm_vit_avgmax timm_vit_max timm_deit_distilled timm_vit_qk_norm hf_dinov2".split()
diverse = pytest.mark.parametrize("name", DIVERSE)
without_inner_norm = pytest.mark.parametrize("name", WITHOUT_INNER_NORM)
for_lrp = pytest.mark.parametrize("name", FOR_LRP)
close = torch.testing.assert_close


@functools.cache
def case(name: str) -> tuple[Family, nn.Module, Tensor, Tensor]:
    return FAMILIES[name], build(name, torch.float64), images(name, 2, dtype=torch.float64), TARGET


@functools.cache
def recorded(name: str, frozen: bool = False) -> Recorded:
    return run(*case(name), frozen=frozen)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def target_logits(name: str, x: Tensor) -> Tensor:
    family, module, _, target = case(name)
    return inspect.unwrap(expected_logits)(family, module, x)[[0, 1], target]


# ------------------------------------------------------------------------------------------------------------- network


@diverse
@pytest.mark.parametrize("frozen", [False, True])
def test_forward_values_are_the_models(name: str, frozen: bool) -> None:
    family, module, x, _ = case(name)
    close(recorded(name, frozen).logits, expected_logits(family, module, x))
    assert all(parameter.grad is None for parameter in module.parameters())


@diverse
def test_pixel_gradients_are_the_models(name: str) -> None:
    x = case(name)[2].clone().requires_grad_()
    (expected,) = torch.autograd.grad(target_logits(name, x).sum(), x)
    close(network.pixel_gradient(*case(name)), expected)


@diverse
def test_frozen_input_x_gradient_is_decompx_and_complete_with_its_biases(name: str) -> None:
    family, module, x, target = case(name)
    trace = recorded(name, frozen=True)
    for l in range(trace.depth + 1):
        shares, bias = decompose(family, module, x, l)
        maps = gradients.full_grad(*case(name), layer=l, frozen=True)
        close(gradients.ixg(trace, l), shares[[0, 1], :, target])
        close((maps - gradients.ixg(trace, l)).sum(dim=1) + trace.pooled_bias, bias[[0, 1], target])
        close(maps.sum(dim=1) + trace.pooled_bias, trace.y)
    plain = gradients.full_grad(*case(name)).sum(dim=1) + recorded(name).pooled_bias
    assert not torch.allclose(plain, trace.y, rtol=1e-3)


@diverse
def test_probability_gradient_is_the_softmax_chain_rule(name: str) -> None:
    family, module, x, target = case(name)
    logits = recorded(name).logits
    p = logits.softmax(dim=-1)
    per_class = torch.stack([run(family, module, x, torch.full((2,), c)).gx[0] for c in range(logits.shape[1])], dim=1)
    row = per_class[[0, 1], target] - torch.einsum("bc,bcnd->bnd", p, per_class)
    close(run(*case(name), output="probability").gx[0], p[[0, 1], target][:, None, None] * row)


def test_only_read_out_rows_of_the_last_attention_have_a_gradient() -> None:
    assert recorded("timm_vit").G[-1][:, :, 1:].abs().max() == 0
    assert recorded("timm_vit_avg").G[-1][:, :, 0].abs().max() == 0
    assert recorded("timm_vit").gx[-1][:, 1:].abs().max() == 0
    assert gradients.ixg(recorded("timm_vit"), 3).sum(dim=1).abs().max() < 1e-6  # LayerNorm is scale-free


# ----------------------------------------------------------------------------------------------------------- gradients


@diverse
def test_full_grad_plus_counts_every_bias_once(name: str) -> None:
    trace = recorded(name)
    plus = [gradients.full_grad_plus(*case(name), start=l) for l in range(trace.depth)]
    cat = sum(gradients.ixg(trace, l) for l in range(trace.depth))
    close(plus[0] - cat, gradients.full_grad(*case(name)) - gradients.ixg(trace, 0))
    close(plus[0] - plus[1], gradients.ixg(trace, 0) + trace.bias[0])


@diverse
def test_att_ixg_weights_sum_to_one(name: str) -> None:
    trace = recorded(name)
    weights = gradients.att_ixg(*case(name), layer=1) / gradients.ixg(trace, 1)
    close(weights.sum(dim=1), ones(2))
    moved = gradients.att_ixg(*case(name), layer=0, pairing="output")
    close(moved, trace.A[0].mean(dim=(1, 2)) * gradients.ixg(trace, 1))


@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip", "hf_beit_token"])
def test_integrated_gradients_are_complete_and_captums(name: str) -> None:
    from captum.attr import IntegratedGradients

    x = case(name)[2]
    maps = gradients.integrated_gradients(*case(name), steps=40)
    expected = target_logits(name, x) - target_logits(name, torch.zeros_like(x))
    close(maps.sum(dim=(1, 2)), expected, rtol=1e-5, atol=1e-6)
    captum = IntegratedGradients(lambda x: target_logits(name, x)).attribute(x, n_steps=6, internal_batch_size=2)
    close(gradients.integrated_gradients(*case(name), steps=6), captum.sum(dim=1))


@diverse
def test_expected_gradients_from_the_zero_image_at_the_nodes_are_integrated_gradients(name: str) -> None:
    alphas = [0.5 - 0.75**0.5 / 3, 0.5 + 0.75**0.5 / 3]  # Gauss–Legendre: two nodes of equal weight
    references = [torch.zeros_like(case(name)[2][0])] * 2
    maps = gradients.expected_gradients(*case(name), references=references, alphas=alphas)
    close(maps, gradients.integrated_gradients(*case(name), steps=2))


@diverse
def test_smooth_grad_without_noise_is_the_absolute_gradient(name: str) -> None:
    expected = network.pixel_gradient(*case(name)).abs().sum(dim=1)
    close(gradients.smooth_grad(*case(name), noises=[torch.zeros_like(case(name)[2])] * 2), expected)


@diverse
def test_cam_identities(name: str) -> None:
    trace = recorded(name)
    h, g, everything = trace.x[1], trace.gx[1], slice(None)
    hires = cams.cam("hires_cam", *case(name), layer=1)
    close(hires, gradients.input_x_gradient(*case(name), layer=1))
    close(cams.grad_cam_elementwise(h, g, everything) - cams.grad_cam_elementwise(h, -g, everything), hires)
    constant = g.mean(dim=1, keepdim=True).expand_as(g)
    close(cams.grad_cam(h, constant, everything), cams.hires_cam(h, constant, everything))
    close(cams.xgrad_cam_plus(h.abs(), g, everything), cams.xgrad_cam(h.abs(), g, everything))
    for method in cams.CAMS:
        authors = cams.cam_authors(method, *case(name))
        assert authors.min() >= 0
        assert authors.max() <= 1


# ----------------------------------------------------------------------------------------------------------- relevance


@diverse
def test_gen_att_is_at_least_the_identity_and_starts_with_grad_sam(name: str) -> None:
    trace = recorded(name)
    R = relevance.gen_att_matrix(trace)
    assert (R - torch.eye(R.shape[-1])).min() >= 0
    maps = [relevance.gradient_weighted(trace, l) for l in range(trace.depth)]
    first_order = torch.eye(R.shape[-1], dtype=R.dtype) + sum(maps)
    assert (R - first_order).min() > -1e-12  # what is left are products of two and more non-negative maps
    rows = [relevance.gen_att_layer(*case(name), layer=l) for l in range(trace.depth)]
    rho = readout(*case(name)[:3])
    close(sum(rows), torch.einsum("bi,bij->bj", rho, first_order) - rho)


@diverse
def test_attn_cam_is_raw_attention_with_weighted_heads(name: str) -> None:
    trace, rho = recorded(name), readout(*case(name)[:3])
    rows, patches = network.head_rows(rho, trace.A[-1]), rho.shape[1] - trace.prefix
    close(rows.sum(dim=-1), ones(*rows.shape[:2]))
    alpha = trace.G[-1][..., -patches:].mean(dim=(1, 3))  # (B, queries); rows of A sum to one
    close(relevance.attn_cam(*case(name)).sum(dim=1), alpha[:, 0] if trace.has_pool else (rho * alpha).sum(dim=1))
    if trace.has_pool or (rho != 0).sum() == len(rho):  # one query: its heads are weighted rows
        weights = network.head_rows(rho, trace.G[-1])[..., trace.prefix :].mean(dim=-1, keepdim=True)
        close(relevance.attn_cam(*case(name)), (weights * rows).mean(dim=1))
    if trace.has_pool:
        close(rows.mean(dim=1), rho)


def test_two_read_tokens_are_explained_apart_and_then_averaged() -> None:
    """A distilled head: the map is the mean of the maps of its two tokens, which a mean of factors is not."""
    family, module, x, target = case("timm_deit_distilled")
    trace = recorded("timm_deit_distilled")
    A, G = trace.A[-1], trace.G[-1]
    maps = [(G[:, :, i, 2:].mean(dim=-1, keepdim=True) * A[:, :, i]).mean(dim=1) for i in (0, 1)]
    close(relevance.attn_cam(family, module, x, target), (maps[0] + maps[1]) / 2)
    W = markov.weights(family, module, x, target, 2)
    R = markov.product(trace, [markov.head_mixture(trace, l) for l in range(trace.depth)])
    expected = (W[:, 0] * R[:, 0] + W[:, 1] * R[:, 1]) / 2
    close(markov.bt_h(family, module, x, target, steps=2), expected)
    factors = (W[:, 0] + W[:, 1]) * (R[:, 0] + R[:, 1]) / 4
    assert not torch.allclose(factors, expected, rtol=1e-2)


def test_conservative_lrp_is_complete_without_the_mlp_and_attn_lrp_without_softmax() -> None:
    family, _, x, target = case("timm_vit")
    module = build("timm_vit", torch.float64)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if ("bias" in key and "patch" not in key) or "fc2" in key:
                parameter.zero_()
    y = expected_logits(family, module, x)[[0, 1], target]
    close(relevance.conservative_lrp(family, module, x, target).sum(dim=1), y)
    with torch.no_grad():  # constant scores: only v carries relevance, and A keeps the other half
        for block in module.blocks:
            block.attn.qkv.weight[: 2 * block.attn.qkv.in_features] = 0
    trace = run(family, module, x, target, rules=relevance.ATTN_LRP)
    frozen = run(family, module, x, target, frozen=True)
    R_v = (frozen.attention_out[-1] * frozen.gmid[-1]).sum(dim=(1, 2))
    close(gradients.ixg(trace, 2).sum(dim=1), gradients.ixg(frozen, 2).sum(dim=1) - R_v / 2)


# ---------------------------------------------------------------------------------------------------- Markov, products


@diverse
def test_markov_states_have_their_powers_of_two(name: str) -> None:
    trace = recorded(name)
    for start in range(trace.depth):
        steps = len(trace.A) - 1 - start
        close(markov.tam_state(*case(name), start).sum(dim=1), 2.0**steps * ones(2))
        maps = [markov.head_mixture(trace, l) for l in range(start, trace.depth)]
        R = markov.product(trace, maps)
        close(R.sum(dim=-1), 2.0 ** len(maps) * ones(*R.shape[:2]))


@without_inner_norm
def test_markov_maps_have_the_weights_of_scaled_images(name: str) -> None:
    family, module, x, target = case(name)
    averaged = markov.scaled_gradient(*case(name), steps=3)
    single = [run(family, module, alpha * x, target).G[-1] for alpha in (0, 0.5, 1)]
    close(averaged, sum(single) / 3)
    weights = markov.weight_row(*case(name), 3)
    assert (weights >= 0).all()
    for method in (markov.tam, markov.bt_h, markov.bt_t):
        scores = method(*case(name), steps=3)
        assert scores.shape == (2, family.tokens)
        assert (scores[weights == 0] == 0).all()


@without_inner_norm
def test_vtranm_ladder(name: str) -> None:
    trace = recorded(name)
    bare = transformation.vtranm(*case(name), length=False, necc=False)
    close(bare, 2**trace.depth * relevance.gen_att(*case(name)))
    assert transformation.vtranm(*case(name)).min() >= 0
    t = transformation.moved(trace.v[0], trace.recipe.blocks[0].attention.out, trace.recipe.blocks[0].scale1)
    necc = transformation.necc_of(trace.x[0][:, None], t)
    close(necc.sum(dim=-1), ones(*necc.shape[:2]))
    first = transformation.vtranm(*case(name), aggregate=False, length=False, necc=False)
    rho = readout(*case(name)[:3])
    close(first, rho + relevance.gen_att_layer(*case(name), layer=0))


# ------------------------------------------------------------------------------------------------------- decomposition


@without_inner_norm
def test_decomposition_vectors_add_up_to_the_stream(name: str) -> None:
    trace = recorded(name)
    with torch.no_grad():
        for l, block in enumerate(trace.recipe.blocks):
            V = decomposition.residual_vectors(block, trace.x[l])
            bias = block.attention.out.bias
            bias = 0 if bias is None else bias if block.scale1 is None else block.scale1 * bias
            close(V.sum(dim=2) + bias, trace.mid[l])
            close(decomposition.middle(block, trace.x[l]), trace.mid[l])


@without_inner_norm
@pytest.mark.parametrize("protocol", ["default", "skipplus"])
def test_alti_rows_sum_to_one(name: str, protocol: str) -> None:
    for M in decomposition.alti_maps(*case(name)[:3], protocol=protocol):
        close(M.sum(dim=-1), ones(*M.shape[:2]))
        assert (M == 0).any()
    close(decomposition.alti(*case(name)[:3], protocol=protocol).sum(dim=1), ones(2))


def test_alti_of_one_source_and_of_none() -> None:
    y = torch.tensor([[[1.0, -2.0], [3.0, 1.0]]])
    V = torch.zeros(1, 2, 2, 2)
    V[0, 0, 1] = y[0, 0]  # everything in token 0 comes from token 1; nothing helps token 1
    close(decomposition.contributions(y, V), torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]))


@without_inner_norm
def test_globenc_without_the_second_norm_is_attin_with_residual(name: str) -> None:
    family, module, x, _ = case(name)
    blocks, stream = decomposition.inputs(family, module, x)
    with torch.no_grad():
        V = decomposition.residual_vectors(blocks[0], stream[0])
        branch = decomposition.globenc_vectors(blocks[0], stream[0], layer_scale=False) - V
    close(V.norm(dim=-1), decomposition.attin_residual_maps(family, module, x)[0])
    if isinstance(blocks[0].norm2, nn.LayerNorm):  # the normed vectors carry γ and have no mean
        close((branch / blocks[0].norm2.weight).sum(dim=-1), torch.zeros_like(branch[..., 0]))


# ----------------------------------------------------------------------------------------------------------------- LRP


@for_lrp
def test_trans_att_relevance_totals_one_and_the_published_rule_doubles(name: str) -> None:
    ours, published = (lrp.relevance(*case(name), variant=variant) for variant in ("ours", "orig"))
    for total in ours.totals:
        close(total, ones(2), rtol=1e-6, atol=0)
    close(published.totals[-1], 2 * ones(2), rtol=1e-6, atol=0)
    family = case(name)[0]
    assert lrp.trans_att(*case(name)).min() >= 0
    assert lrp.partial_lrp(*case(name), variant="orig").shape == (2, family.tokens)
    assert lrp.lrp_pixels(*case(name)).shape == (2, *family.image_size)


@pytest.mark.parametrize("name", ["timm_siglip", "timm_eva02_clip", "timm_aimv2", "hf_beit_token"])
def test_relevance_propagation_refuses_what_has_no_rule(name: str) -> None:
    with pytest.raises(NotImplementedError):
        lrp.relevance(*case(name))


def test_rules_in_closed_form() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, R = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((2, 3), (4, 3), (2, 4)))
    positive = (x[:, None, :] * weight).clamp(min=0)  # (batch, out, in)
    expected = (positive / positive.sum(dim=-1, keepdim=True) * R[:, :, None]).sum(dim=1)
    close(lrp.linear_rule("ours", x, weight, R), expected)
    a, b = lrp.add_rule("ours", x, torch.randn_like(x), R[:, :3])
    close((a + b).sum(dim=1), R[:, :3].sum(dim=1))
    m, n = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    parts = lrp.product_rule(m, n, m @ n)
    for part in parts:
        close(part.sum(dim=(1, 2)), (m @ n).sum(dim=(1, 2)) / 2)


@diverse
def test_epsilon_lrp_without_epsilon_is_frozen_input_x_gradient(name: str) -> None:
    trace = recorded(name, frozen=True)
    for l, R in enumerate(lrp.epsilon_lrp(*case(name), eps=0.0)):
        close(R, trace.x[l] * trace.gx[l])
    if name != "timm_aimv2":  # it has a norm in its embedding
        pixels = case(name)[2] * network.pixel_gradient(*case(name), frozen=True)
        close(lrp.epsilon_lrp_pixels(*case(name), eps=0.0), pixels.sum(dim=1))
    assert not torch.allclose(lrp.epsilon_lrp(*case(name), eps=0.01)[0], trace.x[0] * trace.gx[0], rtol=1e-3)


@pytest.mark.parametrize("name", ["timm_clip", "hf_clip", "timm_aimv2"])
def test_epsilon_lrp_freezes_the_norms_of_the_embedding(name: str) -> None:
    family, module, x, _ = case(name)
    e = lrp.embedding(family, module, x)
    columns = e.columns.detach().requires_grad_()
    patches = network.norm(e.norm, e.convolution(columns), network.FROZEN, network.Tape(), "end")
    positions = (e.before - e.norm(e.convolution(e.columns))).detach()
    tokens = network.norm(e.pre_norm, patches + positions, network.FROZEN, network.Tape(), "end")
    close(tokens, recorded(name).x[0][:, family.prefix :])
    (gradient,) = torch.autograd.grad((tokens * recorded(name, frozen=True).gx[0][:, family.prefix :]).sum(), columns)
    close(lrp.epsilon_lrp_pixels(*case(name), eps=0.0), e.fold(columns.detach() * gradient).detach())


# --------------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize("name", ["timm_vit", "timm_siglip", "hf_dinov2"])
def test_a_batch_is_its_images_one_by_one(name: str) -> None:
    family, module, x, target = case(name)
    methods = [gradients.full_grad, relevance.gen_att, relevance.attn_lrp, transformation.vtranm]
    methods += [functools.partial(m, steps=2) for m in (markov.bt_h, markov.bt_t, markov.tam)]
    methods += [functools.partial(lrp.epsilon_lrp_pixels, eps=0.01)]
    if name != "timm_siglip":
        methods += [lrp.trans_att, lrp.partial_lrp, lrp.lrp_pixels]
    for method in methods:
        single = [method(family, module, x[i : i + 1], target[i : i + 1]) for i in range(2)]
        close(method(family, module, x, target), torch.cat(single), rtol=1e-7, atol=1e-9)
