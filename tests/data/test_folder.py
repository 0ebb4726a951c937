"""Folders: classes by sub-folder, tables of labels with boxes and masks, and what must be refused."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.data.layouts import picture, text, values

import vitrail
from vitrail.data import ImageFolder, InMemory
from vitrail.data.annotations import class_map
from vitrail.data.folder import label_of
from vitrail.data.imagenet import imagenet_classes
from vitrail.data.label_tables import read_table
from vitrail.errors import VitrailError
from vitrail.models.view import View

TRIMAP = np.array([[2, 2, 3, 3], [2, 3, 1, 1], [2, 3, 1, 1]])


def test_sub_folders_are_classes(tmp_path):
    for name in ("zebra/1.png", "cat/b.jpg", "cat/a.webp", "cat/deep/c.png", "ant/x.png"):
        picture(tmp_path / name)
    (tmp_path / "empty").mkdir()
    picture(tmp_path / ".hidden" / "y.png")
    text(tmp_path / "cat" / "notes.txt", "no picture")
    data = ImageFolder(tmp_path)
    assert data.labels == ("ant", "cat", "zebra")
    assert data.ids == ["ant/x.png", "cat/a.webp", "cat/b.jpg", "cat/deep/c.png", "zebra/1.png"]
    assert [example.label for example in data] == [0, 1, 1, 1, 2]
    assert data.name == tmp_path.name
    assert all(example.objects == () and example.ignore is None for example in data)


def test_class_folders_that_are_links(tmp_path):
    picture(tmp_path / "elsewhere" / "1.png")
    picture(tmp_path / "root" / "b" / "2.png")
    (tmp_path / "root" / "a").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    data = ImageFolder(tmp_path / "root")
    assert (data.labels, data.ids) == (("a", "b"), ["a/1.png", "b/2.png"])


def test_names_that_are_not_utf_8_are_escaped(tmp_path):
    for name in (b"a/1.png", b"caf\xe9/2.png", b"caf\xe9/\xff.png"):
        picture(tmp_path / os.fsdecode(name))
    data = ImageFolder(tmp_path)
    assert data.labels == ("a", r"caf\xe9")
    assert data.ids == ["a/1.png", r"caf\xe9/2.png", r"caf\xe9/\xff.png"]
    assert [example.id for example in data] == data.ids


def test_flat_folder_has_no_labels(tmp_path):
    picture(tmp_path / "b.png")
    picture(tmp_path / "a.jpg")
    picture(tmp_path / "a.png")
    data = ImageFolder(tmp_path)
    assert (data.ids, data.labels) == (["a.jpg", "a.png", "b.png"], None)
    assert [(example.label, example.objects) for example in data] == [(None, ())] * 3


def test_pictures_beside_folders_have_no_label(tmp_path):
    picture(tmp_path / "a.png")
    picture(tmp_path / "cat" / "b.png")
    data = ImageFolder(tmp_path)
    assert [(example.id, example.label) for example in data] == [("a.png", None), ("cat/b.png", 0)]


def test_masks_are_no_images_without_a_table_too(tmp_path):
    picture(tmp_path / "cat" / "a.jpg", (4, 3))
    values(tmp_path / "cat" / "a.png", TRIMAP)
    data = ImageFolder(tmp_path)
    assert (data.ids, dict(data.skipped)) == (["cat/a.jpg"], {})
    assert np.array_equal(data[0].objects[0].mask, TRIMAP == 1)


def test_every_file_that_is_skipped_has_its_reason(tmp_path):
    picture(tmp_path / "a.jpg")
    picture(tmp_path / "b.jpg")
    text(tmp_path / "IMG_1.HEIC", "x")
    text(tmp_path / "notes.txt", "x")
    data = ImageFolder(tmp_path)
    assert list(data.skipped) == ["IMG_1.HEIC", "notes.txt"]
    assert "pip install pillow-heif" in data.skipped["IMG_1.HEIC"]
    assert data[:1].skipped == data.skipped
    text(tmp_path / "labels.csv", "a.jpg,0\n")
    assert ImageFolder(tmp_path).skipped["b.jpg"] == "not listed in labels.csv"


def test_a_folder_of_nothing_but_heic_says_what_to_install(tmp_path):
    text(tmp_path / "IMG_1.heic", "x")
    with pytest.raises(VitrailError, match=r"no image found .*pip install pillow-heif"):
        ImageFolder(tmp_path)


def test_results_of_vitrail_are_no_images(tmp_path):
    for name in ("a.png", "why.png"):
        picture(tmp_path / name)
    text(tmp_path / "why.json", '{"vitrail": "1"}')
    assert ImageFolder(tmp_path).ids == ["a.png"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("file,label\ncat/a.jpg,7\n", (7, True)),
        ("file,label,name\ncat/a.jpg,7,ant\n", (7, True)),
        ("file,label\ncat/a.jpg,tabby\n", ("tabby", True)),
        ("file,label\nother.jpg,tabby\n", ("cat", False)),
    ],
)
def test_the_label_of_a_single_file(tmp_path, table, expected):
    path = picture(tmp_path / "cat" / "a.jpg")
    text(tmp_path / "labels.csv", table)
    assert label_of(path) == expected


def test_missing_and_empty_folders(tmp_path):
    with pytest.raises(VitrailError, match=r"folder of images was not found in '.*nowhere'"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(VitrailError, match="no image found"):
        ImageFolder(tmp_path)
    with pytest.raises(VitrailError, match=r"table 'x\.csv' was not found"):
        ImageFolder(tmp_path, table="x.csv")


@pytest.mark.parametrize(
    ("table", "labels", "names"),
    [
        ("file,label\nb.png,1\nsub/a.png,0\n", [1, 0], None),
        ("b.png,1\nsub/a.png,0\n", [1, 0], None),
        ("b.png,zebra\nsub/a.png,ant\n", [1, 0], ("ant", "zebra")),
        ('path,class,extra\nb.png,"zebra, plains",7\nsub/a.png,ant,8\n', [1, 0], ("ant", "zebra, plains")),
        ("index,file,name\n2,b.png,cat\n0,sub/a.png,ant\n", [2, 0], ("ant", "", "cat")),
        ("file,label\nb.png,1\nsub/a.png,\n", [1, None], None),
        ("file\nb.png\nsub/a.png\n", [None, None], None),
        ("file,wnid\nb.png,n02\nsub/a.png,n01\n", [1, 0], ("n01", "n02")),
        ("file,wnid\nb.png,n03888257\nsub/a.png,n09999999\n", [0, 1], ("parachute", "n09999999")),
        ("file,index,wnid\nb.png,1,n03888257\nsub/a.png,0,n01440764\n", [1, 0], ("tench", "parachute")),
        ("\ufefffile,label\r\nb.png,7a\r\n\r\nsub/a.png,7\r\n", [1, 0], ("7", "7a")),
    ],
)
def test_tables(tmp_path, table, labels, names):
    picture(tmp_path / "b.png")
    picture(tmp_path / "sub" / "a.png")
    picture(tmp_path / "unlisted.png")
    text(tmp_path / "labels.csv", table)
    data = ImageFolder(tmp_path)
    assert data.ids == ["b.png", "sub/a.png"]
    assert [example.label for example in data] == labels
    assert data.labels == names


@pytest.fixture(scope="module")
def thousand() -> View:
    """A model whose labels are those of ImageNet."""
    return replace(vitrail.load("scenes"), labels=imagenet_classes()[1])


@pytest.mark.parametrize("numbered", [False, True])
def test_every_wnid_is_its_own_class(tmp_path: Path, thousand: View, numbered: bool) -> None:
    """The two cranes, which have the same name, are known by their numbers alone."""
    cranes = {"n02012849", "n03126707"}
    numbers = [i for i, wnid in enumerate(imagenet_classes()[0]) if numbered or wnid not in cranes]
    lines = [f"{i}.png,{imagenet_classes()[0][i]}" + f",{i}" * numbered for i in numbers]
    text(tmp_path / "labels.csv", "\n".join(["file,wnid" + ",index" * numbered, *lines]))
    table = read_table(tmp_path / "labels.csv")
    data = InMemory([], labels=table.labels)
    data.numbered = table.numbered
    remap = class_map(thousand, data)
    assert [remap(row.label) for row in table.rows if row.label is not None] == numbers


def test_the_name_of_two_classes_needs_their_numbers(tmp_path: Path, thousand: View) -> None:
    text(tmp_path / "labels.csv", "file,wnid\na.png,n02012849\nb.png,n01440764\n")
    data = InMemory([], labels=read_table(tmp_path / "labels.csv").labels)
    with pytest.raises(VitrailError, match="'crane' matches 2 classes"):
        class_map(thousand, data)


def test_table_without_header_is_told_by_its_values(tmp_path):
    for name in "ab":
        picture(tmp_path / f"{name}.png", (100, 50))
    rows = [
        "a.png\t3\tn01440764\t30.0,6.3,99.8,20.5;-5,0,20,70\tbig fish, small fish",
        "b.png\t5\tn01443537\t\tshark",
    ]
    text(tmp_path / "labels.tsv", "\n".join(rows))
    data = ImageFolder(tmp_path)
    assert (data.labels[3], data.labels[4], data.labels[5]) == ("big fish, small fish", "", "shark")
    first, second = data
    assert [(item.label, item.box) for item in first.objects] == [(3, (30, 6.3, 99.8, 20.5)), (3, (0, 0, 20, 50))]
    assert (second.objects, second.label) == ((), 5)


def test_masks_beside_the_pictures(tmp_path):
    for name in ("pet.jpg", "plain.jpg", "both.jpg", "both.png"):
        picture(tmp_path / name, (4, 3))
    values(tmp_path / "pet.png", TRIMAP)
    text(tmp_path / "labels.tsv", "pet.jpg\t2\nplain.jpg\t1\nboth.jpg\t0\nboth.png\t0\n")
    pet, plain, both, listed = ImageFolder(tmp_path)
    assert np.array_equal(pet.objects[0].mask, TRIMAP == 1)
    assert np.array_equal(pet.ignore, TRIMAP == 3)
    assert (pet.objects[0].label, pet.objects[0].box) == (2, (2, 1, 4, 3))
    assert all(example.objects == () and example.ignore is None for example in (plain, both, listed))


def test_masks_named_by_the_table(tmp_path):
    binary = np.array([[0, 0, 255, 255]] * 3)
    values(tmp_path / "masks" / "a.png", binary)
    values(tmp_path / "masks" / "b.png", np.zeros((3, 4)))
    for name in "ab":
        picture(tmp_path / f"{name}.jpg", (4, 3))
    lines = ["file,label,mask,boxes", 'a.jpg,1,masks/a.png,"1,0,4,3"', 'b.jpg,0,masks/b.png,"0,0,1,1;1,1,2,2"']
    text(tmp_path / "labels.csv", "\n".join(lines))
    first, second = ImageFolder(tmp_path)
    assert [(item.label, item.box) for item in first.objects] == [(1, (1, 0, 4, 3))]
    assert np.array_equal(first.objects[0].mask, binary > 0)
    assert first.ignore is None
    assert [item.box for item in second.objects] == [None, (0, 0, 1, 1), (1, 1, 2, 2)]
    assert not second.objects[0].mask.any()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (np.zeros((4, 3)), r"mask '.*a\.png' is 3 × 4 pixels, expected 4 × 3 as its image '.*a\.jpg'"),
        ([[0, 1, 2, 3]] * 3, "it holds 0, 1, 2, 3; expected 0 and one other number"),
        ([[7, 7, 9, 9]] * 3, "it holds 7, 9"),
        (np.zeros((3, 4, 3)), "its mode is RGB, expected 1 or L or P"),
    ],
)
def test_wrong_masks(tmp_path, numbers, message):
    picture(tmp_path / "a.jpg", (4, 3))
    values(tmp_path / "a.png", numbers)
    text(tmp_path / "labels.csv", "a.jpg,0\n")
    with pytest.raises(VitrailError, match=message):
        ImageFolder(tmp_path)[0]


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "/etc/passwd", "sub/../../secret.png", "..", "C:/x.png", "C:x.png", "a\\..\\b.png", "a\0.png"],
)
@pytest.mark.parametrize("column", ["file", "mask"])
def test_tables_cannot_leave_their_folder(tmp_path, name, column):
    root = tmp_path / "root"
    picture(root / "a.png")
    picture(tmp_path / "secret.png")
    row = f"{name},0,\n" if column == "file" else f"a.png,0,{name}\n"
    text(root / "labels.csv", f"file,label,mask\n{row}")
    with pytest.raises(VitrailError, match="expected a path below its folder"):
        ImageFolder(root)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "it is empty"),
        ("file,label\n", "a header and no line"),
        ("file,label\na.png,0\na.png,1\n", r"names 'a\.png' twice"),
        ("file,label,index\na.png,0,1\n", "mean the same"),
        ("file,label,name\na.png,0,cat\nb.png,0,dog\n", "class 0 is named both 'cat' and 'dog'"),
        ('file,label,boxes\na.png,0,"1,2,3"\n', "box '1,2,3', expected four finite numbers x0,y0,x1,y1"),
        ('file,label,boxes\na.png,0,"1,2,3,x"\n', "box '1,2,3,x', expected four finite numbers"),
        ('file,label,boxes\na.png,0,"1,2,3,inf"\n', "box '1,2,3,inf', expected four finite numbers"),
        ('file,label\n"a.png,0\n', r"labels\.csv' cannot be read"),
        ("file,label,name\na.png,99999999999,x\n", "class number"),
    ],
)
def test_wrong_tables(tmp_path, table, message):
    text(tmp_path / "labels.csv", table)
    with pytest.raises(VitrailError, match=message):
        ImageFolder(tmp_path)


def test_broken_pictures_name_their_file(tmp_path):
    path = picture(tmp_path / "bad.png", (60, 60))
    path.write_bytes(path.read_bytes()[:2000])
    text(tmp_path / "labels.csv", "bad.png,0\nmissing.png,1\n")
    data = ImageFolder(tmp_path)
    for position, name in enumerate(["bad", "missing"]):
        with pytest.raises(VitrailError, match=rf"{name}\.png"):
            data[position]
