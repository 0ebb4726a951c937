"""CLIP models of open_clip whose image tower is a plain Vision Transformer, its own or one of timm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.models import timm
from vitrail.models.translation import (
    activation,
    check_dropout,
    fused_qkv,
    gamma,
    linear,
    needed_norm,
    norm,
    patch_convolution,
    positions,
    prefix_tokens,
    refuse,
)

MODELS = ("CLIP", "CustomTextCLIP")


def is_open_clip(module: Any) -> bool:
    return type(module).__module__.startswith("open_clip.") and type(module).__name__ in MODELS


def image_features(model: Any, images: Tensor) -> Tensor:
    """(B, D), before they get length 1."""
    features: Tensor = model.encode_image(images)
    return features


def text_features(model: Any, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """(K, D), likewise."""
    features: Tensor = model.encode_text(tokenizer(list(texts)).to(model.logit_scale.device))
    return features


def token_counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Of the whole texts: calling a tokenizer cuts them off."""
    inner = getattr(tokenizer, "tokenizer", None)  # of Hugging Face
    if inner is not None:
        return [len(tokens) for tokens in inner(list(texts), verbose=False)["input_ids"]]
    return [len(tokenizer.encode(text)) + 2 for text in texts]  # and the tokens of start and end


def most_tokens(model: Any) -> int:
    """The longest text that it takes."""
    return int(model.context_length)


def native_size(model: Any) -> tuple[int, int]:
    size = model.visual.image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def takes_other_sizes(model: Any) -> bool:
    return False


adapts_to_input = takes_other_sizes


def describe_images(model: Any, size: tuple[int, int]) -> tuple[parts.Architecture, parts.Linear | None]:
    """The image tower, and the projection of what it pools, if it has one; the weights of the head mean nothing."""
    visual = model.visual
    if type(visual).__name__ == "TimmModel" and type(visual.trunk).__name__ in timm.NETWORKS:
        return _of_timm(visual, size)
    if type(visual).__name__ != "VisionTransformer":
        raise refuse(visual, "the image tower of an open_clip model must be a plain Vision Transformer")
    return _of_open_clip(visual, size)


def _of_timm(visual: Any, size: tuple[int, int]) -> tuple[parts.Architecture, parts.Linear | None]:
    layers = dict(visual.head.named_children())
    if not layers.keys() <= {"drop", "proj"}:
        raise refuse(visual, "only a linear projection of what its image tower pools is supported")
    pool = timm.own_pool(visual.trunk)
    if pool is None:  # its own head is the projection
        tower = timm.describe(visual.trunk, size)
        return tower, tower.head.linears[0]
    tower = timm.describe(visual.trunk, size, nn.Linear(1, 1, device="meta"), pool)
    return tower, linear(layers["proj"]) if "proj" in layers else None


def _of_open_clip(visual: Any, size: tuple[int, int]) -> tuple[parts.Architecture, parts.Linear | None]:
    if visual.attn_pool is not None or visual.pool_type not in ("tok", "avg"):
        raise refuse(visual, "only class tokens and means of patches are supported, no attention pool")
    check_dropout(visual, "patch_dropout")
    convolution, prefix = patch_convolution(visual.conv1), prefix_tokens(visual.class_embedding)
    count = visual.grid_size[0] * visual.grid_size[1]
    table = positions(visual.positional_embedding, 1, count)
    embedding = parts.Embedding(convolution.weight, convolution.bias, prefix, table, norm=norm(visual.ln_pre))
    blocks = tuple(_block(block) for block in visual.transformer.resblocks)
    last, placeholder = norm(visual.ln_post), parts.Linear(torch.empty(0, convolution.weight.shape[0], device="meta"))
    after = visual.final_ln_after_pool
    head = parts.Head(
        None if after else last,
        "token" if visual.pool_type == "tok" else "mean",
        (placeholder,),
        pooled_norm=last if after else None,
    )
    projection = None if visual.proj is None else parts.Linear(visual.proj.detach().T)
    return parts.Architecture(embedding, blocks, head), projection


def _block(block: Any) -> parts.Block:
    if type(block).__name__ != "ResidualAttentionBlock" or type(block.attn) is not nn.MultiheadAttention:
        raise refuse(block, "only the plain blocks of open_clip are supported")
    attention = block.attn
    q, k, v, together = fused_qkv(attention.in_proj_weight, attention.in_proj_bias)
    return parts.Block(
        norm1=needed_norm(block.ln_1),
        attention=parts.Attention(
            heads=attention.num_heads,
            q=q,
            k=k,
            v=v,
            proj=linear(attention.out_proj),
            scale=attention.head_dim**-0.5,
            together=together,
        ),
        norm2=needed_norm(block.ln_2),
        mlp=parts.Mlp(linear(block.mlp.c_fc), linear(block.mlp.c_proj), activation(block.mlp.gelu)),
        scale1=gamma(block.ls_1),
        scale2=gamma(block.ls_2),
    )
