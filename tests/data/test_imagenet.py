"""ImageNet and Imagenette: both layouts, the devkit's own numbering, boxes as published code uses them."""

import os

import pytest
from tests.data.layouts import (
    GOLDFISH,
    PARACHUTE,
    SHARK,
    TENCH,
    imagenet_flat,
    imagenet_folders,
    picture,
    text,
    voc_xml,
)

from vitrail.data import ImageNet, Imagenette
from vitrail.data.imagenet import IMAGENETTE_WNIDS, imagenet_classes
from vitrail.data.xml_boxes import read_xml_boxes
from vitrail.errors import VitrailError


def test_class_folders_in_sorted_order(tmp_path):
    root = imagenet_folders(tmp_path)
    data = ImageNet(root)
    assert data.ids == [
        f"{TENCH}/ILSVRC2012_val_00000004.JPEG",
        f"{TENCH}/ILSVRC2012_val_00000009.JPEG",
        f"{GOLDFISH}/ILSVRC2012_val_00000001.JPEG",
        f"{SHARK}/ILSVRC2012_val_00000002.JPEG",
    ]
    assert [example.label for example in data] == [0, 0, 1, 2]
    assert len(data.labels) == 1000
    assert data.labels[:2] == ("tench, Tinca tinca", "goldfish, Carassius auratus")
    assert ImageNet(root / "val").ids == data.ids
    assert data.subset(indices=[3, 0]).ids == [data.ids[3], data.ids[0]]


def test_a_class_that_is_missing_does_not_shift_the_others(tmp_path):
    picture(tmp_path / PARACHUTE / "a.JPEG")
    assert ImageNet(tmp_path)[0].label == 701


def test_the_list_of_classes_is_imagenets():
    wnids, names = imagenet_classes()
    assert list(wnids) == sorted(wnids)
    assert len(set(wnids)) == len(names) == 1000
    assert [wnids.index(wnid) for wnid in IMAGENETTE_WNIDS] == [0, 217, 482, 491, 497, 566, 569, 571, 574, 701]


def test_training_split(tmp_path):
    picture(tmp_path / "train" / TENCH / f"{TENCH}_18.JPEG")
    picture(tmp_path / "train" / SHARK / f"{SHARK}_7.JPEG")
    voc_xml(
        tmp_path / "boxes" / TENCH / f"{TENCH}_18.xml", [(TENCH, (1, 2, 5, 6)), ("Scottish_deerhound", (0, 0, 3, 3))]
    )
    tench, shark = ImageNet(tmp_path, split="train", boxes=tmp_path / "boxes")
    assert [(item.label, item.box) for item in tench.objects] == [(0, (1, 2, 5, 6)), (None, (0, 0, 3, 3))]
    assert shark.objects == ()


def test_flat_validation_uses_the_devkits_numbers(tmp_path):
    root = imagenet_flat(tmp_path)
    data = ImageNet(root)
    assert data.ids == [f"ILSVRC2012_val_{number:08}.JPEG" for number in (1, 2, 3)]
    assert [example.label for example in data] == [1, 0, 2]
    (tmp_path / "kit").mkdir()
    (root / "ILSVRC2012_devkit_t12").rename(tmp_path / "kit" / "ILSVRC2012_devkit_t12")
    for devkit in ("kit", "kit/ILSVRC2012_devkit_t12", "kit/ILSVRC2012_devkit_t12/data"):
        assert [example.label for example in ImageNet(root / "val", devkit=tmp_path / devkit)] == [1, 0, 2]
    with pytest.raises(VitrailError, match=r"ground_truth\.txt was not found in .* needs devkit="):
        ImageNet(root)


