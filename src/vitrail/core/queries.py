"""A head of queries, as that of EoMT: each says a class and a mask, and together they say what is in a region.

The score of a class at a cell of the masks is Σ_q p_q(class) · σ(mask_q), as in semantic segmentation by masks; that of
a region is its mean. Its logarithm is the logit, so that the softmax of logits is the share of each class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.core.parts import Head, Queries

if TYPE_CHECKING:
    from vitrail.core.operations import Walk


def read_region(walk: Walk, x: Tensor, head: Head, layer: int) -> tuple[Tensor, Tensor]:
    """(B, d) and (B, C): the mean of the queries by their parts in the region, and the logits of the region."""
    assert head.queries is not None
    count = head.queries.count
    classes, masks, present = _said(walk, x, head.queries, head, layer)
    weights = present if head.weights is None else present * head.weights  # (B, M)
    total = weights.sum(1, keepdim=True)
    is_known = total > 0
    shares = torch.where(is_known, weights / total.where(is_known, 1), 1 / weights.shape[1])
    logits = region_logits(classes, masks, shares)
    if not walk.bare:  # a logit is a weighted sum of what queries say and a rest, which counts as a bias
        weighted = _weighted_sum(classes.detach(), masks.detach(), shares)
        logits = walk.recorder.bias(logits, logits.detach() - weighted, layer)
    is_object = classes.detach().log_softmax(2)[..., :-1].logsumexp(2)
    parts = (is_object + _covered(masks.detach(), shares)).softmax(1)  # (B, Q)
    walk.recorder.see("readout", layer, _readout(walk, parts, shares, head.queries, x))
    return (parts[:, None] @ x[:, :count])[:, 0], logits.where(is_known, 0)


def region_logits(classes: Tensor, masks: Tensor, shares: Tensor) -> Tensor:
    """(B, Q, C + 1) logits of classes, (B, Q, M) logits of masks, (B, M) shares of cells → (B, C)."""
    return (classes.log_softmax(2)[..., :-1] + _covered(masks, shares)[..., None]).logsumexp(1)


def _weighted_sum(classes: Tensor, masks: Tensor, shares: Tensor) -> Tensor:
    """(B, C): the logits of classes and masks, each times the derivative of a region's logit by it, added up."""
    spoken = classes.log_softmax(2)
    parts = (spoken + _covered(masks, shares)[..., None])[..., :-1].softmax(1)
    by_classes = (classes - (spoken.exp() * classes).sum(2, keepdim=True))[..., :-1]
    by_masks = (_coverage(masks, shares).softmax(2) * (-masks).sigmoid() * masks).sum(2, keepdim=True)
    return (parts * (by_classes + by_masks)).sum(1)


def class_map(walk: Walk, x: Tensor, head: Head, layer: int) -> Tensor:
    """(B, M, C): the scores of the classes at each cell, from the stream after the last block."""
    assert head.queries is not None
    classes, masks, _ = _said(walk, walk.norm(x, head.norm, layer), head.queries, head, layer)
    return masks.sigmoid().transpose(1, 2) @ classes.softmax(2)[..., :-1]


def _covered(masks: Tensor, shares: Tensor) -> Tensor:
    """(B, Q): the logarithm of the share of the region that each mask covers."""
    return _coverage(masks, shares).logsumexp(2)


def _coverage(masks: Tensor, shares: Tensor) -> Tensor:
    return F.logsigmoid(masks) + shares.log()[:, None]


def _said(walk: Walk, x: Tensor, queries: Queries, head: Head, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of the classes (B, Q, C + 1) and of the masks (B, Q, M), and which cells are present (B, M).

    Queries and cells have an axis more on the way: their biases belong to no token of the stream.
    """
    tokens, patches = x[:, : queries.count, None], x[:, walk.prefix :, None]
    classes = walk.linear(tokens, head.linears[0], layer)[:, :, 0]
    cells, present = _upscaled(walk, patches, queries, layer)
    masks = walk.rule.match(walk.dense(tokens, queries.masks, layer)[:, :, 0], cells)
    return classes, masks, present


def _upscaled(walk: Walk, patches: Tensor, queries: Queries, layer: int) -> tuple[Tensor, Tensor]:
    """(B, k, 1, d) → (B, M, d), and which cells are present; those of removed patches are as if beyond the border."""
    rows, columns = queries.grid
    present = torch.ones_like(patches[..., 0, 0])
    x = patches
    if walk.keep is not None:
        places = walk.keep[..., None, None].expand_as(patches)
        present = present.new_zeros(len(x), rows * columns).scatter(1, walk.keep, 1.0)
        x = x.new_zeros(len(x), rows * columns, 1, x.shape[-1]).scatter(1, places, x)
    for upscale in queries.upscales:
        x = walk.rule.activate(walk.linear(x, upscale.expand, layer), upscale.activation)
        # (B, h·w, 1, 4·d) → (B, d, 2·h, 2·w)
        x = x[:, :, 0].unflatten(1, (rows, columns)).unflatten(3, (2, 2, -1)).permute(0, 5, 1, 3, 2, 4)
        x = x.flatten(4, 5).flatten(2, 3)
        present = F.interpolate(present.unflatten(1, (1, rows, columns)), scale_factor=2).flatten(1)
        rows, columns = 2 * rows, 2 * columns
        if walk.keep is not None:
            x = x * present.unflatten(1, (1, rows, columns))
        x = F.conv2d(x, upscale.spread, padding=1, groups=x.shape[1])
        x = walk.norm(x.flatten(2).transpose(1, 2)[:, :, None], upscale.norm, layer)
    return x[:, :, 0], present


def _readout(walk: Walk, parts: Tensor, shares: Tensor, queries: Queries, x: Tensor) -> Tensor:
    """(B, n): a mask is a product of a query and patches, so that one half is that of queries, the other of patches."""
    (rows, columns), cells = queries.grid, shares.unflatten(1, queries.cells)
    patches = cells.unflatten(2, (columns, -1)).unflatten(1, (rows, -1)).sum((2, 4)).flatten(1)
    if walk.keep is not None:
        patches = patches.gather(1, walk.keep)
    others = x.new_zeros(len(x), walk.prefix - queries.count)
    return torch.cat([parts, others, patches], dim=1) / 2
