"""Boxes: clipping, overlap, the box of a mask and the mask of a box."""

import numpy as np
import pytest
import torch

from vitrail.errors import VitrailError
from vitrail.geometry import box_area, box_iou, check_box, clip_box, fill_boxes, tight_box


def test_boxes_are_clipped() -> None:
    assert clip_box((-3, -2, 50, 60), 12, 8) == (0, 0, 12, 8)
    assert clip_box((1.5, 2, 3, 4), 12, 8) == (1.5, 2, 3, 4)
    for empty in ((12, 0, 20, 8), (-5, 0, 0, 8), (3, 3, 3, 5), (5, 3, 4, 5), (float("nan"), 0, 3, 3)):
        assert clip_box(empty, 12, 8) is None


def test_the_box_of_a_mask_covers_it_and_nothing_more() -> None:
    mask = np.zeros((5, 6), dtype=bool)
    assert tight_box(mask) is None
    mask[1:3, 2:6] = True
    box = tight_box(mask)
    assert box == (2, 1, 6, 3)
    assert box_area(box) == mask.sum()
    assert torch.equal(fill_boxes([box], (5, 6)), torch.from_numpy(mask))


def test_a_box_fills_the_pixels_whose_centre_it_holds() -> None:
    assert fill_boxes([(0.5, 0, 1.5, 1)], (1, 3)).tolist() == [[True, False, False]]
    assert fill_boxes([(0, 0, 1, 1), (2, 0, 3, 1)], (1, 3)).tolist() == [[True, False, True]]


def test_overlap() -> None:
    assert box_iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert box_iou((0, 0, 2, 2), (2, 0, 3, 3)) == 0
    assert box_iou((0, 0, 2, 3), (0, 0, 2, 3)) == 1


@pytest.mark.parametrize("box", [(0, 0, 1), (2, 0, 1, 1), (0, 1, 1, 1), (float("nan"), 0, 1, 1)])
def test_what_is_no_box_is_refused(box: tuple[float, ...]) -> None:
    with pytest.raises(VitrailError, match=r"a box is \(x0, y0, x1, y1\)"):
        check_box(box)