def test_flat_validation_with_kaggles_files(tmp_path):
    folder = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    picture(folder / "val" / "ILSVRC2012_val_00000001.JPEG")
    text(tmp_path / "LOC_val_solution.csv", f"ImageId,PredictionString\nILSVRC2012_val_00000001,{SHARK} 1 2 3 4 \n")
    text(tmp_path / "LOC_synset_mapping.txt", f"{TENCH} the tench\n{SHARK} white shark, man-eater\n")
    data = ImageNet(folder)
    assert data[0].label == 2
    assert (data.labels[0], data.labels[1], data.labels[2]) == ("the tench", GOLDFISH, "white shark, man-eater")


def test_wrong_devkits(tmp_path):
    root = imagenet_flat(tmp_path)
    devkit = root / "ILSVRC2012_devkit_t12" / "data"
    text(devkit / "ILSVRC2012_validation_ground_truth.txt", "2\n3\n")
    with pytest.raises(VitrailError, match=r"no class for 'ILSVRC2012_val_00000003\.JPEG'"):
        ImageNet(root)
    text(devkit / "ILSVRC2012_validation_ground_truth.txt", "2\nx\n1\n")
    with pytest.raises(VitrailError, match="expected an integer, found 'x'"):
        ImageNet(root)
    (devkit / "meta.mat").write_bytes(b"nothing of MATLAB's")
    with pytest.raises(VitrailError, match=r"meta\.mat' cannot be read"):
        ImageNet(root)
    (devkit / "meta.mat").unlink()
    with pytest.raises(VitrailError, match=r"meta\.mat was not found"):
        ImageNet(root)


@pytest.mark.parametrize("below", ["", "val"])
def test_boxes_are_taken_as_written(tmp_path, below):
    root = imagenet_folders(tmp_path / "data")
    objects = [
        (GOLDFISH, (0, 1, 12, 8)),
        (TENCH, (3, 2, 9, 7)),
        ("n09999999", (1, 1, 5, 5)),
        (GOLDFISH, (-4, 3, 40, 5)),
        (GOLDFISH, (12, 3, 14, 5)),
        (GOLDFISH, (6, 3, 4, 5)),
    ]
    voc_xml(tmp_path / "boxes" / below / "ILSVRC2012_val_00000001.xml", objects)
    data = ImageNet(root, boxes=tmp_path / "boxes")
    found = data[2].objects
    assert [(item.label, item.box) for item in found] == [
        (1, (0, 1, 12, 8)),
        (0, (3, 2, 9, 7)),
        (1, (0, 3, 12, 5)),
    ]
    assert all(item.mask is None for item in found)
    assert data[0].objects == ()


@pytest.mark.parametrize(
    ("size", "expected"), [((24, 16), (1, 1, 6, 4)), ((0, 0), (2, 2, 12, 8)), (None, (2, 2, 12, 8))]
)
def test_boxes_drawn_at_another_size_are_scaled(tmp_path, size, expected):
    root = imagenet_folders(tmp_path / "data")
    voc_xml(tmp_path / "boxes" / "ILSVRC2012_val_00000001.xml", [(GOLDFISH, (2, 2, 12, 8))], size)
    assert ImageNet(root, boxes=tmp_path / "boxes")[2].objects[0].box == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("<annotation><object>", "not valid XML"),
        ("", "not valid XML"),
        ('<!DOCTYPE x [<!ENTITY a "b">]><annotation/>', "declares a document type"),
        ("<annotation><object><bndbox/></object></annotation>", "<name> is missing"),
        ("<annotation><object><name>n1</name></object></annotation>", "<bndbox/xmin> is missing"),
        ("<annotation><size><width>a</width><height>3</height></size></annotation>", "<size/width> is 'a'"),
        ("<annotation><size><width>nan</width><height>3</height></size></annotation>", "expected a number"),
    ],
)
def test_broken_annotations_name_their_file(tmp_path, content, message):
    root = imagenet_folders(tmp_path / "data")
    text(tmp_path / "boxes" / "ILSVRC2012_val_00000001.xml", content)
    with pytest.raises(VitrailError, match=rf"ILSVRC2012_val_00000001\.xml' cannot be read: .*{message}"):
        ImageNet(root, boxes=tmp_path / "boxes")[2]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_entities_are_refused_in_every_encoding(tmp_path, encoding):
    document = '<!DOCTYPE annotation [<!ENTITY a "b">]><annotation>&a;</annotation>'
    (tmp_path / "bomb.xml").write_text(document, encoding=encoding)
    with pytest.raises(VitrailError, match=r"bomb\.xml' cannot be read: it declares a document type or entities"):
        read_xml_boxes(tmp_path / "bomb.xml")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(VitrailError, match=r"ImageNet folder 'val' was not found in '.*nowhere': download"):
        ImageNet(tmp_path / "nowhere")
    with pytest.raises(VitrailError, match="neither class folders"):
        ImageNet(tmp_path)
    root = imagenet_folders(tmp_path / "data")
    with pytest.raises(VitrailError, match=r"folder of boxes was not found .* ILSVRC2012_bbox_val_v3"):
        ImageNet(root, boxes=tmp_path / "boxes")
    (tmp_path / "boxes").mkdir()
    with pytest.raises(VitrailError, match="an XML file was not found"):
        ImageNet(root, boxes=tmp_path / "boxes")
    picture(root / "val" / "n09999999" / "x.JPEG")
    with pytest.raises(VitrailError, match="n09999999' is no class of imagenet"):
        ImageNet(root)
    (tmp_path / "empty" / TENCH).mkdir(parents=True)
    with pytest.raises(VitrailError, match="image in a class folder"):
        ImageNet(tmp_path / "empty")


