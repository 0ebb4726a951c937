"""timm's Vision Transformers in canonical form: VisionTransformer, its distilled kind, Eva and Beit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.models.clone import evaluation_clone
from vitrail.models.translation import (
    activation,
    check_dropout,
    classifier,
    fused_qkv,
    gamma,
    linear,
    mean_of_patches,
    needed_norm,
    no_pool,
    norm,
    patch_convolution,
    positions,
    prefix_tokens,
    refuse,
)

NETWORKS = ("VisionTransformer", "VisionTransformerDistilled", "Eva", "Beit")
BLOCKS = {"Block", "EvaBlock"}
ATTENTIONS = {"Attention", "AttentionRope", "EvaAttention"}
HIERARCHICAL = ("SwinTransformer", "SwinTransformerV2")
POOLS: dict[str, parts.PoolKind] = {
    "token": "token", "avg": "mean", "max": "max", "avgmax": "avgmax", "map": "attention", "patches": "patches"
}  # fmt: skip


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
    check_dropout(module, "pos_drop", "patch_drop", "head_drop")
    return parts.Architecture(embedding, blocks, _head(module, head, pool))


def logits(module: Any, images: Tensor, head: nn.Module | None, pool: str | None) -> Tensor:
    """The network's own logits; with ``head``, those of the head on what the network pools, or on its pooled tokens."""
    if head is None:
        return module(images)
    if isinstance(module.head, nn.Identity) and pool == module.global_pool and not hasattr(module, "head_dist"):
        return head(module(images))
    tokens = module.forward_features(images)
    start = 0 if _includes_prefix(module, pool) else module.num_prefix_tokens
    match pool:
        case "token":
            pooled = tokens[:, 0]
        case "avg":
            pooled = tokens[:, start:].mean(1)
        case "patches":
            return mean_of_patches(head, tokens[:, start:])
        case _:
            pooled = module.attn_pool(tokens[:, start:])
    return head(module.fc_norm(pooled))


def native_size(module: Any) -> tuple[int, int]:
    """(H, W) the network was built for."""
    size = module.patch_embed.img_size
    if size is None:
        raise refuse(module, "it has no fixed input size; give img_size=")
    return size[0], size[1]


def takes_other_sizes(module: Any) -> bool:
    return bool(getattr(module, "dynamic_img_size", False))


adapts_to_input = takes_other_sizes


