"""How the embedded models are optimised: orthogonal steps for the matrices of the blocks, AdamW for the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearly U Vᵀ for each matrix U S Vᵀ of a batch, by the quintic Newton–Schulz iteration of Muon."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).float()


# Matrices of the blocks of timm: the end of their names, a pattern, and how many are stacked in each.
FUSED = {"attn.qkv.weight": 3, "attn.proj.weight": 1, "mlp.fc1.weight": 1, "mlp.fc2.weight": 1}


class Muon:
    """Momentum whose step is orthogonalised, matrices of one kind together; the step has AdamW's usual size.

    A kind is a list of weights and the number of matrices stacked in each of them (three in a fused q, k, v).
    """

    def __init__(self, kinds: list[tuple[list[Tensor], int]], momentum: float = 0.95, weight_decay: float = 0.05):
        self.kinds, self.momentum, self.weight_decay = kinds, momentum, weight_decay
        self.buffers = [torch.zeros_like(torch.stack(weights)) for weights, _ in kinds]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (weights, stacked), buffer in zip(self.kinds, self.buffers, strict=True):
            gradient = torch.stack([weight.grad for weight in weights])
            buffer.lerp_(gradient, 1 - self.momentum)
            rows, columns = gradient.shape[1] // stacked, gradient.shape[2]
            matrices = gradient.lerp(buffer, self.momentum).view(-1, rows, columns)
            update = orthogonalised(matrices).view_as(gradient) * (0.2 * math.sqrt(max(rows, columns)))
            torch._foreach_mul_(weights, 1 - rate * self.weight_decay)
            torch._foreach_add_(weights, list(update.unbind()), alpha=-rate)


class Optimiser:
    """Muon and AdamW under one learning rate, with a moving average of the model's weights."""

    def __init__(
        self,
        model: nn.Module,
        extra: nn.Module | None = None,
        average: float = 0.9995,
        kinds: Mapping[str, int] = FUSED,
    ) -> None:
        self.average, self.steps = average, 0
        self.named = dict(model.named_parameters())
        self.averaged = {name: value.detach().clone() for name, value in self.named.items()}
        self.everything = [*self.named.values(), *(extra.parameters() if extra else [])]
        of_kind = {kind: [value for name, value in self.named.items() if re.search(f"{kind}$", name)] for kind in kinds}
        self.muon = Muon([(weights, kinds[kind]) for kind, weights in of_kind.items()])
        taken = {id(weight) for weights in of_kind.values() for weight in weights}
        others = [value for value in self.everything if id(value) not in taken]
        groups = [
            {"params": [value for value in others if value.ndim == 2], "weight_decay": 0.05},
            {"params": [value for value in others if value.ndim != 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=others[0].is_cuda)

    def step(self, rate: float) -> None:
        nn.utils.clip_grad_norm_(self.everything, 1.0)
        self.muon.step(rate)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        for value in self.everything:
            value.grad = None
        self.steps += 1
        with torch.no_grad():
            weight = 1 - min(self.average, self.steps / (self.steps + 10))
            torch._foreach_lerp_(list(self.averaged.values()), list(self.named.values()), weight)

    def state(self) -> dict:
        """What a later run needs to go on; the moving average travels in half precision, as it ships."""
        return {
            "averaged": {name: value.half() for name, value in self.averaged.items()},
            "momentum": [value.bfloat16() for value in self.muon.buffers],
            "adam": self.adam.state_dict(),
            "steps": self.steps,
        }

    def load(self, state: dict) -> None:
        for name, value in state["averaged"].items():
            self.averaged[name].copy_(value)
        for buffer, value in zip(self.muon.buffers, state["momentum"], strict=True):
            buffer.copy_(value)
        self.adam.load_state_dict(state["adam"])
        self.steps = state["steps"]


def learning_rate(progress: float, peak: float, warm_up: float = 0.03) -> float:
    """Linear rise, then half a cosine down to nothing; `progress` runs from 0 to 1."""
    if progress < warm_up:
        return peak * progress / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1 - warm_up))))
