"""Tiny-ImageNet, official and packed, and MURA."""

import io

import numpy as np
import pytest
from PIL import Image
from tests.data.layouts import SHARK, TENCH, picture, text, tiny_imagenet

from vitrail.data import Mura, TinyImageNet
from vitrail.errors import VitrailError


def test_official_validation(tmp_path):
    data = TinyImageNet(tiny_imagenet(tmp_path))
    assert data.ids == ["val/images/val_0.JPEG", "val/images/val_1.JPEG"]
    assert data.labels == ["tench, Tinca tinca", "great white shark"]
    assert [example.label for example in data] == [1, 0]
    # The last pixels count, so x1 and y1 grow by one.
    assert [(item.label, item.box) for example in data for item in example.objects] == [
        (1, (0, 32, 45, 63)),
        (0, (52, 55, 64, 64)),
    ]


def test_official_training_and_test(tmp_path):
    data = TinyImageNet(tiny_imagenet(tmp_path), split="train")
    assert data.ids == [f"train/{wnid}/images/{wnid}_0.JPEG" for wnid in (TENCH, SHARK)]
    assert [(example.label, example.objects[0].box) for example in data] == [(0, (0, 10, 64, 59)), (1, (0, 10, 64, 59))]
    test = TinyImageNet(tmp_path, split="test")
    assert (test.ids, test[0].label, test[0].objects) == (["test/images/test_0.JPEG"], None, ())


def packed(root, split="val", count=3, first=0, **wrong):
    files = []
    for number in range(count):
        buffer = io.BytesIO()
        pixels = np.full((64, 64, 3), 20 * (first + number), dtype=np.uint8)
        Image.fromarray(pixels).save(buffer, "WEBP", lossless=True)
        files.append(buffer.getvalue())
    arrays = {
        "data": np.frombuffer(b"".join(files), dtype=np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.arange(count, dtype=np.int16) % 2,
        "boxes": np.array([[0, 1, 62, 63]] * count, dtype=np.uint8),
    }
    root.mkdir(parents=True, exist_ok=True)
    np.savez(root / f"{split}.npz", **{**arrays, **wrong})
    text(root / "classes.tsv", f"0\t{TENCH}\ttench, Tinca tinca\n1\t{SHARK}\tshark\n")
    return root


def test_packed(tmp_path):
    data = TinyImageNet(packed(tmp_path))
    assert (data.ids, data.labels) == (["val/00000", "val/00001", "val/00002"], ["tench, Tinca tinca", "shark"])
    for number, example in enumerate(data):
        assert np.asarray(example.image)[0, 0, 0] == 20 * number
        assert [(item.label, item.box) for item in example.objects] == [(number % 2, (0, 1, 63, 64))]
    packed(tmp_path, "train-0")
    packed(tmp_path, "train-1", 2, first=5)
    train = TinyImageNet(tmp_path, split="train")
    assert train.ids == ["train-0/00000", "train-0/00001", "train-0/00002", "train-1/00000", "train-1/00001"]
    assert np.asarray(train[4].image)[0, 0, 0] == 120


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"labels": np.array([0, 1, 7])}, r"labels outside 0…1"),
        ({"boxes": np.zeros((2, 4))}, r"expected \(n,\), \(n, 4\) and \(n \+ 1,\)"),
        ({"offsets": np.zeros(3)}, r"expected \(n,\)"),
        ({"labels": np.array([None, 1, 2])}, r"val\.npz' cannot be read"),
    ],
)
def test_wrong_packs(tmp_path, wrong, message):
    with pytest.raises(VitrailError, match=message):
        TinyImageNet(packed(tmp_path, **wrong))


