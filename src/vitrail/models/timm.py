"""timm's Vision Transformers in canonical form: VisionTransformer, its distilled kind, Eva and Beit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.models import parts
from vitrail.models.evaluation import evaluation_copy
from vitrail.models.translate import (
    activation,
    fused_qkv,
    gamma,
    head_of,
    linear,
    needed_norm,
    norm,
    positions,
    prefix_tokens,
    refuse,
)

NETWORKS = ("VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit")
BLOCKS = {"Block", "EvaBlock"}
ATTENTIONS = {"Attention", "AttentionRope", "EvaAttention"}
HIERARCHICAL = ("SwinTransformer", "SwinTransformerV2")


def is_timm(module: nn.Module) -> bool:
    return type(module).__module__.startswith("timm.")


def describe(
    module: Any, size: tuple[int, int], head: nn.Module | None = None, pool: str | None = None
) -> parts.Architecture:
    """The canonical form of a timm network whose input is ``size`` (H, W)."""
    if type(module).__name__ not in NETWORKS:
        raise refuse(module, "it is not a plain Vision Transformer")
    embedding = _embedding(module, size)
    grid = (size[0] // embedding.weight.shape[-2], size[1] // embedding.weight.shape[-1])
    ropes = _ropes(module, grid)
    shared = getattr(module, "rel_pos_bias", None)
    shared_bias = None if shared is None else shared().detach()
    blocks = tuple(_block(b, rope, shared_bias) for b, rope in zip(module.blocks, ropes, strict=True))
    own = _head(module) if head is None else None
    return parts.Architecture(embedding, blocks, head_of(head, pool, norm(module.norm), own, norm(module.fc_norm)))


def native_size(module: Any) -> tuple[int, int]:
    """(H, W) the network was built for."""
    size = module.patch_embed.img_size
    if size is None:
        raise refuse(module, "it has no fixed input size; give img_size=")
    return size[0], size[1]


def takes_other_sizes(module: Any) -> bool:
    return bool(getattr(module, "dynamic_img_size", False))


def _embedding(module: Any, size: tuple[int, int]) -> parts.Embedding:
    patch = module.patch_embed
    if type(patch).__name__ != "PatchEmbed":
        raise refuse(patch, "only a plain patch convolution can embed the image (no hybrid stem)")
    tokens = [module.cls_token, getattr(module, "dist_token", None), getattr(module, "reg_token", None)]
    found = [t for t in tokens if t is not None]
    prefix = prefix_tokens(*found) if found else patch.proj.weight.detach().new_zeros(0, patch.proj.out_channels)
    grid = (size[0] // patch.proj.kernel_size[0], size[1] // patch.proj.kernel_size[1])
    table = module.pos_embed
    if table is not None and takes_other_sizes(module):
        from timm.layers import resample_abs_pos_embed

        own = 0 if module.no_embed_class else prefix.shape[0]
        table = resample_abs_pos_embed(table, new_size=list(grid), old_size=patch.grid_size, num_prefix_tokens=own)
    return parts.Embedding(
        patch.proj.weight.detach(),
        None if patch.proj.bias is None else patch.proj.bias.detach(),
        prefix,
        positions(table, prefix.shape[0], grid[0] * grid[1]),
        norm(patch.norm),
        norm(getattr(module, "norm_pre", None)),
    )


def _ropes(module: Any, grid: tuple[int, int]) -> list[parts.Rope | None]:
    """The rotary tables of each block; "mixed" models have one per block, others share one."""
    source = getattr(module, "rope", None)
    if source is None:
        return [None] * len(module.blocks)
    source = evaluation_copy(source)  # in training mode the tables may be augmented at random
    table = (source.get_embed(shape=grid) if takes_other_sizes(module) else source.get_embed()).detach()
    tables = list(table) if getattr(module, "rope_mixed", False) else [table] * len(module.blocks)
    return [_rope(t, block.attn) for t, block in zip(tables, module.blocks, strict=True)]


def _rope(table: Tensor, attention: Any) -> parts.Rope:
    sin, cos = table.chunk(2, dim=-1)
    return parts.Rope(sin, cos, bool(getattr(attention, "rotate_half", False)))


def _block(block: Any, rope: parts.Rope | None, shared_bias: Tensor | None) -> parts.Block:
    if type(block).__name__ not in BLOCKS:
        raise refuse(
            block, "only serial pre-norm blocks can be explained (no parallel, post-norm or differential ones)"
        )
    return parts.Block(
        needed_norm(block.norm1),
        _attention(block.attn, rope, shared_bias),
        needed_norm(block.norm2),
        _mlp(block.mlp),
        gamma(block.gamma_1 if hasattr(block, "gamma_1") else block.ls1),
        gamma(block.gamma_2 if hasattr(block, "gamma_2") else block.ls2),
    )


def _attention(attention: Any, rope: parts.Rope | None, shared_bias: Tensor | None) -> parts.Attention:
    if type(attention).__name__ not in ATTENTIONS:
        raise refuse(attention, "only plain softmax attention can be explained (no differential or windowed one)")
    if getattr(attention, "gate", None) is not None or getattr(attention, "num_kv_groups", 1) > 1:
        raise refuse(attention, "gated and grouped-query attention are not written as operations")
    q, k, v, together = _qkv(attention)
    bias = shared_bias
    if getattr(attention, "relative_position_bias_table", None) is not None:
        own = attention._get_rel_pos_bias()[0].detach()
        bias = own if bias is None else own + bias
    return parts.Attention(
        attention.num_heads,
        q,
        k,
        v,
        linear(attention.proj),
        attention.scale,
        norm(getattr(attention, "q_norm", None)),
        norm(getattr(attention, "k_norm", None)),
        rope,
        bias,
        norm(getattr(attention, "norm", None)),
        together,
    )


def _qkv(attention: Any) -> tuple[parts.Linear, parts.Linear, parts.Linear, parts.Linear | None]:
    if attention.qkv is None:
        return linear(attention.q_proj), linear(attention.k_proj), linear(attention.v_proj), None
    bias = linear(attention.qkv).bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    return fused_qkv(attention.qkv.weight, bias)


def _mlp(mlp: Any) -> parts.Mlp:
    kind = type(mlp).__name__
    inner, act = norm(getattr(mlp, "norm", None)), activation(mlp.act)
    if kind == "Mlp":
        return parts.Mlp(linear(mlp.fc1), linear(mlp.fc2), act, None, inner)
    if kind == "SwiGLU":
        return parts.Mlp(linear(mlp.fc1_g), linear(mlp.fc2), act, linear(mlp.fc1_x), inner)
    if kind == "GluMlp":
        half = mlp.fc1.out_features // 2
        first, second = linear(mlp.fc1, slice(half)), linear(mlp.fc1, slice(half, None))
        gate, up = (second, first) if mlp.gate_last else (first, second)
        return parts.Mlp(gate, linear(mlp.fc2), act, up, inner)
    raise refuse(mlp, "only Mlp, GluMlp and SwiGLU are known")


def _head(module: Any) -> parts.Head:
    if isinstance(module.head, nn.Identity):
        raise refuse(module, "it has no classification head (num_classes is 0)")
    if not isinstance(module.head, nn.Linear):
        raise refuse(module.head, "as a head only one linear layer is known")
    if hasattr(module, "head_dist"):
        return parts.Head(norm(module.norm), "pair", (linear(module.head), linear(module.head_dist)))
    kinds: dict[str, parts.PoolKind] = {
        "token": "token", "avg": "mean", "max": "max", "avgmax": "avgmax", "map": "attention"
    }  # fmt: skip
    if module.global_pool not in kinds:
        raise refuse(module, f"global_pool={module.global_pool!r} is not known")
    pool = getattr(module, "attn_pool", None)
    return parts.Head(
        norm(module.norm),
        kinds[module.global_pool],
        (linear(module.head),),
        norm(module.fc_norm),
        # an attention pool of Eva sees its prefix tokens too
        bool(getattr(module, "pool_include_prefix", pool is not None)),
        None if pool is None else _attention_pool(pool),
    )


def _attention_pool(pool: Any) -> parts.AttentionPool:
    if type(pool).__name__ != "AttentionPoolLatent" or pool.pos_embed is not None or pool.latent_len != 1:
        raise refuse(pool, "only a plain attention pool with one query is known")
    width = pool.kv.in_features
    q = linear(pool.q) if isinstance(pool.q, nn.Linear) else parts.Linear(torch.eye(width).to(pool.latent))
    k, v = linear(pool.kv, slice(width)), linear(pool.kv, slice(width, None))
    attention = parts.Attention(
        pool.num_heads, q, k, v, linear(pool.proj), pool.scale, norm(pool.q_norm), norm(pool.k_norm)
    )
    return parts.AttentionPool(
        pool.latent.detach()[0], attention, norm(pool.norm), None if pool.mlp is None else _mlp(pool.mlp)
    )
