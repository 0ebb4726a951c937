"""Hierarchical clustering, cut at a distance."""

from __future__ import annotations

from functools import lru_cache
from threading import Lock

import numpy as np
import torch
from torch import Tensor

ROUNDS = 8  # between two looks at whether anything was left to merge: looking makes the host wait
PADDED = 64  # sizes that are captured are multiples of this, so that few of them are


def clustered(distance: Tensor, delta: float, linkage: str) -> tuple[Tensor, int]:
    """(n,): the cluster of each of n points, numbered by their first points; how many there are.

    Args:
        distance: (n, n), symmetric.
        delta: clusters merge while nearer than this.
        linkage: how near clusters are, as scipy names it.
    """
    if distance.is_cuda and linkage == "complete":
        return merged_on_device(distance, delta)
    return merged_by_scipy(distance, delta, linkage)


def merged_by_scipy(distance: Tensor, delta: float, linkage: str) -> tuple[Tensor, int]:
    from scipy.cluster import hierarchy

    above = distance.take(_above_diagonal(len(distance), distance.device))
    tree = hierarchy.linkage(above.cpu().numpy(), linkage)
    labels = hierarchy.fcluster(tree, np.nextafter(delta, -1), criterion="distance")
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    number = first.argsort().argsort()
    return torch.from_numpy(number[inverse]).to(distance.device), len(first)


def merged_on_device(distance: Tensor, delta: float) -> tuple[Tensor, int]:
    """Complete linkage. Merging only takes maxima, so this is exact.

    Clusters that are nearest to each other end up together in whatever order one merges: all such pairs merge at once,
    in tens of rounds instead of a loop over merges on the host.
    """
    count = len(distance)
    owner = torch.arange(count, device=distance.device)  # the first point of each point's cluster
    far, limit = distance.clone().fill_diagonal_(torch.inf), distance.new_tensor(delta)
    if distance.is_cuda:
        owner = _captured(-count % PADDED + count, distance.dtype, distance.device).merged(far, limit)[:count]
    else:
        merging = True
        while merging:
            far, owner, more = rounds(far, owner, limit)
            merging = bool(more)
    number = (owner == torch.arange(count, device=owner.device)).cumsum(0) - 1
    return number[owner], int(number[-1]) + 1


def rounds(far: Tensor, owner: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Some rounds of merging, and whether the last one merged; ``far`` is infinite where there is nothing to merge."""
    index = torch.arange(len(far), device=far.device)
    for _ in range(ROUNDS):
        nearest, other = far.min(1)
        mutual = (other[other] == index) & (nearest < delta)
        pair = torch.where(mutual, other, index)
        owner = torch.minimum(pair, index)[owner]
        far = torch.maximum(far, far[pair])
        far = torch.maximum(far, far[:, pair])
        gone = pair < index
        far = far.masked_fill(gone[:, None] | gone, torch.inf)
    return far, owner, mutual.any()


class Captured:
    """``rounds`` as one launch: the host takes longer to ask for such small steps than the device to do them."""

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.lock = Lock()
        self.far = torch.full((count, count), torch.inf, dtype=dtype, device=device)
        self.owner = torch.arange(count, device=device)
        self.delta = torch.zeros((), dtype=dtype, device=device)
        rounds(self.far, self.owner, self.delta)  # what is made at the first use must not be captured
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            far, owner, self.more = rounds(self.far, self.owner, self.delta)
            self.far.copy_(far)
            self.owner.copy_(owner)

    def merged(self, far: Tensor, delta: Tensor) -> Tensor:
        """The first point of each point's cluster; points beyond those of ``far`` stay alone."""
        with self.lock, torch.cuda.device(self.far.device):
            self.far.fill_(torch.inf)
            self.far[: len(far), : len(far)] = far
            torch.arange(len(self.owner), out=self.owner)
            self.delta.copy_(delta)
            self.graph.replay()
            while self.more:
                self.graph.replay()
            return self.owner.clone()


@lru_cache(maxsize=2)
def _captured(count: int, dtype: torch.dtype, device: torch.device) -> Captured:
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
        return Captured(count, dtype, device)


@lru_cache(maxsize=4)
def _above_diagonal(count: int, device: torch.device) -> Tensor:
    """The places above the diagonal of a matrix, row by row, in its memory."""
    row, column = torch.triu_indices(count, count, 1, device=device)
    return row * count + column
