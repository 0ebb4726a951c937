"""Storage tokens: outliers by norm that are not like their patch; marked in pictures, never left out of numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.common import noise
from tests.helpers import viewed

import vitrail
from vitrail import VitrailError
from vitrail.engine.trace import Trace
from vitrail.explanation import Explanation
from vitrail.methods.storage import storage_tokens

LAYERS, PREFIX, PATCHES, WIDTH = 4, 1, 64, 24


def trace_with(outliers: dict[int, float], *, alike: bool = False, layers: range = range(2, LAYERS)) -> Trace:
    """Random tokens of which some have a norm of so many times the others'."""
    generator = torch.Generator().manual_seed(0)
    x = {layer: torch.randn(1, PREFIX + PATCHES, WIDTH, generator=generator) for layer in range(LAYERS)}
    for patch, factor in outliers.items():
        for layer in layers:
            source = x[0 if alike else layer][:, PREFIX + patch]
            x[layer][:, PREFIX + patch] = factor * source / source.norm() * WIDTH**0.5
    empty = torch.zeros(1, 2)
    return Trace(empty, empty[:, 0], torch.zeros(1, PREFIX + PATCHES), LAYERS, PREFIX, {"x": x})


def stored(trace: Trace) -> list[int]:
    return storage_tokens(trace)[0].nonzero()[:, 0].tolist()


def test_outliers_that_lost_their_content_are_storage() -> None:
    assert stored(trace_with({0: 20.0, 63: 8.0})) == [0, 63]
    assert stored(trace_with({0: 20.0}, layers=range(3, 4))) == [0], "one layer of the upper half is enough"


def test_everything_else_is_not() -> None:
    assert stored(trace_with({})) == []
    assert stored(trace_with({5: 2.5})) == [], "a large norm is not an outlier"
    assert stored(trace_with({5: 20.0}, alike=True)) == [], "it still holds its own content"
    assert stored(trace_with({5: 20.0}, layers=range(1, 2))) == [], "the lower half does not count"
    assert stored(trace_with(dict.fromkeys(range(20), 20.0))) == [], "a third of the patches is no exception"


@pytest.fixture
def explained() -> Explanation:
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(64, 64, 3))
    assert (ex.storage, ex.storage_line, ex.grid) == ([], None, (4, 4))
    return replace(ex, storage=[int(ex.map.argmax())])


def test_pictures_mark_them_and_may_hide_their_evidence(explained: Explanation) -> None:
    ex, plain = explained, replace(explained, storage=[])
    marked, hidden, unmarked = (np.asarray(picture, dtype=int) for picture in (
        ex.overlay(), ex.overlay(storage="hide"), plain.overlay()
    ))  # fmt: skip
    row, column = divmod(ex.storage[0], 4)
    left, top, right, bottom = (edge * marked.shape[0] / 64 for edge in ex.box)
    across, down = (right - left) / 4, (bottom - top) / 4
    inside = (
        slice(int(top + row * down), int(top + (row + 1) * down) + 1),
        slice(int(left + column * across), int(left + (column + 1) * across) + 1),
    )
    outside = np.ones(marked.shape[:2], dtype=bool)
    outside[inside] = False
    assert (marked != unmarked)[inside].any()
    assert np.array_equal(marked[outside], unmarked[outside])
    centre = (int(top + (row + 0.5) * down), int(left + (column + 0.5) * across))
    red = marked[centre][0] - marked[centre][2]
    assert red > 50 > abs(hidden[centre][0] - hidden[centre][2])
    assert "1 patch is used as storage" in ex.storage_line


def test_numbers_do_not_change(explained: Explanation) -> None:
    before = explained.map.clone(), explained.shares.clone(), explained.trust()
    explained.picture(storage="hide")
    assert torch.equal(explained.map, before[0])
    assert torch.equal(explained.shares, before[1])
    assert replace(explained, storage=[]).trust() == before[2]


def test_of_pixel_maps_the_pixels_of_a_patch_are_hidden() -> None:
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(32, 32, 3), "integrated_gradients", steps=4)
    ex.storage = [5]
    assert ex.map.shape == (32, 32)
    shown, hidden = (np.asarray(ex.overlay(storage=how), dtype=int) for how in ("mark", "hide"))
    assert (shown != hidden)[96:192, 96:192].any()


def test_an_unknown_choice() -> None:
    ex = vitrail.explain(viewed("timm_vit", torch.float32)[2], noise(32, 32, 3))
    with pytest.raises(VitrailError, match="storage must be mark or hide, but got 'drop'"):
        ex.overlay(storage="drop")  # type: ignore[arg-type]
