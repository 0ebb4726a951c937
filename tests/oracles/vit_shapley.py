"""ViT Shapley's explainer, literally: the forward pass from the tensors of its file, in double precision.

`streams` are the streams x_l (B, n, d) of a network, l = 0…L; `weights` (C, d) are those of its linear heads.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

DTYPE = torch.float64


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description of an explainer and its tensors."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).to(DTYPE) for name in file.keys()}  # noqa: SIM118
        return json.loads(file.metadata()["card"]), tensors


def probabilities(logits: Tensor, output: str) -> Tensor:
    """(B, C) → (B, K): one output z is the two classes −z and +z, each with its sigmoid."""
    if logits.shape[1] == 1:
        logits = torch.cat([-logits, logits], dim=1)
        output = "sigmoid"
    if output == "sigmoid":
        return 1 / (1 + (-logits).exp())
    return logits.exp() / logits.exp().sum(dim=1, keepdim=True)


def directions(weights: list[Tensor]) -> Tensor:
    """(K, d): the rows of the mean head minus the mean row, of length 1; one output: −w and +w."""
    rows = [sum(weight[k] for weight in weights) / len(weights) for k in range(len(weights[0]))]
    if len(rows) == 1:
        rows = [-rows[0], rows[0]]
    else:
        mean = sum(rows) / len(rows)
        rows = [row - mean for row in rows]
    return torch.stack([row / math.sqrt(float((row * row).sum())) for row in rows])


def shapley_values(path: Path, streams: list[Tensor], weights: list[Tensor], prefix: int, full: Tensor) -> Tensor:
    """(B, N, K): values of all patches and classes; `full` (B, K) are the probabilities of the images."""
    card, tensors = read(path)
    x = sum(
        linear(tensors, f"inputs.{place}.1", norm(tensors, f"inputs.{place}.0", streams[layer]))
        for place, layer in enumerate(card["layers"])
    )
    for number in range(card["blocks"]):
        x = run_block(tensors, f"blocks.{number}", x)
    vectors = linear(tensors, "head", norm(tensors, "norm", x[:, prefix:]))
    patches, towards = vectors.shape[1], directions(weights)
    values = torch.zeros(len(full), patches, full.shape[1], dtype=DTYPE)
    for b in range(len(full)):
        for k in range(full.shape[1]):
            raw = vectors[b] @ towards[k] * full[b, k].sqrt() / patches
            missing = full[b, k] - tensors["empty"][k] - raw.sum()
            values[b, :, k] = raw + missing / patches
    return values


def run_block(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Pre-norm: attention, then an MLP with the exact GELU."""
    u = norm(tensors, f"{name}.norm1", x)
    width = u.shape[-1]
    heads = max(1, width // 32)
    weight, bias = tensors[f"{name}.self_attn.in_proj_weight"], tensors[f"{name}.self_attn.in_proj_bias"]
    q, k, v = (u @ weight[part * width :][:width].T + bias[part * width :][:width] for part in range(3))
    mixed = torch.zeros_like(u)
    for head in range(heads):
        channels = slice(head * width // heads, (head + 1) * width // heads)
        scores = q[..., channels] @ k[..., channels].transpose(1, 2) / math.sqrt(width / heads)
        attention = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
        mixed[..., channels] = attention @ v[..., channels]
    x = x + linear(tensors, f"{name}.self_attn.out_proj", mixed)
    z = linear(tensors, f"{name}.linear1", norm(tensors, f"{name}.norm2", x))
    return x + linear(tensors, f"{name}.linear2", z * 0.5 * (1 + torch.erf(z / math.sqrt(2))))


def linear(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def norm(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    deviation = (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]
