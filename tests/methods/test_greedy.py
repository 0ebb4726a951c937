"""The greedy ceiling: a literal search, bounded by an exhaustive one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tests.helpers import batch, viewed
from tests.oracles import tis
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.methods import greedy
from vitrail.methods.greedy import Greedy
from vitrail.methods.registry import build_method

TARGET = 3
NAMES = ["timm_vit", "timm_deit_distilled"]


def built(name: str, curve: str, cells: int = 2) -> Greedy:
    method = build_method("greedy", viewed(name)[2], curve=curve, cells=cells)
    assert isinstance(method, Greedy)
    return method


def order_of(method: Greedy, map_: Tensor) -> list[int]:
    """The regions in the order of the map, which is constant on each."""
    regions = method.regions()
    values = [map_.flatten()[region] for region in regions]
    assert all((value == value[0]).all() for value in values)
    return sorted(range(len(regions)), key=lambda r: -float(values[r][0]))


def scores_of(name: str, regions: Tensor) -> Callable[[frozenset[int]], float]:
    """The probability with only some regions present; each subset is asked about once."""
    family, module, _ = viewed(name)
    known: dict[frozenset[int], float] = {}

    def value(present: frozenset[int]) -> float:
        if present not in known:
            mask = torch.zeros(regions.shape[1], dtype=torch.bool)
            for region in present:
                mask |= regions[region]
            known[present] = float(tis.scores(family, module, batch(name, 1), mask[None], TARGET, "probability"))
        return known[present]

    return value


def area(value: Callable[[frozenset[int]], float], order: list[int], curve: str) -> float:
    """The sum of the scores as the regions come, or go."""
    chosen = [frozenset(order[:count]) for count in range(len(order) + 1)]
    everything = frozenset(order)
    return sum(value(part if curve == "insertion" else everything - part) for part in chosen)


def literal(value: Callable[[frozenset[int]], float], count: int, curve: str, grows: bool) -> list[int]:
    """The order of a search that starts from no region, or from all of them, and asks about every region left."""
    sign = 1 if curve == "insertion" else -1
    everything, chosen = frozenset(range(count)), list[int]()

    def score(region: int) -> float:
        taken = frozenset([*chosen, region])
        return sign * value(taken if grows else everything - taken)

    while len(chosen) < count:
        chosen.append(max((region for region in range(count) if region not in chosen), key=score))
    return chosen if grows == (curve == "insertion") else chosen[::-1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("curve", ["insertion", "deletion"])
def test_the_better_of_two_searches(name: str, curve: str) -> None:
    method = built(name, curve)
    value, count = scores_of(name, method.regions()), len(method.regions())
    orders = [literal(value, count, curve, grows) for grows in (True, False)]
    best = (max if curve == "insertion" else min)(orders, key=lambda order: area(value, order, curve))
    assert order_of(method, method.attribute(batch(name, 1), TARGET)[0]) == best


@pytest.mark.parametrize("curve", ["insertion", "deletion"])
def test_no_order_is_better_than_the_exhaustive_one(curve: str) -> None:
    name = "timm_vit"
    method = built(name, curve)
    regions = method.regions()
    assert len(regions) <= 12
    value = scores_of(name, regions)
    order = order_of(method, method.attribute(batch(name, 1), TARGET)[0])
    sign = 1 if curve == "insertion" else -1
    areas = [sign * area(value, list(every), curve) for every in itertools.permutations(range(len(regions)))]
    attained = sign * area(value, order, curve)
    assert attained <= max(areas) + 1e-9
    assert attained >= torch.tensor(areas).quantile(0.9)


@pytest.mark.parametrize("curve", ["insertion", "deletion"])
def test_fewer_questions_lose_little(curve: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked two at a time, regions are left out that older changes rule out."""
    name = "timm_vit"
    method = built(name, curve, cells=1)
    whole = method.explain(batch(name, 1), TARGET)
    monkeypatch.setattr(greedy, "ROUND", 2)
    lazy = method.explain(batch(name, 1), TARGET)
    regions = method.regions()
    value, sign = scores_of(name, regions), 1 if curve == "insertion" else -1
    assert float(lazy.extras["subsets"]) < float(whole.extras["subsets"])
    attained, full = (sign * area(value, order_of(method, result.map[0]), curve) for result in (lazy, whole))
    draw = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(regions), generator=draw).tolist() for _ in range(20)]
    chance = sum(sign * area(value, order, curve) for order in orders) / len(orders)
    assert attained - chance > 0.8 * (full - chance)


def test_regions_cover_every_patch_once() -> None:
    for cells in (1, 2, 3, 50):
        assert (built("timm_vit", "insertion", cells).regions().sum(0) == 1).all()
    with pytest.raises(VitrailError, match="cells"):
        built("timm_vit", "insertion", 0)
