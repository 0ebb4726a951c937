"""Data sets by name, with options, and from what is at hand; scenes as a data set."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data import layouts
from tests.data.layouts import GOLDFISH, SHARK, TENCH, picture, text

import vitrail.data
from vitrail.data import (
    DATA_NAMES,
    DATA_SETS,
    DataSet,
    Example,
    ImageFolder,
    SceneData,
    Scenes,
    data_set,
    open_data,
)
from vitrail.data.names import data_name
from vitrail.errors import VitrailError

DRAWN = ("scenes", "scenes_text", "samples")  # which have no folder
ELSEWHERE = ("fiftyone",)  # which are in a database: see tests/integrations/test_fiftyone.py


def test_every_object_of_every_scene_is_an_example():
    scenes = Scenes(12, seed=3)
    data = SceneData(12, seed=3)
    assert len(data) == sum(len(scene.objects) for scene in scenes) > 12
    position = 0
    for number, scene in enumerate(scenes):
        for place, item in enumerate(scene.objects):
            example = data[position]
            assert example.id == data.ids[position] == f"{number}-{place}-{Scenes.labels[item.label]}"
            assert example.label == item.label
            assert np.array_equal(np.asarray(example.image), scene.image)
            assert [thing.label for thing in example.objects] == [thing.label for thing in scene.objects]
            for thing, original in zip(example.objects, scene.objects, strict=True):
                assert thing.box == original.box
                assert np.array_equal(thing.mask, original.mask)
            position += 1
    assert (data.name, tuple(data.labels)) == ("scenes", Scenes.labels)
    assert SceneData(scenes).ids == SceneData(scenes[:]).ids == data.ids


@pytest.mark.parametrize(
    ("spec", "scenes", "seed", "objects"),
    [("scenes", 200, 0, None), ("scenes:5", 5, 0, None), ("scenes:5@7", 5, 7, None), ("scenes:4@2?objects=1", 4, 2, 1),
     ("scenes?objects=2", 200, 0, 2), ("scenes:@3", 200, 3, None)],
)  # fmt: skip
def test_scenes(spec, scenes, seed, objects):
    data = open_data(spec)
    assert isinstance(data, SceneData)
    assert repr(data.scenes) == repr(Scenes(scenes, seed, objects))


def layout_of_each(root):
    """A specification for every name, over miniatures."""
    layouts.imagenet_folders(root / "imagenet")
    layouts.imagenet_s(root / "imagenet_s", {f"{TENCH}/a": np.ones((3, 4))})
    layouts.imagenet_segmentation(root / "seg.mat", [(np.zeros((3, 4, 3), np.uint8), np.ones((3, 4)))])
    for name, head in (("cifar-10-batches-bin/test_batch.bin", 1), ("cifar-100-binary/test.bin", 2)):
        path = root / "cifar" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(head + 3072))
    picture(root / "imagenette" / "val" / TENCH / "a.JPEG")
    text(root / "pets" / "annotations" / "test.txt", "Pug_1 1 1 1")
    picture(root / "pets" / "images" / "Pug_1.jpg")
    layouts.values(root / "pets" / "annotations" / "trimaps" / "Pug_1.png", np.ones((8, 12)))
    text(root / "voc" / "ImageSets" / "Segmentation" / "val.txt", "a")
    picture(root / "voc" / "JPEGImages" / "a.jpg")
    layouts.values(root / "voc" / "SegmentationClass" / "a.png", np.ones((8, 12)), "P")
    layouts.coco(root / "coco", [])
    layouts.tiny_imagenet(root / "tiny")
    picture(root / "mura" / "valid" / "XR_HAND" / "patient1" / "study1_positive" / "image1.png")
    picture(root / "folder" / "cat" / "a.png")
    places = {
        "imagenet_s": "imagenet_s?size=50", "imagenet_segmentation": "seg.mat", "cifar10": "cifar", "cifar100": "cifar",
        "tiny_imagenet": "tiny",
    }  # fmt: skip
    return {name: f"{name}:{root}/{places.get(name, name)}" for name in DATA_NAMES if name not in (*DRAWN, *ELSEWHERE)}


def test_every_name_opens(tmp_path):
    specs = layout_of_each(tmp_path)
    for name, spec in specs.items():
        data = open_data(spec)
        assert (data.name, isinstance(data[0], Example)) == (name, True)
        assert str(tmp_path) not in "".join(data.ids)
        assert len(set(data.ids)) == len(data)


def test_options(tmp_path):
    root = layouts.imagenet_folders(tmp_path / "data")
    layouts.voc_xml(tmp_path / "boxes" / "ILSVRC2012_val_00000001.xml", [(GOLDFISH, (1, 2, 3, 4))])
    data = open_data(f"imagenet:{root}?boxes={tmp_path / 'boxes'}&split=val")
    assert data[2].objects[0].box == (1, 2, 3, 4)
    assert open_data(f"imagenet:{root}", boxes=tmp_path / "boxes", n=None)[2].objects[0].box == (1, 2, 3, 4)
    assert open_data(f"imagenet:{root}?n=2&seed=5").ids == data.subset(2, seed=5).ids
    assert open_data(f"imagenet:{root}?n=2&seed=5", n=3).ids == data.subset(3, seed=5).ids
    text(tmp_path / "list.txt", "3 0")
    assert open_data(f"imagenet:{root}?indices={tmp_path / 'list.txt'}").ids == data.subset(indices=[3, 0]).ids
    assert open_data(data, indices=[1]).ids == [data.ids[1]]
    assert open_data(f"imagenet:{root}")[3].id.startswith(SHARK)


def test_paths(tmp_path, monkeypatch):
    picture(tmp_path / "animals" / "cat" / "a.png")
    expected = ["cat/a.png"]
    folder = tmp_path / "animals"
    assert isinstance(open_data(folder), ImageFolder)
    assert open_data(str(folder)).ids == open_data(f"folder:{folder}").ids == open_data(folder).ids == expected
    monkeypatch.chdir(tmp_path)
    assert open_data("animals").ids == open_data("./animals?n=1").ids == expected
    assert open_data(folder / "cat" / "a.png").ids == ["a.png"]
    text(folder / "table.csv", "cat/a.png,lion\n")
    assert open_data(folder / "table.csv").labels == ("lion",)
    picture(tmp_path / "odd?name:x" / "b.png")
    assert open_data("odd?name:x").ids == open_data("folder:odd?name:x").ids == ["b.png"]


def test_what_is_at_hand(tmp_path):
    path, array = picture(tmp_path / "a.png"), np.zeros((4, 5, 3), np.uint8)
    data = open_data([path, (array, 1), (Image.new("RGB", (2, 2)), "cat")], labels=["cat", "dog"], name="mine")
    assert (data.name, data.ids) == ("mine", ["a.png", "1", "2"])
    assert [example.label for example in data] == [None, 1, 0]
    assert open_data(data) is data
    assert open_data(Scenes(3)).ids == open_data(Scenes(3)[:]).ids == SceneData(3).ids
    assert len(open_data(Scenes(0))) == len(open_data([])) == 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "imagenot:/data",
            r"no data set 'imagenot'\. Did you mean imagenet.*"
            r"scenes, scenes_text, samples, imagenet, imagenet_s.*folder",
        ),
        ("animals", "no data set 'animals'.*or give the path of a folder"),
        ("", "no data set ''"),
        ("imagenet", "needs its folder or file: write imagenet:PATH"),
        ("./nowhere", "folder of images was not found"),
        ("C:\\nowhere", "folder of images was not found"),
        ("scenes:many", "expected scenes:200"),
        ("scenes:5@-1", "expected scenes:200"),
        ("scenes:5?objects=3", "objects=3"),
        ("scenes:5?colour=red", "scenes has no option 'colour'; its options: objects, n, seed, indices"),
        ("scenes:5?objects", "expected name=value"),
        ("scenes:5?n=x", "expected a non-negative integer"),
        ("scenes:5?seed=4", "seed= needs n="),
        ("cifar10:x?classes=100", "cifar10 has no option 'classes'; its options: split, n"),
        (b"bytes", "a list of images, but got bytes"),
        (7, "but got int"),
        ({"a": 1}, "but got dict"),
    ],
)
def test_wrong_specifications(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VitrailError, match=message):
        open_data(spec)


class Mine(DataSet):
    name = "mine"

    def __init__(self, root, colour="red"):
        self.root, self.colour = root, colour

    @property
    def ids(self):
        return [f"{self.colour}/{self.root}"]

    def load(self, position):
        return Example(self.ids[position], Image.new("RGB", (4, 4)))


def test_your_own_data_set():
    with DATA_SETS.scope():
        data_set("mine")(Mine)
        data_set("arrays")(lambda place="3": [np.zeros((4, 5, 3), np.uint8)] * int(place or 3))
        assert open_data("mine:a/b?colour=blue").ids == ["blue/a/b"]
        assert open_data("mine:a", colour="green", indices=[0])[0].id == "green/a"
        assert len(open_data("arrays")) == 3
        assert len(open_data("arrays:5?n=2")) == 2
        assert data_name("mine:a?n=1&colour=blue").endswith("/a?colour=blue")
        assert data_name("arrays") == "arrays"
        with pytest.raises(VitrailError, match="mine has no option 'size'; its options: colour, n"):
            open_data("mine:a", size=3)
        with pytest.raises(VitrailError, match="mine needs its folder or file"):
            open_data("mine")
        with pytest.raises(VitrailError, match=r"no data set 'mime'\. Did you mean mine"):
            open_data("mime:a")
        with pytest.raises(VitrailError, match="already a data set 'coco'"):
            data_set("coco")(Mine)
        with pytest.raises(VitrailError, match="takes no arguments"):
            data_set("nothing")(lambda: [])
    assert "mine" not in DATA_NAMES
    with pytest.raises(VitrailError, match="no data set 'mine'"):
        open_data("mine:a")


def test_public_names_and_quick_import():
    assert set(vitrail.data.__all__) <= set(dir(vitrail.data))
    for name in vitrail.data.__all__:
        assert getattr(vitrail.data, name) is not None
    with pytest.raises(AttributeError, match="attribute Nonsense"):
        _ = vitrail.data.Nonsense
    assert issubclass(vitrail.data.Coco, DataSet)
    heavy = {"torch", "timm", "vitrail.data.coco"}
    check = f"import sys, vitrail.data as d; d.open_data('scenes:1'); print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_samples_are_crops_of_the_bundled_photographs():
    data, more = open_data("samples:7@3"), open_data("samples:12@3")
    assert data.ids == ["cat-0", "coffee-0", "rocket-0", "cat-1", "coffee-1", "rocket-1", "cat-2"]
    for few, many in zip(data, more, strict=False):
        assert few.image.size[0] == few.image.size[1] >= 64
        assert few.label is None
        assert (few.id, few.image.tobytes()) == (many.id, many.image.tobytes())
    assert data[0].image.tobytes() != open_data("samples:7@4")[0].image.tobytes()
    with pytest.raises(VitrailError, match=r"expected samples:200, or samples:200@7 for seed 7"):
        open_data("samples:many")
    with pytest.raises(VitrailError, match="at least 1"):
        open_data("samples:0")


def test_joined_data_sets_have_the_images_of_both_and_no_labels(tmp_path):
    for folder, names in (("a", ("cat", "dog")), ("b", ("cat",))):
        for name in names:
            picture(tmp_path / folder / name / f"{folder}-{name}.png")
    spec = f"{tmp_path / 'a'} + {tmp_path / 'b'}"
    data = open_data(spec)
    assert [Path(name).name for name in data.ids] == ["a-cat.png", "a-dog.png", "b-cat.png"]
    assert [example.id for example in data] == data.ids
    assert {example.label for example in data} == {None}
    assert data.labels is None
    twice = open_data(f"{tmp_path / 'b'} + {tmp_path / 'b'}")
    assert [name.partition("/")[0] for name in twice.ids] == ["0", "1"]
    assert open_data(spec, n=2, seed=1).ids == data.subset(2, seed=1).ids
    assert data_name(spec) == " + ".join(data_name(str(tmp_path / folder)) for folder in "ab")
    with pytest.raises(VitrailError, match="nowhere"):
        open_data(f"{tmp_path / 'a'} + {tmp_path / 'nowhere'}")