def test_broken_packs(tmp_path):
    data = TinyImageNet(packed(tmp_path, offsets=np.array([0, 5, 9, 10**9])))
    with pytest.raises(VitrailError, match=r"image '.*val\.npz:1' cannot be read"):
        data[1]
    (tmp_path / "val.npz").write_bytes(b"PK no archive")
    with pytest.raises(VitrailError, match=r"val\.npz' cannot be read: expected an \.npz"):
        TinyImageNet(tmp_path)
    packed(tmp_path)
    text(tmp_path / "classes.tsv", "0\tn1\ta\n2\tn2\tb\n")
    with pytest.raises(VitrailError, match="0, 1, 2, … in order"):
        TinyImageNet(tmp_path)
    (tmp_path / "classes.tsv").unlink()
    with pytest.raises(VitrailError, match=r"classes\.tsv was not found"):
        TinyImageNet(tmp_path)


def test_official_errors(tmp_path):
    with pytest.raises(VitrailError, match=r"folder of Tiny-ImageNet was not found"):
        TinyImageNet(tmp_path / "nowhere")
    with pytest.raises(VitrailError, match=r"wnids\.txt of Tiny-ImageNet was not found"):
        TinyImageNet(tmp_path)
    with pytest.raises(VitrailError, match="split='valid'"):
        TinyImageNet(tmp_path, split="valid")
    root = tiny_imagenet(tmp_path)
    listing = root / "val" / "val_annotations.txt"
    for row, message in [
        ("val_0.JPEG\tn09999999\t0\t0\t5\t5", r"class 'n09999999' is not in wnids\.txt"),
        (f"val_0.JPEG\t{TENCH}\t0\t0\t5", "line 1 has 5 columns, expected 6"),
        (f"val_0.JPEG\t{TENCH}\t0\t0\t5\tx", "box '0,0,5,x', expected four finite numbers"),
        ("", "image of the split 'val' was not found"),
    ]:
        text(listing, row)
        with pytest.raises(VitrailError, match=message):
            TinyImageNet(root)
    text(listing, f"../../x.JPEG\t{TENCH}\t0\t0\t5\t5\n")
    with pytest.raises(VitrailError, match="below its folder"):
        TinyImageNet(root)[0]
    listing.unlink()
    with pytest.raises(VitrailError, match=r"val/val_annotations\.txt was not found"):
        TinyImageNet(root)


STUDIES = ["XR_WRIST/patient00006/study1_positive/image1.png", "XR_ELBOW/patient00011/study1_negative/image2.png"]


def mura(root, listed=True):
    folder = root / "MURA-v1.1"
    for study in STUDIES:
        picture(folder / "valid" / study)
    (folder / "valid" / STUDIES[0]).with_name("._image1.png").write_bytes(b"left by a Mac")
    if listed:
        text(folder / "valid_image_paths.csv", "".join(f"MURA-v1.1/valid/{study}\n" for study in STUDIES))
    return folder


def test_mura(tmp_path):
    folder = mura(tmp_path)
    for root in (tmp_path, folder):
        data = Mura(root)
        assert data.ids == [f"valid/{study}" for study in STUDIES]
        assert [example.label for example in data] == [1, 0]
        assert data.labels == ("negative", "positive")


def test_mura_without_the_list(tmp_path):
    assert Mura(mura(tmp_path, listed=False)).ids == [f"valid/{study}" for study in reversed(STUDIES)]


def test_mura_errors(tmp_path):
    with pytest.raises(VitrailError, match="MURA folder 'valid' was not found"):
        Mura(tmp_path)
    folder = mura(tmp_path)
    with pytest.raises(VitrailError, match="MURA folder 'train' was not found"):
        Mura(folder, split="train")
    (folder / "valid" / STUDIES[1]).write_bytes(b"no picture")
    with pytest.raises(VitrailError, match=r"image2\.png"):
        Mura(folder)[1]
    for row, message in [("MURA-v1.1/valid/image1.png", "in no folder study"), ("", "lists no image")]:
        text(folder / "valid_image_paths.csv", row)
        with pytest.raises(VitrailError, match=message):
            Mura(folder)
    text(folder / "valid_image_paths.csv", "MURA-v1.1/../../study1_positive/image1.png\n")
    with pytest.raises(VitrailError, match="below its folder"):
        Mura(folder)[0]
