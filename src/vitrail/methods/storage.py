"""Storage tokens: patches that a network uses as registers, with little of their own content (Darcet et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.engine.requests import Asking, Batch, Traced
from vitrail.engine.trace import Trace, TraceSpec
from vitrail.targets import Target

NORM = 4.0  # times the median norm of the patches of a layer
SIMILARITY = 0.5  # largest cosine with the patch's own embedding
MOST = 0.1  # share of the patches: if more stand out, none is an exception


def ask_storage(batch: Batch, target: Target, reduced: bool = False) -> Asking[Tensor]:
    """(B, N) bool: which patches are storage tokens; the trace without gradients joins that of a method.

    ``reduced``: it may be in half precision.
    """
    depth = batch.view.num_layers
    (trace,) = yield [Traced(batch, target, TraceSpec.of({"x"}, [0, *range(depth // 2, depth)], reduced=reduced))]
    return storage_tokens(trace)


def storage_tokens(trace: Trace) -> Tensor:
    """(B, N): outliers by norm at the input of a block of the upper half that are no longer like their embedding."""
    start = trace["x"][0][:, trace.num_prefix :]
    stored = torch.zeros(start.shape[:2], dtype=torch.bool, device=start.device)
    for layer in range(trace.num_layers // 2, trace.num_layers):
        x = trace["x"][layer][:, trace.num_prefix :]
        norms = x.norm(dim=-1)
        outliers = norms > NORM * norms.median(1, keepdim=True).values
        stored |= outliers & (torch.cosine_similarity(x, start, dim=-1) < SIMILARITY)
    return stored & (stored.float().mean(1, keepdim=True) <= MOST)
