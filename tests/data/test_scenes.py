"""Scenes: the same on every machine, with masks and boxes that are exact and classes that only the shape tells."""

import hashlib

import numpy as np
import pytest

from vitrail.data import Scenes, scenes

PINNED = {
    (0, 0): "39de8afcbfaccc50",
    (0, 1): "b24af7c223903060",
    (7, 12): "4e799e9f819b4423",
    (123, 4567): "ff9a7e97a6925855",
    (2**40, 99): "b9ba4fc408cd492c",
}


def digest(scene):
    parts = [scene.image, scene.clutter, *(item.mask for item in scene.objects)]
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:16]


@pytest.mark.parametrize(("seed", "index"), PINNED)
def test_pixels_are_pinned(seed, index):
    assert digest(Scenes(index + 1, seed)[index]) == PINNED[seed, index]


def test_a_scene_depends_on_seed_and_index_alone():
    short, long = Scenes(5, seed=3), Scenes(50, seed=3)
    assert [digest(scene) for scene in long[:5]] == [digest(scene) for scene in short]
    assert digest(long[-1]) == digest(long[49])
    assert digest(Scenes(5, seed=4)[0]) != digest(short[0])


def test_number_of_objects():
    assert {len(scene.objects) for scene in Scenes(30, seed=1)} == {1, 2}
    for count in (1, 2):
        assert {len(scene.objects) for scene in Scenes(20, seed=1, objects=count)} == {count}


def test_every_class_appears_and_two_objects_differ():
    pairs = [[item.label for item in scene.objects] for scene in Scenes(150, seed=2, objects=2)]
    assert all(first != second for first, second in pairs)
    assert {label for pair in pairs for label in pair} == set(range(len(Scenes.labels))) == set(range(10))


def test_masks_are_disjoint_and_boxes_tight():
    for scene in Scenes(60, seed=5):
        assert (scene.image.shape, scene.image.dtype) == ((64, 64, 3), np.uint8)
        layers = [scene.clutter, *(item.mask for item in scene.objects)]
        assert np.sum(layers, axis=0).max() == 1
        for item in scene.objects:
            x0, y0, x1, y1 = item.box
            inside = item.mask[y0:y1, x0:x1]
            assert inside.sum() == item.mask.sum() > 40
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))


def test_mask_holds_exactly_the_pixels_that_show_the_object(monkeypatch):
    with_object = Scenes(20, seed=6, objects=1)[:]
    monkeypatch.setattr(scenes.Canvas, "paint_object", lambda *args: None)
    for scene, bare in zip(with_object, Scenes(20, seed=6, objects=1), strict=True):
        changed = (scene.image != bare.image).any(axis=2)
        mask = scene.objects[0].mask
        assert not changed[~mask].any()
        assert changed[mask].mean() > 0.98


def test_class_changes_the_shape_and_nothing_else(monkeypatch):
    original = Scenes(40, seed=7, objects=1)[:]
    choose = scenes._different_labels
    monkeypatch.setattr(scenes, "_different_labels", lambda dice, n: [(label + 3) % 10 for label in choose(dice, n)])
    for scene, other in zip(original, Scenes(40, seed=7, objects=1), strict=True):
        either = scene.objects[0].mask ^ other.objects[0].mask
        assert other.objects[0].label != scene.objects[0].label
        assert either.any()
        assert np.array_equal(scene.image[~either], other.image[~either])


def test_colour_does_not_give_the_class_away():
    features, labels = [], []
    for scene in Scenes(1000, seed=8, objects=1):
        pixels = scene.image[scene.objects[0].mask].astype(float)
        features.append([1, *pixels.mean(axis=0), *pixels.std(axis=0)])
        labels.append(scene.objects[0].label)
    x, y = np.array(features), np.eye(10)[labels]
    weights = np.linalg.lstsq(x[:700], y[:700], rcond=None)[0]
    hits = (x[700:] @ weights).argmax(axis=1) == np.array(labels[700:])
    assert hits.mean() < 0.18  # chance is 0.10, and five standard errors more would be 0.19


def test_bad_arguments_say_what_is_wrong():
    with pytest.raises(ValueError, match="objects=3"):
        Scenes(1, objects=3)
    with pytest.raises(ValueError, match="seed=-1"):
        Scenes(1, seed=-1)
    with pytest.raises(IndexError, match="index 4 is out of range: there are 4 scenes"):
        Scenes(4)[4]
