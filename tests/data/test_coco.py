"""COCO: order, labels, boxes, and masks from polygons and run lengths."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.layouts import coco, picture

from vitrail.data import Coco
from vitrail.data.coco_masks import decode_runs, decode_segmentation, fill_polygon, unpack_runs
from vitrail.errors import VitrailError


def annotation(category=18, image=7, **others):
    base = {"image_id": image, "category_id": category, "bbox": [2, 1, 4, 3], "segmentation": [], "iscrowd": 0}
    return {**base, **others}


def runs(mask):
    """Uncompressed run lengths of a mask, by counting."""
    counts, inside = [0], False
    for pixel in np.asarray(mask).T.ravel():
        if bool(pixel) != inside:
            counts.append(0)
            inside = not inside
        counts[-1] += 1
    return counts


def packed(counts):
    """Run lengths as text, the inverse of what is tested."""
    characters = []
    for place, count in enumerate(counts):
        value = count - counts[place - 2] if place > 2 else count
        while True:
            bits, value = value & 31, value >> 5
            last = value == (-1 if bits & 16 else 0)
            characters.append(chr(48 + bits + (0 if last else 32)))
            if last:
                break
    return "".join(characters)


def test_order_labels_and_boxes(tmp_path):
    data = Coco(
        coco(
            tmp_path,
            [
                annotation(90, bbox=[1.5, 1, 4, 3.25]),
                annotation(1, bbox=[0, 0, 12, 8]),
                annotation(90, bbox=[10, 6, 5, 5]),
                annotation(90, bbox=[12, 0, 3, 3]),
            ],
        )
    )
    assert data.ids == ["000000000003.jpg", "000000000007.jpg"]
    assert data.labels == ("person", "dog", "toothbrush")
    empty, full = data
    assert (empty.label, empty.objects) == (None, ())
    assert not empty.ignore.any()
    assert full.label == 0
    assert [(item.label, item.box) for item in full.objects] == [
        (2, (1.5, 1, 5.5, 4.25)),
        (0, (0, 0, 12, 8)),
        (2, (10, 6, 12, 8)),
    ]
    assert all(item.mask is None for item in full.objects)


def test_masks_crowds_and_the_largest_category(tmp_path):
    whole, crowd = np.zeros((8, 12), bool), np.zeros((8, 12), bool)
    whole[1:4, 2:6], crowd[3:8, 5:12] = True, True
    polygons = [[2, 1, 6, 1, 6, 4, 2, 4], [0, 6, 2, 6, 2, 8, 0, 8]]
    data = Coco(
        coco(
            tmp_path,
            [
                annotation(18, segmentation=polygons),
                annotation(1, bbox=[0, 0, 12, 8], segmentation={"size": [8, 12], "counts": runs(whole)}),
                annotation(1, iscrowd=1, segmentation={"size": [8, 12], "counts": packed(runs(crowd))}),
            ],
        )
    )
    example = data[1]
    dog, person = example.objects
    expected = whole.copy()
    expected[6:8, 0:2] = True
    assert np.array_equal(dog.mask, expected)
    assert np.array_equal(person.mask, whole)
    assert example.label == 1  # the dog's mask is larger, although the person's box is
    assert example.by_area
    assert np.array_equal(example.ignore, crowd & ~whole)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_run_lengths_come_back(height, width, data):
    bits = data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    mask = np.array(bits).reshape(height, width)
    counts = runs(mask)
    assert np.array_equal(decode_runs(counts, height, width), mask)
    assert unpack_runs(packed(counts)) == counts


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**7), max_size=20))
def test_packed_numbers_come_back(counts):
    assert unpack_runs(packed(counts)) == counts
    assert unpack_runs(packed(counts).encode()) == counts


def test_packed_text_of_the_reference_implementation():
    mask = np.add.outer(np.arange(5) * 3, np.arange(7) ** 2) % 4 < 2
    assert np.array_equal(decode_segmentation({"size": [5, 7], "counts": "01230N020N020N00"}, 5, 7), mask)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-3, 15), st.floats(-3, 12)), min_size=3, max_size=7))
def test_polygons_hold_the_centres_inside(corners):
    mask = fill_polygon([edge for corner in corners for edge in corner], 8, 12)
    for row, column in [(0, 0), (3, 5), (4, 11), (7, 2)]:
        x, y, inside, near = column + 0.5, row + 0.5, False, False
        for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
            if (y0 <= y) != (y1 <= y):
                crossing = x0 + (y - y0) * (x1 - x0) / (y1 - y0)
                inside ^= crossing <= x
                near |= abs(crossing - x) < 1e-9
        assert near or mask[row, column] == inside


def test_polygons_by_hand():
    square = fill_polygon([1, 1, 4, 1, 4, 3, 1, 3], 5, 6)
    assert (square.sum(), square[1:3, 1:4].all()) == (6, True)
    beyond = fill_polygon([-5, -5, 50, -5, 50, 50, -5, 50], 5, 6)
    assert beyond.all()
    assert not fill_polygon([1, 1, 4, 1, 2, 1], 5, 6).any()


@pytest.mark.parametrize(
    "segmentation",
    [
        [[1, 2, 3, 4]],
        [[1, 2, 3, 4, 5]],
        [[1, 2, 3, 4, 5, "x"]],
        [[1, 2, 3, 4, 5, float("nan")]],
        [[[1, 2], [3, 4], [5, 6]]],
        ["polygon"],
        "polygon",
        {"size": [8, 12], "counts": [90]},
        {"size": [8, 12], "counts": [97, -1]},
        {"size": [8, 12], "counts": [96.0]},
        {"size": [8, 12], "counts": None},
        {"size": [12, 8], "counts": [96]},
        {"size": [8, 12], "counts": "o"},
        {"size": [8, 12], "counts": "é"},
        {"size": [8, 12], "counts": "o" * 100},
        {"size": [8, 12], "counts": "!!"},
    ],
)
def test_wrong_masks_name_the_file_and_the_picture(tmp_path, segmentation):
    data = Coco(coco(tmp_path, [annotation(segmentation=segmentation)]))
    with pytest.raises(
        VitrailError, match=r"instances_val2017\.json' cannot be read: the entry of '000000000007\.jpg'"
    ):
        data[1]
    assert data[0].label is None


@pytest.mark.parametrize(
    "wrong", [{"bbox": [1, 2, 3]}, {"bbox": None}, {"bbox": [1, 2, 3, float("inf")]}, {"category_id": 5}]
)
def test_wrong_annotations(tmp_path, wrong):
    with pytest.raises(VitrailError, match=r"the entry of '000000000007\.jpg' is wrong"):
        Coco(coco(tmp_path, [annotation(**wrong)]))[1]


def test_a_picture_of_another_size(tmp_path):
    root = coco(tmp_path, [])
    picture(root / "val2017" / "000000000007.jpg", (10, 8))
    with pytest.raises(VitrailError, match="it says 12 × 8 pixels"):
        Coco(root)[1]


def test_files_that_are_missing_or_wrong(tmp_path):
    with pytest.raises(VitrailError, match=r"annotations/instances_val2017\.json' was not found"):
        Coco(tmp_path)
    root = coco(tmp_path, [])
    file = root / "annotations" / "instances_val2017.json"
    content = json.loads(file.read_text())
    for wrong in ("{", "[]", "{}", '{"images": [{}], "annotations": [], "categories": []}', "[" * 100_000):
        file.write_text(wrong)
        with pytest.raises(VitrailError, match=r"instances_val2017\.json' cannot be read"):
            Coco(root)
    file.write_text(json.dumps({**content, "images": []}))
    with pytest.raises(VitrailError, match="names no image"):
        Coco(root)
    content["images"][0]["file_name"] = "../../secret.jpg"
    file.write_text(json.dumps(content))
    with pytest.raises(VitrailError, match="below its folder"):
        Coco(root)[1]
    (root / "val2017").rename(root / "elsewhere")
    with pytest.raises(VitrailError, match="folder 'val2017' of images was not found"):
        Coco(root)
