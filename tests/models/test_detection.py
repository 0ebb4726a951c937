"""Boxes: YOLOS, a plain Vision Transformer with detection tokens, asked about the class of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests import families
from tests.common import noise
from tests.families import CLASSES, OBJECTS, yolos
from tests.helpers import assert_same_state, relative, state_of
from torch import Tensor, nn

import vitrail
from vitrail.engine.trace import trace
from vitrail.errors import VitrailError
from vitrail.models.detection import Detector
from vitrail.targets import Box, Class, Contrast, Group, Region, Similarity, Text

DOUBLE, SINGLE = torch.float64, torch.float32
SIZE, GRID, QUERIES = (32, 48), (4, 6), 6
middle = pytest.mark.parametrize("mid", [False, True], ids=["plain", "later positions"])


def view_of(module: nn.Module, **options: Any) -> Detector:
    view = vitrail.wrap(module, **options)
    assert isinstance(view, Detector)
    return view


def images(count: int = 2, size: tuple[int, int] = SIZE, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(5)).to(dtype)


@torch.no_grad()
def own(module: nn.Module, pixels: Tensor) -> Tensor:
    """(B, queries, classes): the module's own logits."""
    return module(pixels).logits


def surest(logits: Tensor) -> Tensor:
    return logits.softmax(-1)[..., :-1].amax(-1).argmax(1)


# Logits


