"""Scores of many token subsets or masked images: the one loop behind every mask method."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vitrail.models.view import View
from vitrail.models.vit import ViT
from vitrail.progress import counted

# Sizes of a chunk. The start is chosen by free memory, never by timing; out of memory steps down and goes on.
LADDER = (2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
# Beyond this a CPU gains nothing: the activations leave its caches.
CPU_CHUNK = 64
# Bytes that one token of one image holds at the widest point of a block, in units of its width × element size.
WIDEST = 14


@dataclass
class Scorer:
    """y of one class for many variants of one image.

    Args:
        view: the model.
        target: the class, (1,).
        against: the class it is opposed to, (1,) or None.
        output: "probability" or "logit".
        name: what the progress bar says.
    """

    view: View
    target: Tensor
    against: Tensor | None = None
    output: str = "probability"
    name: str = "masks"
    chunk: int = field(default=0, init=False)  # the size that was used last

    def subsets(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """(M,): the scores with only the patches ``keep`` (M, k) of x_0 ``tokens`` (1, n, d) present."""
        assert isinstance(self.view, ViT)
        view = self.view
        length = keep.shape[1] + tokens.shape[1] - view.grid[0] * view.grid[1]
        return self.run(len(keep), length, lambda part: view.encode(tokens, keep[part]))

    def images(self, count: int, make: Callable[[slice], Tensor]) -> Tensor:
        """(M,): the scores of the images that ``make`` gives chunk by chunk, (m, 3, H, W) each."""
        patches = self.view.grid[0] * self.view.grid[1] + 8 if isinstance(self.view, ViT) else 4096
        return self.run(count, patches, lambda part: self.view.logits(make(part)))

    def run(self, count: int, length: int, logits: Callable[[slice], Tensor]) -> Tensor:
        """Chunks from the ladder, halved when memory runs out; nothing computed twice."""
        self.chunk = min(self._first_chunk(length), count) or 1
        scores: list[Tensor] = []
        done = 0
        with torch.inference_mode(), counted(count, self.name) as bar:
            while done < count:
                part = slice(done, min(done + self.chunk, count))
                z = None
                try:
                    z = logits(part)
                except torch.OutOfMemoryError:
                    if self.chunk == 1:
                        raise
                if z is None:  # only now is what the failed chunk held free
                    self.chunk = max(1, self.chunk // 2)
                    torch.cuda.empty_cache()
                    continue
                scores.append(self.score(z.float() if z.dtype in (torch.float16, torch.bfloat16) else z))
                bar.update(part.stop - part.start)
                done = part.stop
        return torch.cat(scores).clone()

    def score(self, logits: Tensor) -> Tensor:
        target = self.target.expand(len(logits))
        return self.view.score(
            logits, target, None if self.against is None else self.against.expand(len(logits)), self.output
        )

    def _first_chunk(self, length: int) -> int:
        width = self.view.blocks[0].norm1.width if isinstance(self.view, ViT) else 1024
        size = torch.finfo(self.view.dtype).bits // 8
        fits = free_memory(self.view.device) // 2 // (length * width * size * WIDEST)
        most = CPU_CHUNK if self.view.device.type == "cpu" else LADDER[0]
        return next((rung for rung in LADDER if rung <= min(fits, most)), 1)


def free_memory(device: torch.device) -> int:
    """Bytes that are free where the model is."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # not Linux
        return 4 * 2**30
