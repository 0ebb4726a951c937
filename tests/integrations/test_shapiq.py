"""Games of patches inside shapiq, against exact enumeration and the method ``shapley``."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from tests.helpers import DOUBLE
from tests.metrics.common import bench
from tests.oracles import shapley
from torch import Tensor

from vitrail import VitrailError
from vitrail.methods.registry import build_method

pytestmark = pytest.mark.full
shapiq = pytest.importorskip("shapiq")
TARGET, RIVAL = 1, 3


def enumerated(name: str) -> Tensor:
    """Exact Shapley values by the oracle, from probabilities with masked keys."""
    of = bench(name)
    encode = of.subset(of.images[:1])

    def probability(present: Tensor) -> float:
        return float(encode(present.nonzero()[:, 0].tolist()).softmax(0)[TARGET])

    return shapley.exact(probability, of.family.grid[0] * of.family.grid[1])


@pytest.mark.parametrize("name", ["four_patches", "six_patches"])
def test_exact_values_are_those_of_the_oracle(name: str) -> None:
    from vitrail.integrations.shapiq import PatchGame

    of = bench(name)
    game = PatchGame(of.view, of.images[0], TARGET)
    exact = shapiq.ExactComputer(game)("SV")
    np.testing.assert_allclose(exact.get_n_order_values(1), enumerated(name), atol=1e-9)
    everything, nothing = game(game.grand_coalition)[0], game(game.empty_coalition)[0]
    assert nothing == pytest.approx(0)
    assert exact.get_n_order_values(1).sum() == pytest.approx(everything)
    regressed = shapiq.KernelSHAP(n=game.n_players).approximate(2**game.n_players, game)
    np.testing.assert_allclose(regressed.get_n_order_values(1), enumerated(name), atol=1e-6)


def test_the_method_samples_this_game() -> None:
    from vitrail.integrations.shapiq import PatchGame

    of = bench("six_patches")
    for output in ("probability", "logit"):
        game = PatchGame(of.view, of.images[0], TARGET, RIVAL, output=output)
        values = shapiq.ExactComputer(game)("SV").get_n_order_values(1)
        sampled = build_method("shapley", of.view, permutations=400, output=output).explain(
            of.images[:1], TARGET, RIVAL
        )
        assert sampled.error is not None
        assert (np.abs(sampled.map.flatten().numpy() - values) < 4 * sampled.error.flatten().numpy()).all()
        assert float(sampled.map.sum()) == pytest.approx(values.sum())


def test_interactions_add_up_to_the_score() -> None:
    from vitrail.integrations.shapiq import PatchGame

    of = bench("six_patches")
    game = PatchGame(of.view, of.images[0], TARGET)
    pairs = shapiq.ExactComputer(game)("k-SII", order=2)
    total = sum(pairs[pair] for size in (1, 2) for pair in combinations(range(6), size))
    assert total == pytest.approx(game(game.grand_coalition)[0])
    assert np.abs(pairs.get_n_order_values(2)).max() > 0


def test_players_are_regions() -> None:
    from vitrail.integrations.shapiq import PatchGame

    of = bench("six_patches")
    columns = torch.tensor([[0, 1, 2], [0, 1, 2]])
    patches = PatchGame(of.view, of.images[0], TARGET, normalize=False)
    game = PatchGame(of.view, of.images[:1], TARGET, players=columns, normalize=False)
    assert game.n_players == 3
    for chosen in ([], [1], [0, 2], [0, 1, 2]):
        coalition = np.isin(np.arange(3), chosen)
        assert game(coalition)[0] == pytest.approx(patches(coalition[columns.flatten().numpy()])[0], abs=1e-12)


def test_where_the_head_pools_patches_nothing_is_the_mean_colour() -> None:
    from vitrail.integrations.shapiq import PatchGame

    of = bench("pooled_nine")
    game = PatchGame(of.view, of.images[0], TARGET, normalize=False)
    blank = of.probabilities(torch.zeros(1, 3, *of.size, dtype=DOUBLE))[0, TARGET]
    assert game(game.empty_coalition)[0] == pytest.approx(float(blank))
    assert game(game.grand_coalition)[0] == pytest.approx(float(of.probabilities(of.images)[0, TARGET]))


def test_what_is_no_game_is_refused() -> None:
    from vitrail.integrations.shapiq import PatchGame

    of = bench("six_patches")
    with pytest.raises(VitrailError, match="one image, but got 2"):
        PatchGame(of.view, of.images)
    with pytest.raises(VitrailError, match="2 × 3 integers"):
        PatchGame(of.view, of.images[0], players=torch.zeros(3, 2, dtype=torch.long))
    with pytest.raises(VitrailError, match="without gaps"):
        PatchGame(of.view, of.images[0], players=torch.tensor([[0, 1, 2], [0, 1, 4]]))
    swin = bench("timm_swin")
    with pytest.raises(VitrailError, match="no fixed tokens"):
        PatchGame(swin.view, swin.images[0])
