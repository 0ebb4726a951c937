"""Oxford-IIIT Pet and Pascal VOC: lists, trimaps, palettes, boxes counted from 1."""

import numpy as np
import pytest
from tests.data.layouts import picture, text, values, voc_xml

from vitrail.data import OxfordPets, PascalVoc
from vitrail.errors import VitrailError

TRIMAP = np.array([[2, 2, 2, 2], [2, 3, 3, 3], [2, 3, 1, 1]])
CLASSES = np.array([[0, 0, 12, 12, 12], [255, 255, 12, 1, 1], [20, 0, 0, 0, 0]])


def pets(root):
    listed = "#Image CLASS-ID SPECIES BREED ID\n#more\nAbyssinian_100 1 1 1\namerican_bulldog_7 2 2 1\nBengal_3 4 1 2\n"
    text(root / "annotations" / "list.txt", listed)
    text(root / "annotations" / "test.txt", "american_bulldog_7 2 2 1\nAbyssinian_100 1 1 1\n")
    text(root / "annotations" / "trainval.txt", "Bengal_3 4 1 2\n")
    for seed, name in enumerate(["Abyssinian_100", "american_bulldog_7", "Bengal_3"]):
        picture(root / "images" / f"{name}.jpg", (4, 3), seed)
        values(root / "annotations" / "trimaps" / f"{name}.png", TRIMAP)
    return root


def test_pets(tmp_path):
    data = OxfordPets(pets(tmp_path))
    assert data.ids == ["american_bulldog_7", "Abyssinian_100"]
    assert data.labels == ["Abyssinian", "american bulldog", "class 2", "Bengal"]
    first, second = data
    assert (first.label, second.label) == (1, 0)
    assert [(item.label, item.box) for item in first.objects] == [(1, (2, 2, 4, 3))]
    assert np.array_equal(first.objects[0].mask, TRIMAP == 1)
    assert np.array_equal(first.ignore, TRIMAP == 3)
    train = OxfordPets(tmp_path, split="trainval")
    assert (train.ids, train[0].label) == (["Bengal_3"], 3)


def test_pets_errors(tmp_path):
    with pytest.raises(VitrailError, match="folder 'images' of Oxford-IIIT Pet was not found"):
        OxfordPets(tmp_path)
    root = pets(tmp_path)
    with pytest.raises(VitrailError, match=r"list 'val\.txt' was not found .* split='test'"):
        OxfordPets(root, split="val")
    data = OxfordPets(root)
    trimaps = root / "annotations" / "trimaps"
    values(trimaps / "american_bulldog_7.png", TRIMAP - 1)
    with pytest.raises(VitrailError, match=r"american_bulldog_7\.png' cannot be read: it holds 0, 1, 2;"):
        data[0]
    values(trimaps / "american_bulldog_7.png", TRIMAP.T)
    with pytest.raises(VitrailError, match="3 × 4 pixels, expected 4 × 3"):
        data[0]
    (trimaps / "american_bulldog_7.png").unlink()
    with pytest.raises(VitrailError, match=r"american_bulldog_7\.png' was not found"):
        data[0]
    for content, message in [
        ("Abyssinian_100\n", "line 1 has 1 columns, expected 2"),
        ("Abyssinian_100 x\n", "expected an integer"),
        ("Abyssinian_100 0\n", "class id from 1"),
        ("# nothing here\n", "class id from 1"),
    ]:
        text(root / "annotations" / "test.txt", content)
        with pytest.raises(VitrailError, match=message):
            OxfordPets(root)
    text(root / "annotations" / "test.txt", "../../secret_1 1 1 1\n")
    with pytest.raises(VitrailError, match="below its folder"):
        OxfordPets(root)[0]


