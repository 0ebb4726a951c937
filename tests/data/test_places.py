"""Places: the annotated object of each image, asked about within its mask or by the box that detects it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests import families
from tests.common import noise
from tests.families import CLASSES, OBJECTS, WIDTH, yolos
from tests.helpers import assert_same_state, state_of, sure_detector
from torch import nn

import vitrail
from vitrail import VitrailError
from vitrail.data import Example, InMemory, Object
from vitrail.data.annotations import class_map
from vitrail.data.base import Mask
from vitrail.data.places import NoPlaceError, any_place, place_map, place_of
from vitrail.metrics import measure
from vitrail.models.detection import Detection, Detector
from vitrail.models.questions import in_mask
from vitrail.models.view import View
from vitrail.targets import Box, Region

QUICK = ["insertion(steps=4)", "pointing_game", "discriminativity"]
LABELS = list("abcde")


@pytest.fixture(scope="module")
def segmenter() -> View:
    """32 × 32 pixels in 4 × 4 patches."""
    head = nn.utils.skip_init(nn.Linear, WIDTH, CLASSES)
    families.randomize(head, seed=2)
    return vitrail.wrap(families.build("hf_patches"), head=head.eval(), pool="patches", labels=LABELS)


@pytest.fixture(scope="module")
def detector() -> Detector:
    return sure_detector()


def rectangle(size: tuple[int, int], rows: slice, columns: slice) -> Mask:
    mask = np.zeros(size, bool)
    mask[rows, columns] = True
    return mask


LEFT, RIGHT = rectangle((64, 64), slice(10, 50), slice(0, 20)), rectangle((64, 64), slice(20, 60), slice(40, 64))


def scene(*objects: Object, label: int | None = 2, seed: int = 0) -> Example:
    return Example(f"scene-{seed}", noise(64, 64, seed), label, objects)


# Regions


def test_a_region_is_that_of_the_objects_of_the_class(segmenter: View) -> None:
    another = rectangle((64, 64), slice(0, 8), slice(20, 64))
    example = scene(Object(2, None, LEFT), Object(3, None, RIGHT), Object(2, None, another))
    pixels = segmenter.preprocess(example.image)
    place = place_of(segmenter, "region", example, pixels, int)
    assert place.target == 2
    assert list(place.objects) == [example.objects[0], example.objects[2]]
    expected = in_mask(segmenter, segmenter.preprocessing.mask(LEFT | another))
    assert torch.equal(place.view.logits(pixels[None]), expected.logits(pixels[None]))
    unlabelled = place_of(segmenter, "region", scene(Object(None, None, RIGHT), label=None), pixels, int)
    assert unlabelled.target is None
    assert unlabelled.view.question == in_mask(segmenter, segmenter.preprocessing.mask(RIGHT)).question


def test_evaluation_asks_about_the_region_of_each_object(segmenter: View) -> None:
    """A picture that is listed once for each of its objects: the values are those of the single questions."""
    examples = [scene(Object(2, None, LEFT), Object(3, None, RIGHT), label=label) for label in (2, 3)]
    data = InMemory([replace(example, id=str(i)) for i, example in enumerate(examples)])
    before = state_of(segmenter.module)
    rows = vitrail.evaluate(segmenter, data, ["decompx", "rise(masks=8)"], QUICK, target="region")
    assert_same_state(before, state_of(segmenter.module))
    assert set(rows["explained"]) == {"region"}
    assert rows["target"].tolist() == [2] * 6 + [3] * 6
    for image, label, own, other in (("0", 2, LEFT, RIGHT), ("1", 3, RIGHT, LEFT)):
        ex = vitrail.explain(segmenter, examples[0].image, "decompx", target=Region(own, label))
        assert ex.model is not None
        mine = rows[(rows["image"] == image) & (rows["method"] == "decompx")].set_index("metric")["value"]
        assert mine["insertion(steps=4)"] == pytest.approx(ex.score("insertion(steps=4)")["insertion(steps=4)"])
        masks = [segmenter.preprocessing.mask(mask)[None] for mask in (own, other)]
        pixels = segmenter.preprocess(ex.image)[None]
        for metric in QUICK[1:]:
            (scored,) = measure(metric, ex.model, pixels, ex.map[None], label, masks=masks[0], others=masks[1])
            assert mine[metric] == pytest.approx(scored.value, rel=1e-5)


def test_images_without_a_region_are_left_out(segmenter: View) -> None:
    segmenter = replace(segmenter, preprocessing=replace(segmenter.preprocessing, fit="crop", resize=None))
    outside = np.zeros((32, 96), bool)
    outside[:, :10] = True  # beyond the square in the middle
    examples = [
        scene(Object(2, None, LEFT), seed=1),
        scene(Object(3, None, LEFT), seed=2),
        scene(Object(2, (0.0, 0.0, 9.0, 9.0)), seed=3),
        Example("wide", noise(96, 32, 4), 2, (Object(2, None, outside),)),
    ]
    with pytest.warns(UserWarning, match="3 of 4 images were left out; the first: no object of the image's class has"):
        rows = vitrail.evaluate(segmenter, examples, ["random"], ["deletion(steps=2)"], target="region")
    assert rows["image"].tolist() == ["scene-1"]
    assert rows.attrs["skipped"] == {
        "scene-2": "no object of the image's class has a mask.",
        "scene-3": "no object of the image's class has a mask.",
        "wide": "the object lies outside the part of the image that the model sees.",
    }
    with pytest.raises(VitrailError, match=r"1 were left out \(no object of the image's class has a mask\)\.$"):
        vitrail.evaluate(segmenter, examples[1:2], ["random"], ["deletion(steps=2)"], target="region")


# Boxes


def shown(view: Detector, example: Example) -> list[Detection]:
    return view.boxes(view.preprocess(example.image), 0.5)


def boxed(view: Detector, *, label: int | None = None, shift: float = 0.0, seed: int = 0) -> tuple[Example, Detection]:
    """An image whose only object is where the model detects something; ``label``: another class than what it says."""
    image = noise(48, 32, seed)
    detection = shown(view, Example("", image))[0]
    (x0, y0, x1, y1), own = detection.box, detection.target if label is None else label
    box = (max(x0, 0.0), max(y0, 0.0), min(x1, 48.0) - shift * (x1 - x0), min(y1, 32.0))
    return Example(f"box-{seed}", image, own, (Object(own, box),)), detection


def test_the_detection_that_fits_best_is_asked_about(detector: Detector) -> None:
    image = noise(48, 32, 0)
    detections = shown(detector, Example("", image))
    by_class = {d.target: [other for other in detections if other.target == d.target] for d in detections}
    alike = next(same for same in by_class.values() if len(same) > 1)
    assert len(by_class) > 1, "other classes are detected, too"
    for detection in alike:
        x0, y0, x1, y1 = detection.box
        near, far = (max(x0, 0), max(y0, 0), min(x1, 48), min(y1, 32)), (0.0, 0.0, 4.0, 4.0)
        objects = (Object(detection.target, far), Object(detection.target, near))
        place = place_of(
            detector, "box", Example("a", image, detection.target, objects), detector.preprocess(image), int
        )
        assert place.view.question == {"kind": "box", "query": detection.query}
        assert place.target == detection.target
        assert list(place.objects) == [objects[1]]


def test_a_box_of_another_class_or_place_is_none(detector: Detector) -> None:
    def place(example: Example, remap: Any = int) -> Any:
        return place_of(detector, "box", example, detector.preprocess(example.image), remap)

    example, detection = boxed(detector)
    said = {d.target for d in shown(detector, example)}
    other = next(label for label in range(CLASSES) if label not in said)
    with pytest.raises(NoPlaceError, match="detects nothing that fits"):
        place(boxed(detector, label=other)[0])
    with pytest.raises(NoPlaceError, match="detects nothing that fits"):
        place(boxed(detector, shift=0.9)[0])
    with pytest.raises(NoPlaceError, match="no object of the image's class has a box in the part"):
        place(replace(example, objects=(Object(example.label, (60.0, 0.0, 70.0, 9.0)),)))
    # of a class that the model does not know, any detection there
    assert place(boxed(detector, label=other)[0], lambda label: -1 - label).target in said
    mask = np.zeros((32, 48), bool)
    x0, y0, x1, y1 = (round(edge) for edge in example.objects[0].box or ())
    mask[y0:y1, x0:x1] = True
    assert place(replace(example, objects=(Object(example.label, None, mask),))).target == detection.target


def test_unsure_boxes_are_no_detections() -> None:
    view = vitrail.wrap(yolos(dtype=torch.float32))
    assert isinstance(view, Detector)
    image = noise(48, 32, 0)
    best = view.boxes(view.preprocess(image))[0]
    assert best.probability < 0.5
    example = Example("a", image, best.target, (Object(best.target, best.box),))
    with pytest.raises(NoPlaceError, match="detects nothing that fits"):
        place_of(view, "box", example, view.preprocess(image), int)


def test_evaluation_asks_about_the_box_of_each_object(detector: Detector) -> None:
    first, detection = boxed(detector, seed=0)
    missed = replace(boxed(detector, shift=0.9, seed=1)[0], id="missed")
    beside = Object(first.label, (0.0, 0.0, 5.0, 5.0))
    example = replace(first, objects=(*first.objects, beside))
    with pytest.warns(UserWarning, match="1 of 2 images were left out; the first: the model detects nothing that fits"):
        rows = vitrail.evaluate(detector, [example, missed], ["decompx"], [*QUICK, "box_localization"], target="box")
    assert set(rows["image"]) == {"box-0"}
    assert set(rows["target"]) == {detection.target}
    ex = vitrail.explain(detector, example.image, "decompx", target=Box(detection.query, detection.target))
    values = rows.set_index("metric")["value"]
    assert values["insertion(steps=4)"] == pytest.approx(ex.score("insertion(steps=4)")["insertion(steps=4)"])
    assert ex.model is not None
    pixels = detector.preprocess(ex.image)[None]
    boxes = detector.preprocessing.boxes([first.objects[0].box or ()], example.image.size)
    (scored,) = measure("pointing_game", ex.model, pixels, ex.map[None], detection.target, boxes=[boxes])
    assert np.array_equal(values["pointing_game"], scored.value, equal_nan=True)
    assert 0 <= values["discriminativity"] <= 1, "the other object of the class is another one"


def test_where_classes_differ_a_box_is_of_any_class(detector: Detector, segmenter: View) -> None:
    example, detection = boxed(detector)
    breeds = InMemory(
        [replace(example, label=1, objects=(Object(1, example.objects[0].box),))], labels=["pug", "collie"]
    )
    rows = vitrail.evaluate(detector, breeds, ["decompx"], ["deletion(steps=2)"], target="box")
    assert rows["target"].tolist() == [detection.target]
    with pytest.raises(VitrailError, match=r"the classes of images \(2\) and .* \(6\) differ"):
        vitrail.evaluate(detector, breeds, ["decompx"], ["deletion(steps=2)"], target="label")
    with pytest.raises(VitrailError, match=r"the classes of images \(2\) and .* \(5\) differ"):
        place_map(segmenter, "region", breeds)
    named = InMemory([], labels=[OBJECTS[3], OBJECTS[1]])
    assert [place_map(detector, "box", named)(label) for label in (0, 1)] == [3, 1]
    assert class_map(detector, named)(0) == 3


# What is refused


@pytest.mark.parametrize(
    ("kind", "message"),
    [("region", "has no output per patch, so that there are no regions"), ("box", "detects no boxes: load a YOLOS")],
)
def test_models_without_places_are_refused(kind: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.evaluate("scenes", "scenes:1", "random", "sparseness", target=kind)


def test_data_without_annotations_are_refused(segmenter: View, detector: Detector) -> None:
    photos = [noise(64, 64, seed) for seed in range(3)]
    with pytest.raises(
        VitrailError, match=r"within its mask, but none of the first 3 images of images has one: use .* masks"
    ):
        vitrail.evaluate(segmenter, photos, "random", "sparseness", target="region")
    with pytest.raises(VitrailError, match=r"by the box that detects it, but none of .*: use data with boxes or masks"):
        vitrail.evaluate(detector, photos, "random", "sparseness", target="box")
    only_boxes = [scene(Object(2, (0.0, 0.0, 20.0, 20.0)))]
    with pytest.raises(VitrailError, match="within its mask, but none of the first 1"):
        vitrail.evaluate(segmenter, only_boxes, "random", "sparseness", target="region")


def test_methods_that_cannot_explain_a_place_are_refused_at_once(segmenter: View) -> None:
    @vitrail.method("tests_whole_images")
    class WholeImages(vitrail.methods.base.Method):  # type: ignore[misc]
        @classmethod
        def unsupported(cls, model: View) -> str | None:
            return "it asks about whole images" if model.question else None

    with pytest.raises(VitrailError, match=r"tests_whole_images cannot explain .*: it asks about whole images"):
        vitrail.evaluate(segmenter, [scene(Object(2, None, LEFT))], "tests_whole_images", "sparseness", target="region")


def test_some_place_is_one_of_the_model(segmenter: View, detector: Detector) -> None:
    pixels = segmenter.preprocess(noise(64, 64, 0))[None]
    assert torch.allclose(any_place(segmenter, "region").logits(pixels), segmenter.logits(pixels), atol=1e-5)
    assert any_place(detector, "box").question == {"kind": "box", "query": 0}
