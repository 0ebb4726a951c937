"""Pairs of patches: how the similarity of two images splits into shares of pairs, one patch of each.

Under frozen attention, norms and gates an embedding is a sum of one vector per token and a bias, so the dot product of
two embeddings is a sum over pairs of these vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.engine.requests import Asking, Batch, Traced
from vitrail.engine.trace import TraceSpec
from vitrail.methods.layerwise import input_x_gradient
from vitrail.models.vit import ViT
from vitrail.targets import Target

# Channels of an embedding that are traced together.
CHANNELS = {"cpu": 8, "cuda": 128}


class Pairs(NamedTuple):
    """The shares of pairs of patches (N_a, N_b), and what prefix tokens and biases of either image add (0-d)."""

    shares: Tensor
    rest: Tensor


def ask_pairs(first: tuple[ViT, Tensor], second: tuple[ViT, Tensor], layer: int, bar: Any) -> Asking[Pairs]:
    """``first``, ``second``: a view whose outputs are the channels of an embedding, and an image (1, 3, H, W).

    ``layer``: the block whose inputs the vectors are of. ``bar`` counts the channels of both.
    """
    vectors = []
    for view, image in (first, second):
        vectors.append((yield from ask_vectors(view, image, layer, bar)))
    (patches, rest), (other_patches, other_rest) = vectors
    shares = patches @ other_patches.T
    score = (patches.sum(0) + rest) @ (other_patches.sum(0) + other_rest)
    return Pairs(shares, score - shares.sum())


def ask_vectors(view: ViT, image: Tensor, layer: int, bar: Any) -> Asking[tuple[Tensor, Tensor]]:
    """The vectors of the patches (N, D), and the sum of all others (D,), in double precision."""
    spec = TraceSpec.of({"x", "gx", "bias"}, [layer], rule="frozen")
    patches, rest = [], []
    for channels in torch.arange(view.num_outputs).split(CHANNELS.get(view.device.type, 8)):
        batch = Batch(view, image.expand(len(channels), -1, -1, -1))
        trace = yield Traced(batch, Target(channels), spec)
        shares = input_x_gradient(trace, layer).double()  # (channels, n)
        patches.append(shares[:, view.num_prefix :])
        rest.append(shares[:, : view.num_prefix].sum(1) + trace.bias_from(layer).double())
        bar.update(len(channels))
    return torch.cat(patches).T, torch.cat(rest)
