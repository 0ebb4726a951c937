"""Masks and boxes pass through exactly the resize and crop that the picture gets."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.errors import VitrailError
from vitrail.models.preprocessing import Preprocess

PREPROCESSES = {
    "crop": Preprocess((224, 224), crop_pct=0.875),
    "crop whole": Preprocess((63, 63)),
    "crop wide": Preprocess((40, 91), crop_pct=0.9),
    "crop resize": Preprocess((48, 48), resize=57),
    "crop padded": Preprocess((80, 32), resize=40),
    "squash": Preprocess((65, 33), fit="squash"),
    "squash then crop": Preprocess((56, 56), fit="squash", resize=(64, 64)),
    "border": Preprocess((96, 64), fit="border"),
    "border with margin": Preprocess((64, 64), fit="border", crop_pct=1.3),
}
SIZES = [(301, 257), (97, 133), (63, 63), (31, 150), (501, 43), (7, 5), (1, 1)]


@pytest.fixture(params=PREPROCESSES.values(), ids=PREPROCESSES.keys())
def plain(request: pytest.FixtureRequest) -> Preprocess:
    """A preprocessing that leaves colours in 0…1."""
    preprocess: Preprocess = request.param
    return replace(preprocess, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def painted(mask: np.ndarray[Any, Any]) -> Image.Image:
    return Image.fromarray(np.repeat(255 * mask.astype(np.uint8)[..., None], 3, axis=2))


def blobs(size: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0 : size[1], 0 : size[0]]
    mask = np.zeros((size[1], size[0]), dtype=bool)
    for _ in range(2):
        centre_x, centre_y = random.uniform(0, size[0]), random.uniform(0, size[1])
        mask ^= (x - centre_x) ** 2 / size[0] ** 2 + (y - centre_y) ** 2 / size[1] ** 2 < 0.1
    return mask


def no_tie(preprocess: Preprocess, size: tuple[int, int]) -> torch.Tensor:
    """Pixels whose centre falls inside an original pixel; between two, the libraries' rounding errors decide."""
    left, top, right, bottom = preprocess.box(size)
    rows, columns = preprocess.size
    x = left + (torch.arange(columns, dtype=torch.float64) + 0.5) * (right - left) / columns
    y = top + (torch.arange(rows, dtype=torch.float64) + 0.5) * (bottom - top) / rows
    return ((y - y.round()).abs() > 1e-5)[:, None] & ((x - x.round()).abs() > 1e-5)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("arithmetic", ["torchvision", "hf_pil", "hf_torchvision"])
def test_equals_the_nearest_picture(plain: Preprocess, size: tuple[int, int], arithmetic: Any) -> None:
    preprocess = replace(plain, interpolation="nearest", arithmetic=arithmetic)
    mask = np.random.default_rng(1).random((size[1], size[0])) < 0.5
    found, certain = preprocess.mask(mask), no_tie(preprocess, size)
    assert (found.dtype, tuple(found.shape)) == (torch.bool, preprocess.size)
    assert certain.float().mean() > 0.8 or 1 in size
    assert torch.equal(found[certain], preprocess(painted(mask))[0][certain] > 0.5)


def test_half_size_takes_the_later_pixel_as_nearest_exact_does() -> None:
    mask = np.random.default_rng(2).random((64, 96)) < 0.5
    theirs = torch.nn.functional.interpolate(torch.from_numpy(mask)[None, None].float(), (32, 48), mode="nearest-exact")
    assert torch.equal(Preprocess((32, 48), fit="squash").mask(mask), theirs[0, 0] > 0.5)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES[:5], ids=str)
