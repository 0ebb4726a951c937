"""Maps land on the pixels they belong to."""

import math
from typing import Literal

import numpy as np
import pytest
import torch
from torch.nn import functional

from vitrail.engine.maps import min_max
from vitrail.errors import VitrailError
from vitrail.models.preprocessing import Preprocess
from vitrail.show.heatmap import fit_to_image, resize_map

MAP = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(70, 50), (71, 53), (7, 5), (3, 2), (1, 1), (640, 480)])
@pytest.mark.parametrize(("mode", "torch_mode"), [("bilinear", "bilinear"), ("nearest", "nearest-exact")])
def test_whole_image_equals_interpolate(
    size: tuple[int, int], mode: Literal["bilinear", "nearest"], torch_mode: str
) -> None:
    corners = False if torch_mode == "bilinear" else None
    shape = (size[1], size[0])
    expected = functional.interpolate(MAP[None, None], shape, mode=torch_mode, align_corners=corners)[0, 0]
    fitted = fit_to_image(MAP, (0, 0, *size), size, mode)
    assert torch.allclose(fitted, expected, atol=1e-5)


@pytest.mark.parametrize("outside", [math.nan, 0.0, -7.0])
def test_outside_the_box(outside: float) -> None:
    fitted = fit_to_image(MAP, (10, 5, 80, 55), (100, 60), outside=outside)
    assert fitted.shape == (60, 100)
    assert torch.allclose(fitted[5:55, 10:80], fit_to_image(MAP, (0, 0, 70, 50), (70, 50)), atol=1e-6)
    rest = fitted.clone()
    rest[5:55, 10:80] = outside
    assert torch.equal(rest.nan_to_num(99.0), torch.full((60, 100), outside).nan_to_num(99.0))


def test_a_box_larger_than_the_image() -> None:
    whole = fit_to_image(MAP, (0, 0, 70, 50), (70, 50))
    part = fit_to_image(MAP, (-20, -10, 50, 40), (30, 20))
    assert torch.allclose(part, whole[10:30, 20:50], atol=1e-6)


def test_a_pixel_counts_when_its_centre_is_inside() -> None:
    fitted = fit_to_image(torch.ones(1, 1), (0.4, 0, 2.6, 1), (4, 1))
    assert fitted.isnan().tolist() == [[False, False, False, True]]


def test_edges_are_clamped() -> None:
    fitted = fit_to_image(torch.tensor([[1.0, 3.0]]), (0, 0, 8, 1), (8, 1))
    assert fitted.tolist() == [[1.0, 1.0, 1.25, 1.75, 2.25, 2.75, 3.0, 3.0]]


def test_unseen_borders_survive_resizing_without_bleeding() -> None:
    values = torch.full((64, 64), 5.0)
    values[:, :16] = math.nan
    resized = resize_map(values, (384, 384))
    assert np.isnan(resized[:, :95]).all()
    assert np.allclose(resized[:, 97:], 5.0, atol=1e-4)


@pytest.mark.parametrize("fit", ["crop", "squash", "border"])
def test_with_the_box_of_a_preprocessing(fit: Literal["crop", "squash", "border"]) -> None:
    preprocess = Preprocess((224, 224), fit=fit)
    fitted = fit_to_image(MAP, preprocess.box((300, 200)), (300, 200))
    assert int((~fitted.isnan()).sum()) == (200 * 200 if fit == "crop" else 300 * 200)


def test_integer_maps_and_double() -> None:
    assert fit_to_image(torch.tensor([[1, 2]]), (0, 0, 2, 1), (2, 1)).tolist() == [[1.0, 2.0]]
    assert fit_to_image(MAP.double(), (0, 0, 7, 5), (7, 5)).dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "box", "mode", "message"),
    [
        (torch.zeros(3), (0, 0, 1, 1), "bilinear", "shape"),
        (torch.zeros(0, 3), (0, 0, 1, 1), "bilinear", "shape"),
        (torch.zeros(2, 2), (0, 0, 0, 1), "bilinear", "empty"),
        (torch.zeros(2, 2), (0, 0, 1, 1), "cubic", "cubic"),
    ],
)
def test_wrong_arguments(
    values: torch.Tensor, box: tuple[float, float, float, float], mode: Literal["bilinear", "nearest"], message: str
) -> None:
    with pytest.raises(VitrailError, match=message):
        fit_to_image(values, box, (4, 4), mode)


def test_min_max() -> None:
    scaled = min_max(torch.tensor([[-2.0, math.nan], [0.0, 2.0]]))
    assert scaled.nan_to_num(9.0).tolist() == [[0.0, 9.0], [0.5, 1.0]]
    assert min_max(torch.full((2, 2), 3.0)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert min_max(torch.tensor([5.0, math.nan])).nan_to_num(9.0).tolist() == [0.0, 9.0]
    assert min_max(torch.full((2,), math.nan)).isnan().all()
    assert torch.equal(min_max(MAP).flatten().argsort(), MAP.flatten().argsort())
    assert min_max(torch.tensor([-3e38, 0.0, 3e38])).tolist() == [0.0, 0.5, 1.0]
    assert min_max(torch.tensor([0.0, 1e-45])).tolist() == [0.0, 1.0]