def _embedding(module: Any, size: tuple[int, int]) -> parts.Embedding:
    patch = module.patch_embed
    if type(patch).__name__ != "PatchEmbed":
        raise refuse(patch, "only a plain patch convolution can embed the image (no hybrid stem)")
    convolution = patch_convolution(patch.proj)
    tokens = [module.cls_token, getattr(module, "dist_token", None), getattr(module, "reg_token", None)]
    present = [t for t in tokens if t is not None]
    prefix = prefix_tokens(*present) if present else convolution.weight.new_zeros(0, patch.proj.out_channels)
    grid = (size[0] // patch.proj.kernel_size[0], size[1] // patch.proj.kernel_size[1])
    table = module.pos_embed
    if table is not None and takes_other_sizes(module):
        from timm.layers import resample_abs_pos_embed

        positioned = 0 if module.no_embed_class else prefix.shape[0]
        table = resample_abs_pos_embed(
            table, new_size=list(grid), old_size=patch.grid_size, num_prefix_tokens=positioned
        )
    return parts.Embedding(
        weight=convolution.weight,
        bias=convolution.bias,
        prefix=prefix,
        positions=positions(table, prefix.shape[0], grid[0] * grid[1]),
        patch_norm=norm(patch.norm),
        norm=norm(getattr(module, "norm_pre", None)),
    )


def _ropes(module: Any, grid: tuple[int, int]) -> list[parts.Rope | None]:
    """The rotary tables of each block; "mixed" models have one per block, others share one."""
    source = getattr(module, "rope", None)
    if source is None:
        return [None] * len(module.blocks)
    source = evaluation_clone(source)  # in training mode the tables may be augmented at random
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
    check_dropout(block, "drop_path1", "drop_path2")
    return parts.Block(
        norm1=needed_norm(block.norm1),
        attention=_attention(block.attn, rope, shared_bias),
        norm2=needed_norm(block.norm2),
        mlp=_mlp(block.mlp),
        scale1=gamma(block.gamma_1 if hasattr(block, "gamma_1") else block.ls1),
        scale2=gamma(block.gamma_2 if hasattr(block, "gamma_2") else block.ls2),
    )


def _attention(attention: Any, rope: parts.Rope | None, shared_bias: Tensor | None) -> parts.Attention:
    if type(attention).__name__ not in ATTENTIONS:
        raise refuse(attention, "only plain softmax attention can be explained (no differential or windowed one)")
    if getattr(attention, "gate", None) is not None or getattr(attention, "num_kv_groups", 1) > 1:
        raise refuse(attention, "gated and grouped-query attention are not supported")
    check_dropout(attention, "attn_drop", "proj_drop")
    q, k, v, together = _qkv(attention)
    bias = shared_bias
    if getattr(attention, "relative_position_bias_table", None) is not None:
        block_bias = attention._get_rel_pos_bias()[0].detach()
        bias = block_bias if bias is None else block_bias + bias
    return parts.Attention(
        heads=attention.num_heads,
        q=q,
        k=k,
        v=v,
        proj=linear(attention.proj),
        scale=_scale(attention, q.weight.shape[0] // attention.num_heads),
        q_norm=norm(getattr(attention, "q_norm", None)),
        k_norm=norm(getattr(attention, "k_norm", None)),
        rope=rope,
        bias=bias,
        norm=norm(getattr(attention, "norm", None)),
        together=together,
    )


def _scale(attention: Any, width: int) -> float:
    """The factor of the scores: fused attention does not look at ``attention.scale``."""
    return width**-0.5 if attention.fused_attn else float(attention.scale)


def _qkv(attention: Any) -> tuple[parts.Linear, parts.Linear, parts.Linear, parts.Linear | None]:
    if attention.qkv is None:
        return linear(attention.q_proj), linear(attention.k_proj), linear(attention.v_proj), None
    bias = linear(attention.qkv).bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    return fused_qkv(attention.qkv.weight, bias)


def _mlp(mlp: Any) -> parts.Mlp:
    kind = type(mlp).__name__
    check_dropout(mlp, "drop1", "drop2")
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
    raise refuse(mlp, "only Mlp, GluMlp and SwiGLU are supported")


def _head(module: Any, head: nn.Module | None, pool: str | None) -> parts.Head:
    """The model's own head, or a given one behind the pooling asked for."""
    if head is None:
        if isinstance(module.head, nn.Identity):
            raise refuse(module, "it has no classification head (num_classes is 0)")
        if hasattr(module, "head_dist"):
            return parts.Head(norm(module.norm), "pair", (linear(module.head), linear(module.head_dist)))
        head, pool = module.head, module.global_pool
        if pool not in POOLS:
            raise refuse(module, f"global_pool={pool!r} is not supported")
    elif pool not in POOLS or (pool == "token" and module.cls_token is None):
        raise no_pool(module, pool)
    if pool == "map" and getattr(module, "attn_pool", None) is None:
        raise no_pool(module, pool)
    return classifier(
        head,
        norm(module.norm),
        POOLS[pool],
        pooled_norm=None if pool == "patches" else norm(module.fc_norm),
        include_prefix=_includes_prefix(module, pool),
        attention_pool=_attention_pool(module.attn_pool) if pool == "map" else None,
    )


def _includes_prefix(module: Any, pool: str | None) -> bool:
    """Whether its own pooling sees the prefix tokens too; an attention pool of Eva does."""
    return pool == module.global_pool and bool(getattr(module, "pool_include_prefix", pool == "map"))


def _attention_pool(pool: Any) -> parts.AttentionPool:
    if type(pool).__name__ != "AttentionPoolLatent" or pool.pos_embed is not None or pool.latent_len != 1:
        raise refuse(pool, "only a plain attention pool with a single query is supported")
    check_dropout(pool, "proj_drop")
    width = pool.kv.in_features
    q = linear(pool.q) if isinstance(pool.q, nn.Linear) else parts.Linear(torch.eye(width).to(pool.latent))
    k, v = linear(pool.kv, slice(width)), linear(pool.kv, slice(width, None))
    attention = parts.Attention(
        heads=pool.num_heads,
        q=q,
        k=k,
        v=v,
        proj=linear(pool.proj),
        scale=_scale(pool, pool.head_dim),
        q_norm=norm(pool.q_norm),
        k_norm=norm(pool.k_norm),
    )
    return parts.AttentionPool(
        pool.latent.detach()[0], attention, norm(pool.norm), None if pool.mlp is None else _mlp(pool.mlp)
    )