@middle
@pytest.mark.parametrize("size", [SIZE, (40, 24)], ids=["native", "interpolated"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-10), (SINGLE, 1e-5)])
def test_logits_are_those_of_the_module(mid: bool, size: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    module, pixels = yolos(mid, dtype), images(3, size, dtype)
    before = state_of(module)
    view, expected = view_of(module, img_size=size), own(module, pixels)
    scale = tolerance * max(1.0, float(expected.abs().max()))
    for query in range(QUERIES):
        assert (view.of_box(query).logits(pixels) - expected[:, query]).abs().max() <= scale
    assert (view.logits(pixels) - expected[torch.arange(3), surest(expected)]).abs().max() <= scale
    assert_same_state(before, state_of(module))
    assert view.labels == (*OBJECTS, "no object")
    assert (view.num_classes, view.num_prefix, view.num_queries) == (CLASSES + 1, 1 + QUERIES, QUERIES)


@middle
def test_removed_patches_are_unseen(mid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the module itself with the removed patches masked in every attention."""
    module, pixels = yolos(mid), images(1)
    view, keep = view_of(module), torch.tensor([[0, 3, 9, 16, 23]])
    removed = torch.ones(GRID[0] * GRID[1], dtype=torch.bool)
    removed[keep[0]] = False
    unseen = torch.cat([torch.tensor([False]), removed, torch.tensor([False] * QUERIES)])

    def masked(_: Any, q: Tensor, k: Tensor, v: Tensor, mask: None, scaling: float, **rest: Any) -> tuple[Tensor, None]:
        scores = (scaling * q @ k.transpose(2, 3)).masked_fill(unseen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    found = [view.of_box(query).encode(view.embed(pixels), keep) for query in range(QUERIES)]
    monkeypatch.setattr("transformers.models.yolos.modeling_yolos.ALL_ATTENTION_FUNCTIONS.get_interface",
                        lambda *_: masked)  # fmt: skip
    expected = own(module, pixels)
    for query in range(QUERIES):
        assert relative(found[query], expected[:, query]) < 1e-10


@middle
def test_biases_and_tokens_add_up_to_the_logit_at_every_layer(mid: bool) -> None:
    pixels = images()
    view = view_of(yolos(mid)).of_box(2)
    for layer in range(4):
        made = trace(view, pixels, rule="frozen", keep=("x", "gx", "bias"), layers=[layer])
        total = (made["x"][layer] * made["gx"][layer]).sum((1, 2)) + made.bias_from(layer)
        assert relative(total, made.y) < 1e-10
    assert torch.equal(view.readout(pixels).argmax(1), torch.tensor([3, 3]))


def test_the_view_of_no_box_reads_the_surest_token() -> None:
    module, pixels = yolos(), images(4)
    readout = view_of(module).readout(pixels)
    assert torch.equal(readout.argmax(1), 1 + surest(own(module, pixels)))
    assert torch.equal(readout.sum(1), torch.ones(4, dtype=DOUBLE))


# Boxes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A detector as `save_pretrained` writes it, with a processor that keeps the shape of images."""
    place = tmp_path_factory.mktemp("yolos")
    yolos(False, SINGLE, image_size=[40, 60]).save_pretrained(place)  # 60 is no multiple of 8
    transformers.YolosImageProcessor().save_pretrained(place)
    return place


def test_a_saved_detector_is_loaded_with_its_processor(folder: Path) -> None:
    view = vitrail.load(f"hf:{folder}")
    assert isinstance(view, Detector)
    assert (view.grid, view.size, view.preprocessing.library_size) == ((5, 7), (40, 56), (40, 60))
    assert view.preprocessing.fit == "border"
    pixels = images(1, (40, 60), SINGLE)
    expected = own(transformers.YolosForObjectDetection.from_pretrained(folder), pixels)
    for query in range(QUERIES):
        assert (view.of_box(query).logits(pixels) - expected[:, query]).abs().max() <= 1e-5
    assert vitrail.load(f"hf:{folder}", img_size=32).grid == (4, 4)


def test_boxes_are_in_pixels_of_the_image(folder: Path) -> None:
    view, photo = vitrail.load(f"hf:{folder}"), noise(120, 80, 0)  # the image fills the input
    assert isinstance(view, Detector)
    module = transformers.YolosForObjectDetection.from_pretrained(folder)
    out = module(view.preprocess(photo)[None])
    processor = transformers.YolosImageProcessor()
    expected = processor.post_process_object_detection(out, threshold=0.0, target_sizes=[(80, 120)])[0]
    boxes = sorted(view.boxes(photo))
    assert [detection.query for detection in boxes] == list(range(QUERIES))
    assert [detection.target for detection in boxes] == expected["labels"].tolist()
    assert [detection.label for detection in boxes] == [OBJECTS[i] for i in expected["labels"].tolist()]
    assert np.allclose([detection.probability for detection in boxes], expected["scores"].tolist(), atol=1e-6)
    assert np.allclose([detection.box for detection in boxes], expected["boxes"].tolist(), atol=1e-3)
    ordered = [detection.probability for detection in view.boxes(photo)]
    assert ordered == sorted(ordered, reverse=True)
    assert view.boxes(photo, threshold=ordered[1]) == view.boxes(photo)[:2]
    inside = view.boxes(view.preprocess(photo))
    assert np.allclose(np.array([detection.box for detection in inside]) * 2,
                       [detection.box for detection in view.boxes(photo)], atol=1e-3)  # fmt: skip
    assert view.preprocessing.box((60, 80))[0] < 0  # a tall image is padded left and right


# Questions


def test_a_box_is_explained(folder: Path, tmp_path: Path) -> None:
    view = vitrail.load(f"hf:{folder}")
    assert isinstance(view, Detector)
    noise(120, 80, 0).save(tmp_path / "noise.png")
    made = vitrail.explain(view, tmp_path / "noise.png", "decompx", target=Box(4))
    detection = next(detection for detection in view.boxes(noise(120, 80, 0)) if detection.query == 4)
    assert (made.target, made.label) == (detection.target, detection.label)
    assert made.probability == pytest.approx(detection.probability, abs=1e-6)
    assert sum(made.split.values()) - made.split["score"] == pytest.approx(made.split["score"], abs=1e-5)
    again = vitrail.open(made.save(tmp_path / "out.png"))
    assert again.model is not None
    assert again.model.question == {"kind": "box", "query": 4}
    assert again.score(["insertion(steps=4)"]) == made.score(["insertion(steps=4)"])


def test_no_object_is_a_class_but_never_the_predicted_one() -> None:
    module, pixels = yolos(), images(1)
    with torch.no_grad():
        module.class_labels_classifier.layers[-1].bias[-1] += 20
    view = view_of(module)
    made = vitrail.explain(view, pixels[0], "decompx", target=Box(3))
    expected = own(module, pixels)[0, 3]
    assert made.target == int(expected[:-1].argmax())
    assert made.top[0][1] == "no object"
    made = vitrail.explain(view, pixels[0], "decompx", target=Box(3, "dog"), against="no object")
    assert made.split["score"] == pytest.approx(float(expected[1] - expected[-1]), abs=1e-9)


def test_without_a_box_each_image_is_asked_about_its_surest() -> None:
    module, pixels = yolos(), images(3)
    view, logits = view_of(module), own(module, pixels)
    explanations = vitrail.explain(view, pixels, "decompx")
    assert [made.model.question["query"] for made in explanations] == surest(logits).tolist()
    dogs = vitrail.explain(view, pixels, "decompx", target="dog", against="cat")
    assert [made.model.question["query"] for made in dogs] == logits.softmax(-1)[..., 1].argmax(1).tolist()
    assert {made.against_label for made in dogs} == {"cat"}
    (contrast,) = vitrail.explain(view, pixels[:1], "decompx", target=Contrast("dog", "cat"))
    assert torch.equal(contrast.map, dogs[0].map)
    (listed,) = vitrail.explain(view, pixels[:1], "decompx", target=[1])
    assert listed.model.question == dogs[0].model.question


@pytest.mark.parametrize(
    ("method", "params"),
    [("decompx.skipplus", {}), ("tis", {"masks": 16}), ("rise", {"masks": 8}), ("lrp", {}), ("alti", {})],
)
def test_methods_explain_boxes(method: str, params: dict[str, Any]) -> None:
    made = vitrail.explain(view_of(yolos()), images(1)[0], method, target=Box(1, 2), **params)
    assert made.map.shape in (GRID, SIZE)
    assert made.map.isfinite().all()
    assert made.map.abs().sum() > 0


def test_a_detector_is_measured_by_its_surest_box() -> None:
    rows = vitrail.evaluate(view_of(yolos(dtype=SINGLE)), [noise(60, 40, seed) for seed in range(2)],
                            ["decompx"], ["deletion(steps=4)"])  # fmt: skip
    assert rows["value"].notna().all()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Box(6), "there is no box 6 in .*: expected 0…5"),
        (Box(-1), "there is no box -1"),
        (Box(1, "unicorn"), "has no class 'unicorn'"),
        (Contrast(Box(1, "dog"), Box(2, "dog")), "at the same place"),
        (Region(np.ones(SIZE, bool)), "has no output per patch"),
        (Box("3"), r"a box is named by its number, as boxes\(image\) lists them, but got '3'"),  # type: ignore[arg-type]
        (Box(2.0), "but got 2.0"),  # type: ignore[arg-type]
        (Box(True), "but got True"),
        (Contrast(Box(1, "dog"), Group(["cat"])), "a Box cannot be opposed to a Group: give against= a class"),
        (Text("dog"), "reads no texts: ask about one of its classes"),
        (Box(None, Text("dog")), "reads no texts"),  # type: ignore[arg-type]
        (lambda tokens, pooled, logits: logits[:, 0], "the function <lambda> is no class"),
        (Similarity(np.zeros((8, 8, 3), np.uint8)), "is a detector, which has an embedding for each box and none"),
    ],
)
def test_wrong_questions_get_one_sentence(target: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.explain(view_of(yolos()), images(1)[0], target=target)


def test_images_are_not_compared_by_a_detector() -> None:
    with pytest.raises(VitrailError, match="and none for the image: ask about a box, or compare images with"):
        vitrail.similar(view_of(yolos()), *images(2))


def test_a_class_is_opposed_to_a_group() -> None:
    module, pixels = yolos(), images(1)
    view, logits = view_of(module), own(module, pixels)
    row = logits[0, surest(logits)[0]]
    for target in ("dog", Class("dog")):
        made = vitrail.explain(view, pixels[0], "decompx", target, against=Group(["cat", "cup"], "rest"))
        assert (made.label, made.against_label) == ("dog", "rest")
        expected = row[OBJECTS.index("dog")] - row[[OBJECTS.index("cat"), OBJECTS.index("cup")]].logsumexp(0)
        assert made.split["score"] == pytest.approx(float(expected), abs=1e-9)
    contrast = vitrail.explain(view, pixels[0], "decompx", Contrast("dog", Group(["cat", "cup"])))
    assert torch.equal(contrast.map, made.map)


def test_no_object_is_not_predicted_beside_a_group() -> None:
    module, pixels = yolos(), images(1)
    with torch.no_grad():
        module.class_labels_classifier.layers[-1].bias[-1] += 20
    logits = own(module, pixels)
    likeliest = int(logits[0, surest(logits)[0], :-1].argmax())
    others = Group([index for index in range(len(OBJECTS)) if index != likeliest], "others")
    made = vitrail.explain(view_of(module), pixels[0], "decompx", against=others)
    assert (made.label, made.against_label) == (OBJECTS[likeliest], "others")


def test_a_classifier_has_no_boxes() -> None:
    with pytest.raises(VitrailError, match="detects no boxes: load a YOLOS"):
        vitrail.explain(vitrail.wrap(families.build("timm_vit")), families.images("timm_vit", 1)[0], target=Box(0))


def test_labels_name_the_objects() -> None:
    assert view_of(yolos(), labels=list("abcde")).labels == (*"abcde", "no object")
    assert view_of(yolos(id2label=None, num_labels=5)).labels[:2] == ("class 0", "class 1")
    with pytest.raises(VitrailError, match="6 names, but the model has 5 classes"):
        view_of(yolos(), labels=list("abcdef"))


# What is refused


def saved(kind: str, place: Path) -> Path:
    """The configuration of a model as `save_pretrained` writes it."""
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")()
    config.architectures = [kind]
    config.save_pretrained(place)
    return place


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("DetrForObjectDetection", "its boxes come from a decoder"),
        ("ConditionalDetrForObjectDetection", "its boxes come from a decoder"),
        ("DeformableDetrForObjectDetection", "its boxes come from a decoder"),
        ("RTDetrForObjectDetection", "its boxes come from a decoder"),
        ("SegformerForSemanticSegmentation", "it merges patches or decodes them together"),
        ("BeitForSemanticSegmentation", "it merges patches or decodes them together"),
    ],
)
def test_decoders_are_refused_by_name(kind: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(VitrailError, match=f"^{kind} is not supported: {message}.*wrap a module of your own"):
        vitrail.load(f"hf:{saved(kind, tmp_path)}")


def test_modules_with_a_decoder_are_refused_by_name() -> None:
    config = transformers.SegformerConfig(
        depths=[1, 1], hidden_sizes=[8, 8], num_encoder_blocks=2, num_attention_heads=[1, 1], sr_ratios=[1, 1],
        patch_sizes=[3, 3], strides=[2, 2], mlp_ratios=[1, 1], decoder_hidden_size=8,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        module = transformers.SegformerForSemanticSegmentation(config)
    with pytest.raises(VitrailError, match="SegformerForSemanticSegmentation is not supported: it merges patches"):
        vitrail.wrap(module)
