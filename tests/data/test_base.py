"""What all data sets promise: order, slices, subsets, index files, checked examples."""

import json
import pickle

import numpy as np
import pytest
from PIL import Image
from tests.data.layouts import picture, text

from vitrail.data import DataSet, Example, InMemory, Object, Subset, read_indices
from vitrail.data.base import largest_class
from vitrail.errors import VitrailError


def numbered(count: int) -> InMemory:
    pixels = [np.full((2, 3, 3), number, dtype=np.uint8) for number in range(count)]
    return InMemory([(array, number % 3) for number, array in enumerate(pixels)], labels=["a", "b", "c"])


def test_items_slices_and_iteration():
    data = numbered(7)
    assert [example.id for example in data] == data.ids == [str(number) for number in range(7)]
    assert data[-1].id == "6"
    assert data[np.int64(2)].label == 2
    assert (data[1].image.size, data[1].image.mode) == ((3, 2), "RGB")
    part = data[5:1:-2]
    assert isinstance(part, DataSet)
    assert (part.ids, part.labels, part.name) == (["5", "3"], ("a", "b", "c"), "images")
    assert part[1].id == "3"
    with pytest.raises(IndexError, match="index 7 is out of range: images has 7 examples"):
        data[7]
    with pytest.raises(TypeError):
        data["0"]
    assert repr(data) == "<InMemory 'images': 7 examples>"


def test_draws_are_the_permutations_of_numpy_and_nested():
    data = numbered(40)
    drawn = data.subset(10, seed=42)
    expected = sorted(np.random.default_rng(42).permutation(40)[:10])
    assert drawn.ids == [str(number) for number in expected]
    assert set(drawn.ids) < set(data.subset(25, seed=42).ids)
    assert drawn.ids != data.subset(10, seed=1).ids
    assert data.subset(n=0).ids == []
    assert data.subset(40).ids == data.ids


def test_given_indices_keep_their_order(tmp_path):
    data = numbered(9)
    assert data.subset(indices=[5, 0, 8]).ids == ["5", "0", "8"]
    assert data.subset(indices=np.array([5, 0])).subset(indices=[1]).ids == ["0"]
    assert data.subset(indices=text(tmp_path / "list.txt", "5 0\n8\n")).ids == ["5", "0", "8"]


def test_wrong_subsets():
    data = numbered(5)
    for arguments, message in [
        ({}, "either n"),
        ({"n": 2, "indices": [1]}, "not both"),
        ({"n": 6}, "cannot draw a subset of n=6: images has 5 examples"),
        ({"n": -1}, "n=-1"),
        ({"indices": [5]}, "index 5 is outside"),
        ({"indices": [-1]}, "index -1 is outside"),
        ({"indices": [1, 1]}, "twice"),
    ]:
        with pytest.raises(VitrailError, match=message):
            data.subset(**arguments)
    with pytest.raises(TypeError):
        Subset(data, [0.5])


def test_index_files(tmp_path):
    numbers = [17739, 9978, 21509]
    for content in ("17739 9978 21509", "17739\n9978\r\n\n21509\n", json.dumps(numbers), "17739, 9978,21509"):
        assert read_indices(text(tmp_path / "indices", content)) == numbers
    for content, found in (("", "nothing"), ("3 -1", "'-1'"), ("[1, 2.5]", "'2.5'"), ("[[1]]", r"'\[1\]'")):
        with pytest.raises(VitrailError, match=f"holds {found}"):
            read_indices(text(tmp_path / "indices", content))
    with pytest.raises(VitrailError, match=r"index file '.*nowhere' was not found"):
        read_indices(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(VitrailError, match="not UTF-8"):
        read_indices(tmp_path / "binary")


def test_examples_check_their_masks():
    image = Image.new("RGB", (3, 2))
    good = np.zeros((2, 3), dtype=bool)
    Example("x", image, 0, (Object(0, None, good),), good)
    for bad in (good.T, good.astype(np.uint8)):
        with pytest.raises(VitrailError, match=r"mask of example 'x' .* expected \(height, width\) = \(2, 3\)"):
            Example("x", image, 0, (Object(0, None, bad),))
        with pytest.raises(VitrailError, match="mask of example 'x'"):
            Example("x", image, ignore=bad)


def test_items_in_memory(tmp_path):
    path = picture(tmp_path / "a" / "cat.png")
    ready = Example("ready", Image.new("RGB", (2, 2)), 1)
    data = InMemory([path, (str(picture(tmp_path / "dog.png")), "dog"), Image.new("L", (4, 4)), ready], ["cat", "dog"])
    assert data.ids == ["cat.png", "dog.png", "2", "ready"]
    assert [example.label for example in data] == [None, 1, None, 1]
    clash = InMemory([path, (path, 0)])
    assert [example.id for example in clash] == clash.ids == ["0", "1"]
    again = InMemory([ready, ready])
    assert [example.id for example in again] == again.ids == ["0", "1"]
    with pytest.raises(VitrailError, match="label 'fish', which is not among"):
        InMemory([(path, "fish")], ["cat"])
    with pytest.raises(VitrailError, match="label 2, expected 0…1"):
        InMemory([(path, 2)], ["cat", "dog"])
    with pytest.raises(VitrailError, match="item 0 is a list"):
        InMemory([[path, 1]])
    with pytest.raises(VitrailError, match=r"missing\.png' was not found"):
        InMemory([tmp_path / "missing.png"])[0]


def test_data_sets_travel_to_other_processes():
    data = numbered(4)[1:]
    assert pickle.loads(pickle.dumps(data)).ids == data.ids


def test_largest_class():
    mask = np.zeros((5, 6), dtype=bool)
    mask[1:3, 2:6] = True
    objects = [Object(4, (0, 0, 2, 2)), Object(7, None, mask), Object(4, (0, 0, 2, 3)), Object(None, (0, 0, 99, 99))]
    assert largest_class(objects) == 4
    assert largest_class(objects[:2]) == 7
    assert largest_class([Object(9, (0, 0, 1, 1)), Object(3, (2, 2, 3, 3)), Object(8)]) == 3
    assert largest_class([]) is None
