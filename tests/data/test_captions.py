"""Captioned scenes: the same on every machine, exact masks, and captions that are true of one object only."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

import vitrail
from vitrail.data import CaptionedScene, CaptionedSceneData, CaptionedScenes, captions, open_data
from vitrail.errors import VitrailError

PINNED = {
    (0, 0): "252368cca648273c",
    (0, 1): "5a1fa56744ba4535",
    (7, 12): "2804e69c688fec26",
    (2**40, 99): "5a6db48d6608eac5",
}


def digest(scene: CaptionedScene) -> str:
    parts = [scene.image, scene.clutter, *(item.mask for item in scene.objects)]
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:16]


@pytest.mark.parametrize(("seed", "index"), PINNED)
def test_pixels_are_pinned(seed: int, index: int) -> None:
    assert digest(CaptionedScenes(index + 1, seed)[index]) == PINNED[seed, index]


def test_a_scene_depends_on_seed_and_index_alone() -> None:
    short, long = CaptionedScenes(3, seed=3), CaptionedScenes(50, seed=3)
    assert [digest(scene) for scene in long[:3]] == [digest(scene) for scene in short]
    assert digest(long[-1]) == digest(long[49])
    assert digest(CaptionedScenes(3, seed=4)[0]) != digest(short[0])


def test_no_two_objects_have_the_same_caption() -> None:
    scenes = list(CaptionedScenes(60, seed=1))
    assert {len(scene.objects) for scene in scenes} == {2, 3}
    for scene in scenes:
        assert len({item.caption for item in scene.objects}) == len(scene.objects)
        assert [item.caption for item in scene.objects] == [f"a {item.colour} {item.shape}" for item in scene.objects]


@pytest.mark.parametrize("shared", ["colour", "shape"])
def test_what_is_shared(shared: Any) -> None:
    other = "shape" if shared == "colour" else "colour"
    for scene in CaptionedScenes(15, seed=2, objects=3, shared=shared):
        first, second, third = scene.objects
        assert getattr(first, shared) == getattr(second, shared) != getattr(third, shared)
        assert getattr(first, other) == getattr(third, other) != getattr(second, other)


def test_pairs_that_share_nothing_occur_too() -> None:
    pairs = [scene.objects for scene in CaptionedScenes(60, seed=3, objects=2)]
    kinds = {(first.colour == second.colour, first.shape == second.shape) for first, second in pairs}
    assert kinds == {(True, False), (False, True), (False, False)}


def test_masks_are_disjoint_and_boxes_tight() -> None:
    for scene in CaptionedScenes(30, seed=5):
        assert (scene.image.shape, scene.image.dtype) == ((64, 64, 3), np.uint8)
        assert np.sum([scene.clutter, *(item.mask for item in scene.objects)], axis=0).max() == 1
        for item in scene.objects:
            x0, y0, x1, y1 = item.box
            inside = item.mask[y0:y1, x0:x1]
            assert inside.sum() == item.mask.sum() > 40
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))


def test_objects_have_the_colour_of_their_caption() -> None:
    bright = {"red": "100", "yellow": "110", "green": "010", "cyan": "011", "blue": "001", "magenta": "101"}
    for scene in CaptionedScenes(40, seed=6):
        for item in scene.objects:
            mean = scene.image[item.mask].mean(0)
            middle = (mean.max() + mean.min()) / 2
            assert "".join(str(int(channel > middle)) for channel in mean) == bright[item.colour]


def test_size_and_places_are_those_of_the_object() -> None:
    sizes, places = set(), set()
    for scene in CaptionedScenes(60, seed=7):
        for item in scene.objects:
            x0, y0, x1, y1 = item.box
            assert (
                {"small": 12, "large": 17}[item.size] <= max(x1 - x0, y1 - y0) <= {"small": 20, "large": 30}[item.size]
            )
            sides = {"left": x1 <= 43, "right": x0 >= 21, "top": y1 <= 43, "bottom": y0 >= 21}
            assert all(sides[place] for place in item.places)
            sizes.add(item.size)
            places |= set(item.places)
    assert (sizes, places) == ({"small", "large"}, {"left", "right", "top", "bottom"})


def test_captions_are_english() -> None:
    assert captions.describe("star", "red") == "a red star"
    assert captions.describe("star", "red", "large", "left") == "a large red star on the left"
    assert captions.describe("object", "red", place="top") == "a red object at the top"
    assert [captions.describe(word) for word in ("arrow", "hourglass", "heart", "object")] == [
        "an arrow",
        "an hourglass",
        "a heart",
        "an object",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"objects": 1}, "objects=2, objects=3"), ({"shared": "size"}, "share"), ({"seed": -1}, "seed=-1")],
)
def test_bad_arguments_say_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CaptionedScenes(1, **options)


# As a data set


def test_each_object_is_an_example() -> None:
    scenes = CaptionedScenes(6, seed=9)
    data = open_data("scenes_text:6@9")
    assert isinstance(data, CaptionedSceneData)
    assert data.labels == captions.CAPTIONS
    places = [(number, item) for number, scene in enumerate(scenes) for item in scene.objects]
    assert len(data) == len(data.ids) == len(places)
    for example, name, (number, item) in zip(data, data.ids, places, strict=True):
        assert example.id == name
        assert name.startswith(f"{number}-")
        assert name.endswith(f"-{item.colour}-{item.shape}")
        assert data.labels[example.label] == item.caption
        (found,) = [thing for thing in example.objects if thing.label == example.label]
        assert np.array_equal(found.mask, item.mask)
    assert open_data(scenes).ids == open_data(scenes[:]).ids == data.ids


def test_options_of_the_name() -> None:
    data = open_data("scenes_text:4@1?objects=3&shared=colour")
    assert len(data) == 12
    assert vitrail.data.names.data_name("scenes_text:4@1") == "scenes_text:@1"
    with pytest.raises(VitrailError, match="got 5"):
        open_data("scenes_text:4?objects=5")
    with pytest.raises(VitrailError, match="got 'size'"):
        open_data("scenes_text:4?shared=size")
    with pytest.raises(VitrailError, match="expected scenes_text:200"):
        open_data("scenes_text:many")
