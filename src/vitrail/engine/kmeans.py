"""K-Means on the device: seeded, deterministic, no loop over clusters."""

from __future__ import annotations

import torch
from torch import Tensor

from vitrail.engine.cuda_graph import repeated

ITERATIONS = 100
TOLERANCE = 1e-4
CHUNK = 2**24  # distances held at once


def kmeans(points: Tensor, clusters: int, seed: int = 0) -> Tensor:
    """(m, n) points → (clusters, n) centroids: Lloyd's steps from randomly drawn points, until nothing moves."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randperm(len(points), generator=draw)[:clusters].to(points.device)
    return lloyd(points, points[first])


def lloyd(points: Tensor, centroids: Tensor) -> Tensor:
    """Lloyd's algorithm: assignment and mean in turn, until nothing moves."""
    (converged,) = repeated(step, (centroids,), (points,), ITERATIONS)
    return converged


def step(centroids: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The centroids after one iteration, and whether they moved.

    An empty cluster restarts at the point farthest from its centroid, a second one at the next.
    """
    nearest, apart = assign(points, centroids)
    moved, counts = means(points, nearest, len(centroids))
    empty = counts == 0
    farthest = (apart + points.square().sum(1)).argsort(descending=True, stable=True)
    moved = torch.where(empty[:, None], points[farthest[empty.cumsum(0) - 1]], moved)
    return moved, (moved - centroids).square().sum() > TOLERANCE


def assign(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point (ties: the first) and its squared distance, less the point's own square."""
    step = max(1, CHUNK // len(centroids))
    squares = centroids.square().sum(1)
    starts = range(0, len(points), step)
    parts = [torch.addmm(squares, points[i : i + step], centroids.T, alpha=-2).min(1) for i in starts]
    lowest, nearest = (torch.cat(each) for each in zip(*parts, strict=True))
    return nearest, lowest


def means(points: Tensor, nearest: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The mean of each cluster's points, zero for a cluster without any, and their number."""
    if points.device.type == "cpu":
        counts = torch.bincount(nearest, minlength=clusters)
        sums = torch.zeros(clusters, points.shape[1], dtype=points.dtype).index_add_(0, nearest, points)
    else:  # scattered additions have no fixed order on CUDA: a product does
        members = (torch.arange(clusters, device=points.device)[:, None] == nearest).to(points.dtype)
        counts, sums = members.sum(1), members @ points
    return sums / counts.clamp(min=1)[:, None], counts