def test_agrees_with_the_picture_away_from_edges(plain: Preprocess, size: tuple[int, int], interpolation: Any) -> None:
    preprocess = replace(plain, interpolation=interpolation)
    for seed in range(4):
        mask = blobs(size, seed)
        seen = preprocess(painted(mask))[0]
        certain = (seen < 0.02) | (seen > 0.98)
        wrong = preprocess.mask(mask)[certain] != (seen > 0.5)[certain]
        assert certain.float().mean() > 0.6
        # Bicubic weights swing through 0 and 1 in the transition itself, on single pixels along an edge.
        assert wrong.float().mean() <= (0.01 if interpolation == "bicubic" else 0)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_outside_the_picture_is_false(plain: Preprocess, size: tuple[int, int]) -> None:
    everything = plain.mask(np.ones((size[1], size[0]), dtype=bool))
    assert torch.equal(everything, plain(Image.new("RGB", size, (255, 255, 255)))[0] > 0.5)
    assert not plain.mask(np.zeros((size[1], size[0]), dtype=bool)).any()


@pytest.mark.parametrize("size", SIZES[:5], ids=str)
def test_boxes_hold_the_centres_that_the_mask_shows(plain: Preprocess, size: tuple[int, int]) -> None:
    random = np.random.default_rng(3)
    y, x = (torch.arange(edge) + 0.5 for edge in plain.size)
    for _ in range(40):
        x0, x1 = sorted(random.integers(0, size[0] + 1, 2).tolist())
        y0, y1 = sorted(random.integers(0, size[1] + 1, 2).tolist())
        mask = np.zeros((size[1], size[0]), dtype=bool)
        mask[y0:y1, x0:x1] = True
        shown = torch.zeros(plain.size, dtype=torch.bool)
        for left, top, right, bottom in plain.boxes([(x0, y0, x1, y1)], size):
            assert 0 <= left < right <= plain.size[1]
            assert 0 <= top < bottom <= plain.size[0]
            # A centre on the very edge may round to either side.
            shown |= ((y > top - 1e-4) & (y < bottom - 1e-4))[:, None] & ((x > left - 1e-4) & (x < right - 1e-4))
        assert torch.equal(shown, plain.mask(mask))


def test_a_box_beyond_the_picture_does_not_spread_into_the_padding(plain: Preprocess) -> None:
    size = (120, 50)
    beyond, whole = plain.boxes([(-30, -40, 500, 700)], size), plain.boxes([(0, 0, *size)], size)
    assert beyond == whole
    left, top, right, bottom = whole[0]
    area = plain.mask(np.ones((50, 120), dtype=bool)).sum().item()
    assert area == round(right - left) * round(bottom - top)


def test_the_published_mapping_of_boxes() -> None:
    """Squashed to 256 and cropped to 224: x' = x / width · 256 − 16, clipped, dropped when nothing remains."""
    preprocess = Preprocess((224, 224), fit="squash", resize=(256, 256))
    boxes = [(100, 50, 400, 300), (0, 0, 20, 375), (0, 0, 500, 375)]
    found = preprocess.boxes(boxes, (500, 375))
    assert len(found) == 2
    assert found[0] == pytest.approx((35.2, 50 / 375 * 256 - 16, 188.8, 300 / 375 * 256 - 16))
    assert found[1] == pytest.approx((0, 0, 224, 224))


def test_boxes_without_area_are_dropped() -> None:
    preprocess = Preprocess((32, 32), fit="squash")
    nothing = [(5, 5, 5, 9), (9, 5, 3, 9), (-9, -9, 0, 0), (64, 0, 70, 9), (float("nan"), 0, 9, 9)]
    assert preprocess.boxes(nothing, (64, 64)) == []
    assert preprocess.boxes(iter([(0, 0, 32, 64)]), (64, 64)) == [(0, 0, 16, 32)]


@pytest.mark.parametrize(
    "mask", [np.zeros((4, 4, 3), bool), np.zeros((4, 4)), np.zeros((0, 4), bool), np.zeros(4, bool)]
)
def test_wrong_masks(mask: np.ndarray[Any, Any]) -> None:
    with pytest.raises(VitrailError, match=r"mask of shape .* expected \(height, width\)"):
        Preprocess((8, 8)).mask(mask)
