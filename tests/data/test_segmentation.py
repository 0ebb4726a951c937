"""ImageNet-S and ImageNet-Segmentation: class numbers in colours, references in HDF5."""

import builtins
import pickle

import numpy as np
import pytest
from tests.data.layouts import GOLDFISH, TENCH, imagenet_s, imagenet_segmentation, picture, text

from vitrail.data import ImageNetS, ImageNetSegmentation
from vitrail.data.imagenet import imagenet_classes
from vitrail.errors import VitrailError

# The miniature's category file is backwards: number k is ImageNet's class 50 − k.
NUMBERS = np.array([[0, 0, 50, 50, 49], [1000, 0, 49, 49, 49], [1000, 3, 3, 0, 49]])


def test_imagenet_s_objects_and_ignored_pixels(tmp_path):
    data = ImageNetS(imagenet_s(tmp_path, {f"{TENCH}/a": NUMBERS, f"{GOLDFISH}/b": np.zeros((2, 3))}), size=50)
    assert data.ids == [f"{TENCH}/a", f"{GOLDFISH}/b"]
    first, second = data
    assert first.label == 1  # number 49 has the most pixels
    assert first.by_area
    assert [(item.label, item.box) for item in first.objects] == [
        (47, (1, 2, 3, 3)),
        (1, (2, 0, 5, 3)),
        (0, (2, 0, 4, 1)),
    ]
    for item in first.objects:
        number = 50 - item.label
        assert np.array_equal(item.mask, number == NUMBERS)
    assert np.array_equal(first.ignore, NUMBERS == 1000)
    assert (second.objects, second.label) == ((), 1)  # no class in the picture: that of its folder
    assert len(data.labels) == 1000


def test_imagenet_s_with_its_own_classes(tmp_path):
    data = ImageNetS(imagenet_s(tmp_path, {f"{TENCH}/a": NUMBERS}), size=50, classes="own")
    assert [item.label for item in data[0].objects] == [2, 48, 49]
    assert (data[0].label, len(data.labels), data.labels[49]) == (48, 50, "tench, Tinca tinca")


def test_imagenet_s_numbers_beyond_one_byte(tmp_path):
    numbers = np.array([[919, 919, 300], [1000, 919, 1]])
    data = ImageNetS(imagenet_s(tmp_path, {f"{TENCH}/a": numbers}, size=919))
    assert [item.label for item in data[0].objects] == [918, 619, 0]
    assert data[0].label == 0


def test_imagenet_s_300(tmp_path):
    numbers = np.array([[300, 300, 7], [1000, 300, 0]])
    root = imagenet_s(tmp_path, {f"{TENCH}/a": numbers}, size=300)
    data = ImageNetS(root, size=300)
    assert [item.label for item in data[0].objects] == [293, 0]
    assert len(ImageNetS(root, size=300, classes="own").labels) == 300


def test_imagenet_s_errors(tmp_path):
    root = imagenet_s(tmp_path / "s", {f"{TENCH}/a": NUMBERS, f"{TENCH}/b": [[51]]})
    data = ImageNetS(root, size=50)
    with pytest.raises(VitrailError, match=r"b\.png' holds class 51, expected 0…50 or 1000"):
        data[1]
    picture(root / "validation" / TENCH / "a.JPEG", (7, 3))
    with pytest.raises(VitrailError, match=r"a\.png' is 5 × 3 pixels, expected 7 × 3"):
        data[0]
    (root / "validation-segmentation" / TENCH / "b.png").write_bytes(b"broken")
    with pytest.raises(VitrailError, match=r"b\.png' is not an image"):
        data[1]
    (root / "validation" / TENCH / "a.JPEG").unlink()
    with pytest.raises(VitrailError, match=r"a\.JPEG' was not found"):
        data[0]
    with pytest.raises(VitrailError, match="size=5"):
        ImageNetS(root, size=5)
    with pytest.raises(VitrailError, match=r"ImageNetS_categories_im919\.txt was not found .*LUSSeg"):
        ImageNetS(root)
    with pytest.raises(VitrailError, match="names 50 classes, expected 300"):
        ImageNetS(root, size=300, categories=root / "ImageNetS_categories_im50.txt")
    with pytest.raises(VitrailError, match="folder 'test' was not found"):
        ImageNetS(root, size=50, split="test")
    wnids = ["n09999999", *imagenet_classes()[0][:49]]
    text(root / "ImageNetS_categories_im50.txt", "\n".join(wnids))
    with pytest.raises(VitrailError, match="'n09999999' is no ImageNet class"):
        ImageNetS(root, size=50)


def pairs():
    random = np.random.default_rng(0)
    sizes = ((4, 6), (5, 3))
    return [(random.integers(0, 256, (*size, 3), dtype=np.uint8), random.random(size) < 0.4) for size in sizes]


def test_imagenet_segmentation(tmp_path):
    expected = pairs()
    path = imagenet_segmentation(tmp_path / "gtsegs_ijcv.mat", expected)
    data = ImageNetSegmentation(path)
    assert (data.ids, data.labels) == (["0000", "0001"], None)
    for example, (pixels, mask) in zip(data, expected, strict=True):
        assert np.array_equal(np.asarray(example.image), pixels)
        assert np.array_equal(example.objects[0].mask, mask)
        assert (example.label, example.objects[0].label, len(example.objects)) == (None, None, 1)
    assert ImageNetSegmentation(tmp_path).ids == data.ids
    assert np.array_equal(np.asarray(pickle.loads(pickle.dumps(data))[1].image), expected[1][0])


def test_imagenet_segmentation_errors(tmp_path, monkeypatch):
    with pytest.raises(VitrailError, match=r"was not found in '.*gtsegs_ijcv\.mat': download"):
        ImageNetSegmentation(tmp_path)
    with pytest.raises(VitrailError, match="cannot be read: expected HDF5"):
        ImageNetSegmentation(text(tmp_path / "text.mat", "no HDF5"))
    (pixels, mask), _ = pairs()
    data = ImageNetSegmentation(imagenet_segmentation(tmp_path / "a.mat", [(pixels, mask[1:])]))
    with pytest.raises(VitrailError, match=r"image 0 of '.*a\.mat' is \(4, 6\) and its mask \(3, 6\)"):
        data[0]
    import h5py

    with h5py.File(tmp_path / "b.mat", "w") as file:
        file["value/img"] = np.zeros((2, 1))
    with pytest.raises(VitrailError, match="expected HDF5 with /value/img"):
        ImageNetSegmentation(tmp_path / "b.mat")
    with h5py.File(tmp_path / "b.mat", "a") as file:
        file["value/gt"] = np.zeros((2, 1))
    with pytest.raises(VitrailError, match="image 0 is damaged"):
        ImageNetSegmentation(tmp_path / "b.mat")[0]
    real_import = builtins.__import__

    def without_h5py(name, *args, **options):
        if name == "h5py":
            raise ImportError(name)
        return real_import(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_h5py)
    with pytest.raises(VitrailError, match=r"needs h5py: pip install 'vitrail\[data\]'"):
        ImageNetSegmentation(tmp_path / "a.mat")