def test_broken_picture(tmp_path):
    root = imagenet_folders(tmp_path / "data")
    voc_xml(tmp_path / "boxes" / "ILSVRC2012_val_00000001.xml", [(GOLDFISH, (2, 2, 12, 8))])
    (root / "val" / GOLDFISH / "ILSVRC2012_val_00000001.JPEG").write_bytes(b"no picture")
    for data in (ImageNet(root), ImageNet(root, boxes=tmp_path / "boxes")):
        with pytest.raises(VitrailError, match=r"ILSVRC2012_val_00000001\.JPEG"):
            data[2]
        assert data[3].label == 2


def test_imagenette_counts_its_own_classes_or_imagenets(tmp_path):
    picture(tmp_path / "val" / PARACHUTE / "b.JPEG")
    picture(tmp_path / "val" / TENCH / "a.JPEG")
    picture(tmp_path / "train" / TENCH / "t.JPEG")
    own, every = Imagenette(tmp_path), Imagenette(tmp_path, classes="imagenet")
    assert own.ids == every.ids == [f"val/{TENCH}/a.JPEG", f"val/{PARACHUTE}/b.JPEG"]
    assert [example.label for example in own] == [0, 9]
    assert [example.label for example in every] == [0, 701]
    assert (own.labels[9], len(own.labels), every.labels[701]) == ("parachute, chute", 10, "parachute, chute")
    assert Imagenette(tmp_path, split="train").ids == [f"train/{TENCH}/t.JPEG"]
    with pytest.raises(VitrailError, match=r"classes must be .* but got 'all'"):
        Imagenette(tmp_path, classes="all")
    with pytest.raises(VitrailError, match="Imagenette folder 'test' was not found"):
        Imagenette(tmp_path, split="test")
    picture(tmp_path / "val" / SHARK / "a.JPEG")
    with pytest.raises(VitrailError, match=f"{SHARK}' is no class of imagenette"):
        Imagenette(tmp_path)


def test_a_stray_file_whose_name_is_not_utf_8_is_left_out(tmp_path):
    picture(tmp_path / "val" / TENCH / "a.JPEG")
    picture(tmp_path / "val" / TENCH / os.fsdecode(b"\xff.JPEG"))
    with pytest.warns(UserWarning, match=r"'\\xff\.JPEG' in '.*' is left out: its name is not UTF-8"):
        assert ImageNet(tmp_path).ids == [f"{TENCH}/a.JPEG"]
