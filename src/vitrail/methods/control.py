"""The control: a map that knows nothing."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vitrail.methods.base import Attribution, Method
from vitrail.methods.registry import method


@method("random", family="control", signed=False, class_specific=False, needs="logits", cost=(0, 0), paper="SkipPLUS")
@dataclass(kw_only=True)
class Random(Method):
    """Uniform noise on the token grid (on 14×14 cells for a model without tokens), the same for the same image."""

    seed: int = 0

    no_aggregation: ClassVar[str] = "a random map has no layers"

    def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
        maps = [self._draw(image, self.model.cells) for image in images]
        return Attribution(torch.stack(maps).to(images.device))

    def _draw(self, image: Tensor, grid: tuple[int, int]) -> Tensor:
        # seeded by the picture too, so that a map does not depend on the batch it comes in
        content = zlib.crc32(image.detach().float().cpu().numpy().tobytes(), self.seed)
        return torch.rand(grid, generator=torch.Generator().manual_seed(content), dtype=torch.float32)
