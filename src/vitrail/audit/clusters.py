"""Clusters of explanations: images of a class that are predicted for the same reason (SpRAy, Lapuschkin et al. 2019).

Every image is described by where its evidence lies and by how well it matches the windows below the evidence of the
others; the smallest eigenvectors of the graph of neighbours separate the reasons, and their gap says how many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.cluster.vq import kmeans2
from scipy.linalg import eigh
from torch import Tensor

from vitrail.audit.patterns import Appearance

Floats = NDArray[np.float64]

COARSE = 7  # rows and columns of the maps that are compared
SMALLEST = 8  # images of a class that is divided
MOST, FEWEST = 6, 3  # clusters of a class, and images of a cluster on average
NEIGHBOURS = 7  # the distance to the last of them is the scale of an image
GAP = 0.2  # between eigenvalues: the last such gap separates the reasons from the images
OUTLIER = 3.5  # robust standard deviations


@dataclass(frozen=True)
class Clusters:
    """The clusters of a class: ``labels`` (n,) from 0, the largest cluster first, and how unusual each image is."""

    labels: NDArray[np.int64]
    distances: Floats  # to the neighbours, in robust standard deviations of the class

    @property
    def count(self) -> int:
        return int(self.labels.max()) + 1


def describe(evidence: Tensor, appearance: Appearance) -> Floats:
    """(n, features): evidence by position and matches with windows, each of mean length 1."""
    coarse = F.adaptive_avg_pool2d(evidence[list(appearance.members)][:, None], COARSE)[:, 0].flatten(1)
    scores = appearance.scores.T.double().nan_to_num(1.0)
    return np.concatenate([_centred(coarse.sqrt().numpy()), _centred(scores.numpy())], axis=1)


def cluster(features: Floats, seed: int = 0) -> Clusters:
    """Spectral clusters; a single one where the class is small or has no gap."""
    count = len(features)
    distances = np.linalg.norm(features[:, None] - features[None], axis=-1)
    nearest = np.sort(distances, axis=1)[:, 1 : NEIGHBOURS + 1]
    alone = nearest.mean(1) if count > 1 else np.zeros(count)
    if count < SMALLEST:
        return Clusters(np.zeros(count, dtype=np.int64), _robust(alone))
    scales = np.maximum(nearest[:, -1], np.finfo(float).eps)
    affinity = np.exp(-(distances**2) / (scales[:, None] * scales))
    np.fill_diagonal(affinity, 0.0)
    root = 1 / np.sqrt(affinity.sum(1) + np.finfo(float).tiny)
    laplacian = np.eye(count) - root[:, None] * affinity * root
    most = min(MOST, count // FEWEST)
    values, vectors = eigh(laplacian, subset_by_index=[0, most])
    k = int(np.flatnonzero(np.diff(values) > GAP).max(initial=0)) + 1
    if k == 1:
        return Clusters(np.zeros(count, dtype=np.int64), _robust(alone))
    rows = vectors[:, :k] / np.maximum(np.linalg.norm(vectors[:, :k], axis=1, keepdims=True), np.finfo(float).tiny)
    _, labels = kmeans2(rows, k, minit="++", seed=seed)
    names, sizes = np.unique(labels, return_counts=True)
    rank = {int(name): place for place, name in enumerate(names[np.argsort(-sizes, kind="stable")])}
    return Clusters(np.array([rank[int(label)] for label in labels], dtype=np.int64), _robust(alone))


def _centred(values: Floats) -> Floats:
    centred = values - values.mean(0)
    return centred / max(float(np.linalg.norm(centred, axis=1).mean()), np.finfo(float).tiny)


def _robust(values: Floats) -> Floats:
    """Distances from the median, in units of the scaled median absolute deviation."""
    middle = np.median(values)
    spread = 1.4826 * np.median(np.abs(values - middle))
    return (values - middle) / max(float(spread), np.finfo(float).tiny) if spread > 0 else np.zeros_like(values)
