"""What an explanation must not depend on: the caller's modes; and the error for too little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

import torch

from vitrail.errors import VitrailError


@contextmanager
def own_modes() -> Iterator[None]:
    """Inside, the caller's inference mode, autocast and default device have no effect; gradients are possible."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in filter(torch.is_autocast_enabled, filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps"))):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(_sums)
        yield


class _SinglePrecisionSums:
    """While any thread is inside, CUDA adds up products of half precision in single precision."""

    def __init__(self) -> None:
        self.lock, self.inside = Lock(), 0
        self.reduction, self.accumulation = (True, True), False  # as the process has set them

    def __enter__(self) -> None:
        products = torch.backends.cuda.matmul
        with self.lock:
            if not self.inside:
                self.reduction = (
                    products.allow_fp16_reduced_precision_reduction,
                    products.allow_fp16_reduced_precision_reduction_split_k,
                )
                self.accumulation = products.allow_fp16_accumulation
                products.allow_fp16_reduced_precision_reduction = products.allow_fp16_accumulation = False
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        products = torch.backends.cuda.matmul
        with self.lock:
            self.inside -= 1
            if not self.inside:
                products.allow_fp16_reduced_precision_reduction = self.reduction
                products.allow_fp16_accumulation = self.accumulation


_sums = _SinglePrecisionSums()


def too_large(name: str) -> VitrailError:
    """A single image does not fit in memory."""
    return VitrailError(f"one image at a time does not fit in memory with {name}: use a smaller model, or img_size=.")