def voc(root, year=2012):
    folder = root / "VOCdevkit" / f"VOC{year}"
    text(folder / "ImageSets" / "Segmentation" / "val.txt", "2007_000033\n2007_000042\n")
    text(folder / "ImageSets" / "Main" / "val.txt", "2007_000042\n")
    for seed, name in enumerate(["2007_000033", "2007_000042"]):
        picture(folder / "JPEGImages" / f"{name}.jpg", (5, 3), seed)
        values(folder / "SegmentationClass" / f"{name}.png", CLASSES * (seed == 0), mode="P")
    objects = [("dog", (1, 1, 5, 3)), ("person", (3, 2, 4, 2)), ("cat", (6, 1, 9, 3))]
    voc_xml(folder / "Annotations" / "2007_000042.xml", objects, (5, 3))
    return folder


def test_voc_segmentation(tmp_path):
    voc(tmp_path)
    data = PascalVoc(tmp_path)
    assert data.ids == ["2007_000033", "2007_000042"]
    assert (len(data.labels), data.labels[0], data.labels[11], data.labels[19]) == (20, "aeroplane", "dog", "tvmonitor")
    first, second = data
    assert first.label == 11
    assert first.by_area
    assert [(item.label, item.box) for item in first.objects] == [
        (0, (3, 1, 5, 2)),
        (11, (2, 0, 5, 2)),
        (19, (0, 2, 1, 3)),
    ]
    for item, number in zip(first.objects, (1, 12, 20), strict=True):
        assert np.array_equal(item.mask, number == CLASSES)
    assert np.array_equal(first.ignore, CLASSES == 255)
    assert (second.label, second.objects) == (None, ())
    assert not second.ignore.any()


def test_voc_detection(tmp_path):
    folder = voc(tmp_path, 2007)
    for root in (tmp_path, tmp_path / "VOCdevkit", folder):
        data = PascalVoc(root, year=2007, task="detection")
        assert data.ids == ["2007_000042"]
        # Counted from 1 and inclusive in the file; the cat lies outside the picture.
        assert [(item.label, item.box) for item in data[0].objects] == [(11, (0, 0, 5, 3)), (14, (2, 1, 4, 2))]
        assert (data[0].label, data[0].ignore) == (11, None)


def test_voc_errors(tmp_path):
    with pytest.raises(VitrailError, match="folder 'JPEGImages' of VOC 2012 was not found"):
        PascalVoc(tmp_path)
    folder = voc(tmp_path)
    with pytest.raises(VitrailError, match="VOC 2010 was not found"):
        PascalVoc(tmp_path, year=2010)
    with pytest.raises(VitrailError, match=r"list 'test\.txt' of VOC 2012 was not found"):
        PascalVoc(tmp_path, split="test")
    with pytest.raises(VitrailError, match=r"task must be .* but got 'boxes'"):
        PascalVoc(tmp_path, task="boxes")
    voc_xml(folder / "Annotations" / "2007_000042.xml", [("unicorn", (1, 1, 5, 3))], (5, 3))
    with pytest.raises(VitrailError, match=r"2007_000042\.xml' cannot be read: it names the class 'unicorn'"):
        PascalVoc(tmp_path, task="detection")[0]
    (folder / "Annotations" / "2007_000042.xml").unlink()
    with pytest.raises(VitrailError, match=r"2007_000042\.xml' was not found"):
        PascalVoc(tmp_path, task="detection")[0]
    data = PascalVoc(tmp_path)
    values(folder / "SegmentationClass" / "2007_000033.png", np.full((3, 5), 21), mode="P")
    with pytest.raises(VitrailError, match=r"2007_000033\.png' holds class 21, expected 0…20 or 255"):
        data[0]
    values(folder / "SegmentationClass" / "2007_000033.png", np.zeros((3, 5, 3)))
    with pytest.raises(VitrailError, match="its mode is RGB"):
        data[0]
    (folder / "JPEGImages" / "2007_000042.jpg").write_bytes(b"")
    with pytest.raises(VitrailError, match=r"2007_000042\.jpg' is an empty file"):
        data[1]
    text(folder / "ImageSets" / "Segmentation" / "val.txt", "\n")
    with pytest.raises(VitrailError, match="it is empty"):
        PascalVoc(tmp_path)
