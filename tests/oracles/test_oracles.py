"""The oracles against the libraries themselves, in double precision."""

from __future__ import annotations

import functools

import pytest
import torch
from tests.families import (
    FAMILIES,
    HIERARCHICAL,
    OPAQUE,
    PAIRED,
    Family,
    build,
    expected_embedding,
    expected_logits,
    few,
    find,
    images,
)
from tests.oracles.attention import attention_maps, pool_map, readout, rollout, run_blocks
from tests.oracles.decompx import decompose, decompose_embedding, gate_of
from tests.oracles.masked_forward import masked_logits
from tests.oracles.pairs import split
from tests.oracles.recipe import describe
from torch import Tensor, nn

BATCH = 2


every_family = pytest.mark.parametrize("name", FAMILIES)


@functools.cache
def case(name: str) -> tuple[Family, nn.Module, Tensor]:
    return FAMILIES[name], build(name, torch.float64), images(name, BATCH, dtype=torch.float64)


def random_keep(family: Family, seed: int = 0) -> Tensor:
    """(B, k): a different half of the patches for every image."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(family.patches, generator=generator) for _ in range(BATCH)])
    return order[:, : family.patches // 2]


@every_family
def test_keeping_every_patch_gives_the_model_itself(name: str) -> None:
    family, module, x = case(name)
    keep = torch.arange(family.patches).expand(BATCH, -1)
    torch.testing.assert_close(masked_logits(family, module, x, keep), expected_logits(family, module, x))


@every_family
def test_masking_depends_on_the_set_of_kept_patches_and_on_nothing_else(name: str) -> None:
    family, module, x = case(name)
    keep = random_keep(family)
    logits = masked_logits(family, module, x, keep)
    assert not torch.allclose(logits, expected_logits(family, module, x), atol=1e-3)
    torch.testing.assert_close(masked_logits(family, module, x, keep.flip(1)), logits)


STEMS = ("timm_hybrid", "timm_vitamin")  # their patches overlap


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in STEMS])
def test_a_removed_patch_cannot_be_seen(name: str) -> None:
    family, module, x = case(name)
    keep = random_keep(family)
    pixels = torch.zeros(BATCH, 1, *family.grid, dtype=x.dtype).flatten(2).scatter(2, keep[:, None], 1.0)
    pixels = pixels.view(BATCH, 1, *family.grid)
    shown = nn.functional.interpolate(pixels, size=family.image_size, mode="nearest")
    changed = x * shown + 7 * (1 - shown)
    torch.testing.assert_close(masked_logits(family, module, changed, keep), masked_logits(family, module, x, keep))


@every_family
def test_decompx_adds_up_to_the_logits_from_every_layer(name: str) -> None:
    family, module, x = case(name)
    logits = expected_logits(family, module, x)
    for layer in range(len(describe(family, module, x).blocks) + 1):
        contributions, bias = decompose(family, module, x, layer)
        assert contributions.shape == (BATCH, family.tokens, logits.shape[1])
        torch.testing.assert_close(contributions.sum(dim=1) + bias, logits)


@every_family
def test_after_the_last_block_only_pooled_tokens_contribute(name: str) -> None:
    family, module, x = case(name)
    contributions, _ = decompose(family, module, x, len(describe(family, module, x).blocks))
    pooled = readout(family, module, x) > 0
    assert torch.equal(contributions.abs().sum(dim=-1) > 0, pooled)


@every_family
def test_attention_rows_sum_to_one_and_are_not_uniform(name: str) -> None:
    family, module, x = case(name)
    maps = attention_maps(family, module, x)
    pooled = pool_map(family, module, x)
    for weights in maps if pooled is None else [*maps, pooled]:
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones_like(weights[..., 0]))
        assert weights.amax(dim=-1).mean() > 2 / family.tokens


@every_family
def test_readout_and_rollout_are_distributions(name: str) -> None:
    family, module, x = case(name)
    rho = readout(family, module, x)
    assert rho.shape == (BATCH, family.tokens)
    rolled = rollout(attention_maps(family, module, x), rho)
    for row in (rho, rolled):
        torch.testing.assert_close(row.sum(dim=1), torch.ones(BATCH, dtype=row.dtype))
        assert (row >= 0).all()


@every_family
def test_activations_are_of_order_one(name: str) -> None:
    family, module, x = case(name)
    last, _ = run_blocks(describe(family, module, x))
    assert 0.3 < last.std() < 8


@every_family
def test_no_parameter_is_left_at_a_constant(name: str) -> None:
    _, module, _ = case(name)
    tensors = dict(module.named_parameters()) | {k: b for k, b in module.named_buffers() if k.endswith("k_bias")}
    constant = [key for key, tensor in tensors.items() if tensor.numel() > 1 and tensor.std() < 0.01]
    assert not constant


@pytest.mark.parametrize("name", few([*FAMILIES, *HIERARCHICAL], 6))
def test_families_are_reproducible_and_leave_the_random_state_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    module, x = build(name), images(name, BATCH)
    again, other = build(name), build(name, seed=1)
    logits = expected_logits(find(name), module, x)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(logits, expected_logits(find(name), again, x))
    assert not torch.allclose(logits, expected_logits(find(name), other, x))
    assert not module.training


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_networks_hold_the_class_they_are_opaque_for(name: str) -> None:
    make, kind = OPAQUE[name]
    assert kind in {type(part).__name__ for part in make().modules()}


@every_family
def test_gates_times_input_are_the_activations(name: str) -> None:
    family, module, x = case(name)
    z = torch.linspace(-6, 6, 49, dtype=torch.float64)
    for block in describe(family, module, x).blocks:
        torch.testing.assert_close(gate_of(block.mlp.act, z) * z, block.mlp.act(z))


@pytest.mark.parametrize("name", few([name for name in FAMILIES if name not in PAIRED], 2))
def test_vectors_add_up_to_the_embedding_and_pairs_to_the_similarity(name: str) -> None:
    family, module, x = case(name)
    expected = expected_embedding(family, module, x)
    vectors, bias = decompose_embedding(family, module, x, 1, cosine=False)
    torch.testing.assert_close(vectors.sum(1) + bias, expected)
    vectors, bias = decompose_embedding(family, module, x, 0, cosine=True)
    torch.testing.assert_close(vectors.sum(1) + bias, nn.functional.normalize(expected, dim=1))
    shares, rest = split((vectors[0], bias[0]), (vectors[1], bias[1]), family.prefix)
    assert shares.shape == (family.patches, family.patches)
    assert float(shares.sum()) + rest == pytest.approx(float(nn.functional.cosine_similarity(*expected, dim=0)))
