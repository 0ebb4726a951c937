"""How running out of memory shows."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch has no exception of its own for that of a CPU, or of CUDA itself."""
    messages = ("DefaultCPUAllocator", "CUDA error: out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in messages)
