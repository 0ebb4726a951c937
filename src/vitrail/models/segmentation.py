"""EoMT of Hugging Face: a plain Vision Transformer whose last blocks have queries, which say a class and a mask each.

The queries stand before all other tokens. They are there from the first block on, and wait: no token sees them, and
they stay as they are, until the block in which the network adds them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitrail.core import parts
from vitrail.errors import VitrailError
from vitrail.models import huggingface
from vitrail.models.translation import (
    activation,
    check_dropout,
    linear,
    needed_norm,
    norm,
    patch_convolution,
    positions,
    prefix_tokens,
    refuse,
)


def is_segmenter(module: Any) -> bool:
    """Whether it is a segmenter that can be seen into."""
    return huggingface.is_huggingface(module) and type(module).__name__ in huggingface.SEGMENTERS


def describe(module: Any, size: tuple[int, int], head: None = None, pool: None = None) -> parts.Architecture:
    """The canonical form of an EoMT whose input is ``size`` (H, W)."""
    if head is not None:
        raise VitrailError(f"{type(module).__name__} has its own heads: leave head= and pool= out.")
    _check_attention(module)
    source, queries = module.embeddings, module.query.weight
    check_dropout(source, "dropout")
    check_dropout(module, "dropout")
    convolution = patch_convolution(getattr(source.patch_embeddings, "projection", source.patch_embeddings))
    prefix = prefix_tokens(queries, source.cls_token, source.register_tokens)
    grid = (size[0] // convolution.weight.shape[-2], size[1] // convolution.weight.shape[-1])
    table = getattr(source, "position_embeddings", None)
    patches = positions(None if table is None else table.weight[None], len(prefix), grid[0] * grid[1])
    embedding = parts.Embedding(convolution.weight, convolution.bias, prefix, patches)
    rope = huggingface.rotary(module, size, convolution.weight)
    blocks = [huggingface.block(layer, rope, None, grid) for layer in module.layers]
    for number in range(len(blocks) - module.config.num_blocks):
        blocks[number] = replace(blocks[number], waiting=len(queries))
    return parts.Architecture(embedding, tuple(blocks), _head(module, grid))


def _head(module: Any, grid: tuple[int, int]) -> parts.Head:
    masks = module.mask_head
    between = activation(masks.activation)
    layers = ((masks.fc1, between), (masks.fc2, between), (masks.fc3, None))
    queries = parts.Queries(
        count=module.query.weight.shape[0],
        grid=grid,
        masks=tuple(parts.Dense(linear(layer), after) for layer, after in layers),
        upscales=tuple(_upscale(block) for block in module.upscale_block.block),
    )
    return parts.Head(norm(module.layernorm), "queries", (linear(module.class_predictor),), queries=queries)


def _upscale(block: Any) -> parts.Upscale:
    wide, spread = block.conv1, block.conv2
    if not (type(wide) is nn.ConvTranspose2d and wide.kernel_size == wide.stride == (2, 2) and wide.bias is not None):
        raise refuse(wide, "cells are expected to become two by two")
    if not (type(spread) is nn.Conv2d and spread.kernel_size == (3, 3) and spread.groups == spread.in_channels):
        raise refuse(spread, "a convolution of 3 × 3 for each channel is expected to mix cells")
    weight = wide.weight.detach().permute(2, 3, 1, 0).flatten(0, 2)  # (d, d, 2, 2) → (4 · d, d)
    return parts.Upscale(
        parts.Linear(weight, wide.bias.detach().repeat(4)),
        activation(block.activation),
        spread.weight.detach(),
        needed_norm(block.layernorm2d),
    )


def _check_attention(module: Any) -> None:
    """Attention masked by predictions of blocks before, as in training, has no canonical form."""
    shares = module.attn_mask_probs
    if not shares.is_meta and bool((shares > 0).any()):
        raise VitrailError(
            f"the attention of {type(module).__name__} is masked by its own predictions, as in training "
            "(attn_mask_probs > 0): set them to 0, module.attn_mask_probs.zero_(), as at the end of the training."
        )


@torch.no_grad()
def logits(module: Any, images: Tensor, head: None, pool: None) -> Tensor:
    """The logarithm of the network's own mean scores of semantic segmentation."""
    out = module(images)
    classes, masks = out.class_queries_logits.softmax(2)[..., :-1], out.masks_queries_logits.sigmoid()
    return (masks.mean((2, 3))[:, None] @ classes)[:, 0].log()


native_size = huggingface.native_size


def takes_other_sizes(module: Any) -> bool:
    """The grid of its masks is fixed."""
    return False


adapts_to_input = takes_other_sizes
