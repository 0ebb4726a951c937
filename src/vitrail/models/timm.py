"""timm's Vision Transformers in canonical form: VisionTransformer, distilled, with relative positions; Eva; Beit."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.models import names, plain
from vitrail.models.clone import evaluation_clone, widened
from vitrail.models.translation import (
    activation,
    bare,
    beside,
    check_dropout,
    classifier,
    fused_qkv,
    gamma,
    linear,
    mean_of_patches,
    needed_norm,
    no_pool,
    norm,
    opaque,
    patch_convolution,
    positions,
    prefix_tokens,
    refuse,
    summed,
)

PACKAGES = ("timm.", plain.__name__)
# Those of language models, with a classifier
ENCODERS = ("Qwen3VitClassifier", "DeepseekVitClassifier", "Gemma4VitClassifier")
VIT = ("VisionTransformer", "VisionTransformerDistilled", "VisionTransformerRelPos")
NETWORKS = (*VIT, "Eva", "Beit", "Cait", "NaFlexVit", *ENCODERS)
PRE_NORM = {"Block", "EvaBlock", "RelPosBlock", "DeepseekVitBlock", "LayerScaleBlock", "LayerScaleBlockClassAttn"}
POST_NORM = {"ResPostBlock", "ResPostRelPosBlock", "EvaBlockPostNorm"}
ATTENTIONS = {
    "Attention", "AttentionRope", "EvaAttention", "RelPosAttention", "TalkingHeadAttn", "ClassAttn", "Gemma4Attention"
}  # fmt: skip
HIERARCHICAL = ("SwinTransformer", "SwinTransformerV2")
POOLS: dict[str, parts.PoolKind] = {
    "token": "token", "avg": "mean", "max": "max", "avgmax": "avgmax", "map": "attention", "patches": "patches"
}  # fmt: skip


def is_timm(module: nn.Module) -> bool:
    return type(module).__module__.startswith(PACKAGES)


def describe(
    module: Any, size: tuple[int, int], head: nn.Module | None = None, pool: str | None = None
) -> parts.Architecture:
    """The canonical form of a timm network whose input is ``size`` (H, W)."""
    if type(module).__name__ not in NETWORKS:
        raise refuse(module, "it is not a plain Vision Transformer")
    if type(module).__name__ in ENCODERS:
        return _describe_encoder(module, size, head)
    embedding = _flexible_embedding(module, size) if hasattr(module, "embeds") else _embedding(module, size)
    grid = (size[0] // embedding.patch[0], size[1] // embedding.patch[1])
    ropes = _ropes(module, grid)
    shared_bias = _shared_bias(module)
    blocks = [_block(b, rope, shared_bias) for b, rope in zip(module.blocks, ropes, strict=True)]
    if type(module).__name__ == "Cait":  # its class token joins in blocks of its own, which change nothing else
        late = [_block(b, None, None) for b in module.blocks_token_only]
        blocks = [*(replace(block, waiting=1) for block in blocks), *(replace(block, asking=1) for block in late)]
    check_dropout(module, "pos_drop", "patch_drop", "head_drop")
    return parts.Architecture(embedding, tuple(blocks), _head(module, head, pool))


def _describe_encoder(module: Any, size: tuple[int, int], head: nn.Module | None) -> parts.Architecture:
    """The vision encoder of a language model, whose patches a classifier averages."""
    encoder, merging = module.encoder, ("merger", "aligner")
    if (
        any(getattr(encoder, name, None) is not None for name in merging)
        or getattr(module, "encoder_pool", "") == "soft"
    ):
        raise _beyond(module, "patches are merged behind its last block")
    if head is not None or isinstance(module.head, nn.Identity) or module.global_pool != "avg":
        raise refuse(module, "only its own classifier of the mean of all patches can be explained")
    is_gemma = type(module).__name__ == "Gemma4VitClassifier"
    convolution, table, rope = _gemma_patches(encoder, size) if is_gemma else _encoder_patches(encoder, size)
    embedding = parts.Embedding(
        weight=convolution.weight,
        bias=convolution.bias,
        prefix=convolution.weight.new_zeros(0, convolution.weight.shape[0]),
        positions=table,
        patch_norm=norm(getattr(encoder.patch_embed, "norm", None)),
    )
    blocks = tuple(_block(block, rope, None) for block in encoder.blocks)
    check_dropout(module, "head_drop")
    last = norm(getattr(encoder, "norm", None))
    return parts.Architecture(embedding, blocks, classifier(module.head, last, "mean", pooled_norm=norm(module.norm)))


def _encoder_patches(encoder: Any, size: tuple[int, int]) -> tuple[parts.Linear, Tensor | None, parts.Rope]:
    """The patch convolution, positions and rotary tables of the encoders of Qwen3 and DeepSeek."""
    convolution = patch_convolution(encoder.patch_embed.proj)
    width, _, *patch = convolution.weight.shape
    nothing = convolution.weight.new_zeros(1, size[0] // patch[0], size[1] // patch[1], width)
    table, rope = evaluation_clone(encoder)._pos_embed(nothing)
    positions = table[0].detach() if hasattr(encoder, "pos_embed") else None
    return convolution, positions, _rope(rope.detach(), encoder.blocks[0].attn)


@torch.no_grad()
def _gemma_patches(encoder: Any, size: tuple[int, int]) -> tuple[parts.Linear, Tensor, parts.Rope]:
    """The same of Gemma 4, which reads 2x − 1, and rotates by rows and columns in a half of the width each."""
    source = encoder.patch_embed
    _check_grid(encoder, source.patch_size, size)
    projection = linear(source.input_proj)
    weight = _folded(2 * projection.weight, source.patch_size, channels_last=False)
    grid = (size[0] // source.patch_size[0], size[1] // source.patch_size[1])
    coordinates, _ = source._default_patch_coord(1, *grid, weight.device)
    places = coordinates.flip(-1)
    # timm multiplies these tables by one-hot vectors of the places: the same numbers, in seconds for a large grid
    columns, rows = source.position_embedding_table.detach()
    table = columns[places[0, :, 0]] + rows[places[0, :, 1]]
    cos, sin = encoder.rotary_emb(weight, places)
    return parts.Linear(weight, -projection.weight.sum(1)), table, parts.Rope(sin[0], cos[0], half=True, sections=2)


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
    return head(module.fc_norm(pooled) if hasattr(module, "fc_norm") else pooled)


def own_pool(module: Any) -> str | None:
    """How a network without a head pools its tokens; None = it has a head."""
    if not isinstance(getattr(module, "head", None), nn.Identity) or type(module).__name__ in ENCODERS:
        return None
    return module.global_pool or ("token" if _has_class_token(module) else "avg")


def _has_class_token(module: Any) -> bool:
    return getattr(module.embeds if hasattr(module, "embeds") else module, "cls_token", None) is not None


def is_projecting(module: Any) -> bool:
    """Whether the head is the projection of a CLIP tower, whose outputs are an embedding and no classes."""
    if not is_timm(module) or type(module).__name__ not in NETWORKS:
        return False
    config = getattr(module, "pretrained_cfg", None) or {}
    name = ".".join(filter(None, (config.get("architecture"), config.get("tag"))))
    return bool(name) and module.num_classes == config.get("num_classes") and names.is_projecting(name)


def width(module: Any) -> int:
    """The number of channels of what a head reads."""
    return int(module.head_hidden_size)


def native_size(module: Any) -> tuple[int, int]:
    """(H, W) the network was built for."""
    if hasattr(module, "embeds"):
        size = module.embeds.default_img_size
    else:
        size = getattr(getattr(module, "encoder", module).patch_embed, "img_size", None)
    size = size or ((getattr(module, "pretrained_cfg", None) or {}).get("input_size") or (None,))[1:]
    if not size:
        raise refuse(module, "it has no fixed input size; give img_size=")
    return size[0], size[1]


def takes_other_sizes(module: Any) -> bool:
    return bool(getattr(module, "dynamic_img_size", type(module).__name__ in ("NaFlexVit", *ENCODERS)))


adapts_to_input = takes_other_sizes


def _beyond(part: Any, why: str) -> VitrailError:
    """The error for a part without a canonical form: timm's own makes a black box, any other is refused."""
    return opaque(part, why) if is_timm(part) else refuse(part, why)


