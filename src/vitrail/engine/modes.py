"""What an explanation must not depend on: the caller's modes; and what running out of memory looks like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from vitrail.errors import VitrailError


@contextmanager
def own_modes(device: torch.device) -> Iterator[None]:
    """Inside, the caller's inference mode, autocast and default device have no effect; gradients are possible."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in filter(torch.amp.is_autocast_available, {"cpu", device.type}):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch has no exception of its own for that of a CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def memory_for(count: int) -> Iterator[None]:
    """Running out of memory over so many images becomes an error that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise too_large(count) from None


def too_large(count: int) -> VitrailError:
    """So many images do not fit in memory."""
    if count == 1:
        return VitrailError("one image at a time does not fit in memory: use a smaller model, or img_size=.")
    return VitrailError(f"{count} images at once do not fit in memory: use a smaller batch_size.")
