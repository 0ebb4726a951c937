"""Clusters by scipy, and those of merging on the device, which are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from vitrail.engine.linkage import merged_by_scipy, merged_on_device


def by_scipy(distance: Tensor, delta: float) -> list[int]:
    """Clusters numbered by their first points."""
    labels = fcluster(linkage(squareform(distance.numpy()), "complete"), np.nextafter(delta, -1), criterion="distance")
    order = list(dict.fromkeys(labels.tolist()))
    return [order.index(label) for label in labels.tolist()]


def distances(points: Tensor) -> Tensor:
    result = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return ((result + result.T) / 2).fill_diagonal_(0)


@pytest.mark.parametrize("count", [1, 2, 3, 40, 150])
@pytest.mark.parametrize("delta", [0.0, 0.3, 0.8, 1.5, 99.0])
def test_clusters_are_those_of_scipy(count: int, delta: float) -> None:
    for seed in range(4):
        points = torch.randn((count, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        distance = distances(points)
        expected = by_scipy(distance, delta) if count > 1 else [0]
        result = [merged_on_device(distance, delta)]
        if count > 1:  # scipy wants two
            result.append(merged_by_scipy(distance, delta, "complete"))
        for labels, number in result:
            assert labels.tolist() == expected
            assert number == max(expected) + 1


def test_a_chain_merges_one_pair_at_a_time() -> None:
    """Growing gaps: only the first two points are nearest to each other, so that every round merges one pair."""
    distance = distances((1.1 ** torch.arange(60, dtype=torch.float64)).cumsum(0)[:, None])
    for delta in (3.0, 50.0, 1e9):
        assert merged_on_device(distance, delta)[0].tolist() == by_scipy(distance, delta)


def test_equal_points_are_one_and_the_distances_stay_as_they_are() -> None:
    points = torch.tensor([[0.0], [5.0], [0.0], [9.0], [5.0], [0.0]], dtype=torch.float64)
    distance = distances(points)
    before = distance.clone()
    assert merged_on_device(distance, 1e-9)[0].tolist() == [0, 1, 0, 2, 1, 0]
    assert merged_on_device(distance, 0.0)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(distance, before)
