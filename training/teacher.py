"""The teacher of `photo`: a frozen DINOv2 ViT-S/14 that looks at 8×8 patches, and a linear head fitted here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import timm
import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

GRID, PATCH, WIDTH = 8, 14, 384


class Lesson(NamedTuple):
    """What the teacher says about a batch; features have mean 0 and standard deviation 1 over the training images."""

    logits: Tensor
    cls: Tensor
    patches: Tensor


class Teacher(nn.Module):
    """Takes the student's own view of an image, enlarged so that a patch of the teacher covers 2×2 of the student's."""

    def __init__(self, path: Path, classes: int) -> None:
        super().__init__()
        side = GRID * PATCH
        self.backbone = timm.create_model("vit_small_patch14_dinov2", img_size=side, num_classes=0, global_pool="token")
        weights = {name: value.float() for name, value in load_file(path).items() if not name.startswith("head.")}
        weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], [GRID, GRID], num_prefix_tokens=1)
        self.backbone.load_state_dict(weights)
        self.backbone.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2, WIDTH))
        self.register_buffer("std", torch.ones(2, WIDTH))
        self.head = nn.Linear(2 * WIDTH, classes)
        nn.init.zeros_(self.head.weight)
        self.eval()

    def features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        larger = interpolate(images, size=(GRID * PATCH, GRID * PATCH), mode="bicubic", align_corners=False)
        tokens = self.backbone.forward_features(larger.to(self.backbone.cls_token.dtype)).float()
        return (tokens[:, 0] - self.mean[0]) / self.std[0], (tokens[:, 1:] - self.mean[1]) / self.std[1]

    def forward(self, images: Tensor) -> Lesson:
        cls, patches = self.features(images)
        logits = self.head(torch.cat([cls, patches.mean(dim=1)], dim=1))
        return Lesson(logits, cls, patches.to(self.backbone.cls_token.dtype))

    @torch.no_grad()
    def measure(self, images: Tensor) -> None:
        """Sets the mean and the standard deviation that features are scaled by."""
        for row, values in enumerate(self.features(images)):
            flat = values.flatten(0, -2)
            self.mean[row], self.std[row] = flat.mean(dim=0), flat.std(dim=0)


def fit_head(teacher: Teacher, summaries: Tensor, labels: Tensor, steps: int = 1500, batch: int = 4096) -> None:
    """Logistic regression on (n, 768) summaries of training images: CLS beside the mean patch."""
    head = teacher.head
    optimiser = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (min(batch, len(labels)),), device=labels.device)
        loss = cross_entropy(head(summaries[chosen].float()), labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    head.requires_grad_(False)