def _embedding(module: Any, size: tuple[int, int]) -> parts.Embedding:
    patch = module.patch_embed
    stem, convolution = _stem(patch), _patch_convolution(patch)
    tokens = [module.cls_token, getattr(module, "dist_token", None), getattr(module, "reg_token", None)]
    present = [t for t in tokens if t is not None]
    prefix = prefix_tokens(*present) if present else convolution.weight.new_zeros(0, convolution.weight.shape[0])
    cell = convolution.weight.shape[2:] if stem is None else stem.patch
    grid = (size[0] // cell[0], size[1] // cell[1])
    table = getattr(module, "pos_embed", None)
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
        patch_norm=norm(getattr(patch, "norm", None)),
        norm=norm(getattr(module, "norm_pre", None)),
        stem=stem,
    )


@torch.no_grad()
def _flexible_embedding(module: Any, size: tuple[int, int]) -> parts.Embedding:
    """The patches of a NaFlexViT, which takes images of any shape, for one shape."""
    source, patch = module.embeds, module.embeds.patch_size
    _check_grid(module, patch, size)
    check_dropout(source, "pos_drop")
    if not source.is_linear:
        convolution = patch_convolution(source.proj)
    elif source.norm_input is not None:
        raise _beyond(source.norm_input, "only the bare pixels of a patch can be embedded")
    else:
        projection = linear(source.proj)
        convolution = parts.Linear(_folded(projection.weight, patch, source.channels_last), projection.bias)
    grid = [size[0] // patch[0], size[1] // patch[1]]
    table = convolution.weight.new_zeros(1, grid[0] * grid[1], convolution.weight.shape[0])
    if source.pos_embed_type != "none":
        factorized = source.pos_embed_type == "factorized"
        (source._apply_factorized_pos_embed if factorized else source._apply_learned_pos_embed)(table, grid)
    present = [t for t in (source.cls_token, source.reg_token) if t is not None]
    prefix = prefix_tokens(*present) if present else convolution.weight.new_zeros(0, convolution.weight.shape[0])
    return parts.Embedding(
        weight=convolution.weight,
        bias=convolution.bias,
        prefix=prefix,
        positions=None if source.pos_embed_type == "none" else positions(table, len(prefix), table.shape[1]),
        patch_norm=norm(source.norm),
        norm=norm(module.norm_pre),
    )


def _check_grid(module: Any, patch: tuple[int, int], size: tuple[int, int]) -> None:
    """Refuses images that do not divide into patches, which the network fails at or pads."""
    if size[0] % patch[0] or size[1] % patch[1]:
        raise VitrailError(
            f"{type(module).__name__} divides images into patches of {patch[0]}×{patch[1]} pixels, which {size[0]}×"
            f"{size[1]} pixels are no multiple of: give another img_size."
        )


def _folded(weight: Tensor, patch: tuple[int, int], channels_last: bool) -> Tensor:
    """A layer that reads the pixels of a patch in a row, as a convolution (d, C, height, width)."""
    if channels_last:
        return weight.unflatten(1, (*patch, -1)).permute(0, 3, 1, 2)
    return weight.unflatten(1, (-1, *patch))


def _stem(patch: Any) -> parts.Stem | None:
    """The convolutional network before the patches of a hybrid."""
    if type(patch).__name__ == "PatchEmbed":
        return None
    if type(patch).__name__ != "HybridEmbed":
        raise _beyond(patch, "only a patch convolution, or one behind a convolutional stem, can embed the image")
    (height, width), (rows, columns) = patch.img_size, patch.grid_size
    if height % rows or width % columns:
        raise _beyond(patch, f"{height}×{width} pixels do not divide into {rows}×{columns} equal patches")
    backbone = evaluation_clone(patch.backbone)

    def run(images: Tensor) -> Tensor:
        features = widened(backbone, images)
        return features[-1] if isinstance(features, list | tuple) else features

    return parts.Stem(run, (height // rows, width // columns))


def _patch_convolution(patch: Any) -> parts.Linear:
    if isinstance(patch.proj, nn.Identity):  # of a stem whose features are tokens already
        weight = next(patch.backbone.parameters())
        width = patch.feature_dim
        return parts.Linear(torch.eye(width, device=weight.device, dtype=weight.dtype)[:, :, None, None])
    return patch_convolution(patch.proj)


def _shared_bias(module: Any) -> Tensor | None:
    """(H, n, n): the relative position bias that all blocks share."""
    if getattr(module, "rel_pos_bias", None) is not None:
        return module.rel_pos_bias().detach()
    shared = getattr(module, "shared_rel_pos", None)
    return None if shared is None else evaluation_clone(shared).get_bias()[0].detach()


def _ropes(module: Any, grid: tuple[int, int]) -> list[parts.Rope | None]:
    """The rotary tables of each block; "mixed" models have one per block, others share one."""
    source = getattr(module, "rope", None)
    if source is None:
        return [None] * len(module.blocks)
    source = evaluation_clone(source)  # in training mode the tables may be augmented at random
    table = (source.get_embed(shape=grid) if takes_other_sizes(module) else source.get_embed()).detach()
    is_mixed = getattr(module, "rope_mixed", False) or getattr(module, "rope_is_mixed", False)
    tables = list(table) if is_mixed else [table] * len(module.blocks)
    return [_rope(t, block.attn) for t, block in zip(tables, module.blocks, strict=True)]


def _rope(table: Tensor, attention: Any) -> parts.Rope:
    sin, cos = table.chunk(2, dim=-1)
    return parts.Rope(sin, cos, bool(getattr(attention, "rotate_half", False)))


def _block(block: Any, rope: parts.Rope | None, shared_bias: Tensor | None) -> parts.Block:
    block = bare(block)
    kind = type(block).__name__
    if kind == "Gemma4Block":
        return _sandwich_block(block, rope)
    if kind == "ParallelScalingBlock":
        return _parallel_block(block, rope, shared_bias)
    if kind == "ParallelThingsBlock":
        return _things_block(block, rope, shared_bias)
    if kind not in PRE_NORM | POST_NORM:
        raise _beyond(block, "no rules are known for blocks of this kind")
    check_dropout(block, "drop_path", "drop_path1", "drop_path2")
    attention = _attention(block.attn, rope, shared_bias)
    if kind in POST_NORM:
        return parts.Block(
            None, attention, None, _mlp(block.mlp), post1=needed_norm(block.norm1), post2=needed_norm(block.norm2)
        )
    return parts.Block(
        norm1=needed_norm(block.norm1),
        attention=attention,
        norm2=needed_norm(block.norm2),
        mlp=_mlp(block.mlp),
        scale1=gamma(block.gamma_1 if hasattr(block, "gamma_1") else getattr(block, "ls1", None)),
        scale2=gamma(block.gamma_2 if hasattr(block, "gamma_2") else getattr(block, "ls2", None)),
    )


def _sandwich_block(block: Any, rope: parts.Rope | None) -> parts.Block:
    """A norm before and one behind each branch."""
    check_dropout(block, "drop_path")
    return parts.Block(
        norm1=needed_norm(block.norm1),
        attention=_attention(block.attn, rope, None),
        norm2=needed_norm(block.norm3),
        mlp=_mlp(block.mlp),
        post1=needed_norm(block.norm2),
        post2=needed_norm(block.norm4),
    )


def _parallel_block(block: Any, rope: parts.Rope | None, shared_bias: Tensor | None) -> parts.Block:
    """Attention and MLP side by side, with one projection for all that they read."""
    check_dropout(block, "attn_drop", "mlp_drop", "drop_path")
    ends = list(accumulate(block.in_split, initial=0))
    fc1, q, k, v = (linear(block.in_proj, slice(*rows)) for rows in pairwise(ends))
    if block.mlp_bias is not None:
        fc1 = parts.Linear(fc1.weight, block.mlp_bias.detach())
    if block.out_proj is None:
        proj, fc2 = linear(block.attn_out_proj), linear(block.mlp_out_proj)
    else:
        both, width = linear(block.out_proj), q.weight.shape[0]
        proj, fc2 = parts.Linear(both.weight[:, :width], both.bias), parts.Linear(both.weight[:, width:])
    attention = parts.Attention(
        heads=block.num_heads,
        q=q,
        k=k,
        v=v,
        proj=proj,
        scale=_scale(block, block.head_dim),
        q_norm=norm(block.q_norm),
        k_norm=norm(block.k_norm),
        rope=rope,
        bias=shared_bias,
    )
    scale = gamma(block.ls)
    mlp = parts.Mlp(fc1, fc2, activation(block.mlp_act))
    return parts.Block(needed_norm(block.in_norm), attention, None, mlp, scale, scale, parallel=True)


def _things_block(block: Any, rope: parts.Rope | None, shared_bias: Tensor | None) -> parts.Block:
    """Several attentions side by side, then several MLPs: one attention with all their heads, one wide MLP.

    Their norms have the same statistics: weight and bias of each go into the layers that read it.
    """
    for branch in (*block.attns, *block.ffns):
        check_dropout(branch, "drop_path")
    attentions = [_attention(branch.attn, rope, shared_bias) for branch in block.attns]
    mlps = [_mlp(branch.mlp) for branch in block.ffns]
    first, second = ([needed_norm(branch.norm) for branch in branches] for branches in (block.attns, block.ffns))
    scales1, scales2 = ([gamma(branch.ls) for branch in branches] for branches in (block.attns, block.ffns))
    if any(a.q_norm or a.k_norm or a.norm for a in attentions) or any(m.up or m.norm for m in mlps):
        raise _beyond(block, "only plain attention and MLPs can stand side by side")
    q, k, v = (beside([getattr(a, name) for a in attentions], first) for name in ("q", "k", "v"))
    attention = parts.Attention(
        heads=sum(a.heads for a in attentions),
        q=q,
        k=k,
        v=v,
        proj=summed([a.proj for a in attentions], scales1),
        scale=attentions[0].scale,
        rope=rope,
        bias=None if shared_bias is None else torch.cat([shared_bias] * len(attentions)),
    )
    mlp = parts.Mlp(beside([m.fc1 for m in mlps], second), summed([m.fc2 for m in mlps], scales2), mlps[0].activation)
    plain = (parts.Norm(norms[0].width, norms[0].eps, rms=norms[0].rms) for norms in (first, second))
    return parts.Block(next(plain), attention, next(plain), mlp)


def _attention(attention: Any, rope: parts.Rope | None, shared_bias: Tensor | None) -> parts.Attention:
    if type(attention).__name__ not in ATTENTIONS:
        raise _beyond(attention, "only plain softmax attention can be explained (no differential or windowed one)")
    check_dropout(attention, "attn_drop", "proj_drop")
    q, k, v, together = _qkv(attention)
    bias = shared_bias
    if getattr(attention, "relative_position_bias_table", None) is not None:
        block_bias = attention._get_rel_pos_bias()[0].detach()
        bias = block_bias if bias is None else block_bias + bias
    elif getattr(attention, "rel_pos", None) is not None:
        bias = evaluation_clone(attention.rel_pos).get_bias()[0].detach()
    return parts.Attention(
        heads=attention.num_heads,
        q=q,
        k=k,
        v=v,
        proj=_linear(attention.o_proj if hasattr(attention, "o_proj") else attention.proj),
        scale=_scale(attention, q.weight.shape[0] // attention.num_heads),
        q_norm=norm(getattr(attention, "q_norm", None)),
        k_norm=norm(getattr(attention, "k_norm", None)),
        v_norm=norm(getattr(attention, "v_norm", None)),
        rope=rope,
        bias=bias,
        norm=norm(getattr(attention, "norm", None)),
        together=together,
        gate=None if getattr(attention, "gate", None) is None else linear(attention.gate),
        talk=_talk(attention) if type(attention).__name__ == "TalkingHeadAttn" else None,
    )


def _linear(module: Any) -> parts.Linear:
    """A linear layer, also one of Gemma 4 that does not clip."""
    if type(module).__name__ != "Gemma4ClippableLinear":
        return linear(module)
    if module.use_clipped:
        bounds = [module.input_min, module.input_max, module.output_min, module.output_max]
        if any(bound.is_meta or bool(bound.isfinite()) for bound in bounds):
            raise _beyond(module, "it clips its input and output (model.set_clamp_enabled(False) turns that off)")
    return linear(module.linear)


def _talk(attention: Any) -> parts.Talk:
    return parts.Talk(linear(attention.proj_l).weight, linear(attention.proj_w))


def _scale(attention: Any, width: int) -> float:
    """The factor of the scores: fused attention does not look at ``attention.scale``."""
    if type(attention).__name__ == "Gemma4Attention":
        return 1.0
    return width**-0.5 if getattr(attention, "fused_attn", False) else float(attention.scale)


def _qkv(attention: Any) -> tuple[parts.Linear, parts.Linear, parts.Linear, parts.Linear | None]:
    if getattr(attention, "qkv", None) is None:  # each by itself
        layers = [getattr(attention, name, None) or getattr(attention, f"{name}_proj") for name in "qkv"]
        q, k, v = (_linear(layer) for layer in layers)
        return q, _repeated(k, attention), _repeated(v, attention), None
    layer = linear(attention.qkv)
    bias = layer.bias
    if getattr(attention, "q_bias", None) is not None:
        bias = torch.cat([attention.q_bias, attention.k_bias, attention.v_bias])
    return fused_qkv(layer.weight, bias)


def _repeated(layer: parts.Linear, attention: Any) -> parts.Linear:
    """Keys or values that several heads share, once for each head."""
    groups = getattr(attention, "num_kv_groups", 1)
    if groups == 1:
        return layer
    tensors = (layer.weight, layer.bias)
    weight, bias = (
        None if t is None else t.unflatten(0, (attention.num_kv_heads, -1)).repeat_interleave(groups, 0).flatten(0, 1)
        for t in tensors
    )
    assert weight is not None
    return parts.Linear(weight, bias)


def _mlp(mlp: Any) -> parts.Mlp:
    kind = type(mlp).__name__
    check_dropout(mlp, "drop", "drop1", "drop2")
    if kind == "Gemma4GatedMlp":
        gate, up, down = (_linear(layer) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
        return parts.Mlp(gate, down, activation(mlp.act), up)
    if kind not in ("Mlp", "SwiGLU", "GluMlp", "GeGluMlp"):
        raise _beyond(mlp, "only Mlp, GluMlp, GeGluMlp and SwiGLU are supported")
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
    return parts.Mlp(linear(mlp.w0), linear(mlp.w2), act, linear(mlp.w1), first=inner)


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
    elif pool not in POOLS or (pool == "token" and not _has_class_token(module)):
        raise no_pool(module, pool)
    if pool == "map" and getattr(module, "attn_pool", None) is None:
        raise no_pool(module, pool)
    return classifier(
        head,
        norm(module.norm),
        POOLS[pool],
        pooled_norm=None if pool == "patches" else norm(getattr(module, "fc_norm", None)),
        include_prefix=_includes_prefix(module, pool),
        attention_pool=_attention_pool(module.attn_pool) if pool == "map" else None,
    )


def _includes_prefix(module: Any, pool: str | None) -> bool:
    """Whether its own pooling sees the prefix tokens too; an attention pool of Eva does."""
    return pool == module.global_pool and bool(getattr(module, "pool_include_prefix", pool == "map"))


def _attention_pool(pool: Any) -> parts.AttentionPool:
    if type(pool).__name__ != "AttentionPoolLatent" or pool.pos_embed is not None or pool.latent_len != 1:
        raise _beyond(pool, "only a plain attention pool with a single query is supported")
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
