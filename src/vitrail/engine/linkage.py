"""Hierarchical clustering, cut at a distance."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.engine.cuda_graph import repeated

ROUNDS = 8  # between two looks at whether anything was left to merge: looking makes the host wait
PADDED = 64  # sizes are multiples of this: what is repeated is captured for each


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
    far = F.pad(distance.clone().fill_diagonal_(torch.inf), (0, -count % PADDED) * 2, value=torch.inf)
    point = torch.arange(len(far), device=far.device)
    _, owner = repeated(rounds, (far, point), (far.new_tensor(delta),), most=count)
    first = owner[:count]  # of each point's cluster
    number = (first == point[:count]).cumsum(0) - 1
    return number[first], int(number[-1]) + 1


def rounds(far: Tensor, owner: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Some rounds of merging, and whether the last one merged.

    Args:
        far: (n, n) distances, infinite where there is nothing to merge.
        owner: (n,), the first point of each point's cluster.
        delta: clusters merge while nearer than this.
    """
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


@lru_cache(maxsize=4)
def _above_diagonal(count: int, device: torch.device) -> Tensor:
    """The places above the diagonal of a matrix, row by row, in its memory."""
    row, column = torch.triu_indices(count, count, 1, device=device)
    return row * count + column
