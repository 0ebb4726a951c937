"""Annotations made on the stored pixels turn upright with their picture."""

import numpy as np
import pytest
from PIL import Image
from tests.data.layouts import picture

from vitrail.data.orientation import read_picture
from vitrail.errors import VitrailError


@pytest.mark.parametrize("orientation", [None, *range(1, 10)])
def test_boxes_and_masks_follow_the_exif_orientation(tmp_path, orientation):
    found = read_picture(picture(tmp_path / "a.png", (12, 8), orientation=orientation))
    with Image.open(tmp_path / "a.png") as image:
        stored = np.asarray(image)
    upright = np.asarray(found.image)
    assert found.image.size == ((8, 12) if orientation in (5, 6, 7, 8) else (12, 8))
    # Each colour, turned as if it were a mask, must be the colour of the upright picture.
    for channel in range(3):
        assert np.array_equal(found.mask(stored[..., channel], "x"), upright[..., channel])
    mask = np.zeros((8, 12), dtype=bool)
    mask[1:4, 2:9] = True
    x0, y0, x1, y1 = (int(edge) for edge in found.box((2, 1, 9, 4)))
    turned = found.mask(mask, "x")
    assert turned[y0:y1, x0:x1].all()
    assert turned.sum() == (x1 - x0) * (y1 - y0)


def test_masks_of_another_size_are_refused(tmp_path):
    found = read_picture(picture(tmp_path / "a.png", (12, 8)))
    with pytest.raises(VitrailError, match=r"'mask\.png' is 8 × 12 pixels, expected 12 × 8 as its image '.*a\.png'"):
        found.mask(np.zeros((12, 8)), "mask.png")
    with pytest.raises(VitrailError, match="expected 12 × 8"):
        found.mask(np.zeros((8, 12, 3)), "mask.png")
