"""Explanations as files of other tools, read back: by their libraries where these are installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tests.common import LABELS, files, noise

import vitrail
from vitrail import Explanation, VitrailError
from vitrail.data.coco_masks import decode_runs, decode_segmentation, encode_mask, encode_runs, pack_runs, unpack_runs
from vitrail.integrations.label_studio import brush_runs
from vitrail.models.view import View
from vitrail.show.heatmap import fit_to_image

METHOD = "input_x_gradient"  # some of the evidence is for any class, some against it
MASKS = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**81 - 1))


def mask_of(drawn: tuple[int, int, int]) -> NDArray[np.bool_]:
    height, width, bits = drawn
    return np.array([bits >> place & 1 for place in range(height * width)], dtype=bool).reshape(height, width)


@pytest.fixture
def explanations(model: View, tmp_path: Path) -> list[Explanation]:
    """Two images in different folders; the first is explained for two classes."""
    paths = [tmp_path / "images" / "a" / "first.png", tmp_path / "images" / "b" / "second.png"]
    for seed, path in enumerate(paths):
        path.parent.mkdir(parents=True)
        noise(64 - 8 * seed, 40, seed).save(path)
    first, second = vitrail.explain(model, paths, METHOD, [0, 3])
    first.trust()
    first.scores["insertion(steps=4)"] = 0.25
    return [first, vitrail.explain(model, paths[0], METHOD, 2), second]


# Areas


def test_an_area_is_the_smallest_with_a_share_of_the_evidence(model: View) -> None:
    ex = vitrail.explain(model, noise(32, 32, 0))
    areas = [ex.area(share) for share in (0.2, 0.5, 1.0)]
    assert [area.shape for area in areas] == [(32, 32)] * 3
    assert areas[0].sum() < areas[1].sum() < areas[2].sum()
    assert (areas[0] <= areas[1]).all()
    assert (areas[1] <= areas[2]).all()
    values = fit_to_image(ex.shares, ex.box, ex.image.size).numpy()
    clipped = np.clip(values, 0, np.nanpercentile(np.abs(values), 99.5))  # as colours are
    assert 0.5 <= clipped[areas[1]].sum() / np.nansum(clipped) < 0.52
    assert values[areas[1]].min() >= np.nanmax(values[~areas[1]])
    assert (values[areas[2]] > 0).all()


def test_an_area_ends_where_the_model_did_not_look(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo)
    ex.signed = False
    area = ex.area(1.0)
    assert area.any()
    assert not area[np.isnan(ex.heatmap().numpy())].any()
    with pytest.raises(VitrailError, match=r"share must be above 0 and at most 1"):
        ex.area(0.0)


def test_no_evidence_has_no_area(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo)
    ex.map, ex.extras = torch.full_like(ex.map, -1.0), {}
    assert not ex.area().any()


# COCO


@given(MASKS)
@settings(deadline=None, max_examples=60)
def test_run_lengths_return_the_mask(drawn: tuple[int, int, int]) -> None:
    mask = mask_of(drawn)
    assert np.array_equal(decode_runs(encode_runs(mask), *mask.shape), mask)
    assert np.array_equal(decode_segmentation(encode_mask(mask), *mask.shape), mask)


@given(st.lists(st.integers(0, 2**40), max_size=12))
@settings(deadline=None, max_examples=60)
def test_packed_run_lengths_return(runs: list[int]) -> None:
    assert unpack_runs(pack_runs(runs)) == runs


def test_coco(explanations: list[Explanation], tmp_path: Path) -> None:
    (path,) = vitrail.export(explanations, tmp_path / "out" / "areas.json", "coco")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [image["file_name"] for image in written["images"]] == ["a/first.png", "b/second.png"]
    assert [(image["width"], image["height"]) for image in written["images"]] == [(64, 40), (56, 40)]
    assert written["categories"] == [
        {"id": number, "name": LABELS[place], "class": place} for number, place in ((1, 0), (2, 2), (3, 3))
    ]
    assert [(each["id"], each["image_id"], each["category_id"]) for each in written["annotations"]] == [
        (1, 1, 1), (2, 1, 2), (3, 2, 3),
    ]  # fmt: skip
    for ex, annotation in zip(explanations, written["annotations"], strict=True):
        mask = decode_segmentation(annotation["segmentation"], ex.image.height, ex.image.width)
        assert np.array_equal(mask, ex.area())
        assert annotation["area"] == mask.sum()
        x, y, width, height = (int(number) for number in annotation["bbox"])
        assert mask[y : y + height, x : x + width].sum() == mask.sum()
        assert mask[y].any()
        assert mask[:, x + width - 1].any()
        assert annotation["score"] == ex.probability
    first, second, _ = written["annotations"]
    assert (first["trust"], first["insertion"]) == (explanations[0].trust_score, 0.25)
    assert "trust" not in second


def test_our_own_reader_of_coco_reads_it(explanations: list[Explanation], tmp_path: Path) -> None:
    vitrail.export(explanations, tmp_path / "annotations" / "instances_images.json", "coco", share=0.3)
    first, second = vitrail.data.Coco(tmp_path, "images")
    assert [len(first.objects), len(second.objects)] == [2, 1]
    assert np.array_equal(second.objects[0].mask, explanations[2].area(0.3))


def test_an_image_without_evidence_has_no_annotation(explanations: list[Explanation], tmp_path: Path) -> None:
    explanations[2].map, explanations[2].extras = torch.full((4, 4), -1.0), {}
    (path,) = vitrail.export(explanations, tmp_path / "areas.json", "coco")
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [len(written[key]) for key in ("images", "annotations", "categories")] == [2, 2, 2]


@pytest.mark.full
def test_pycocotools_reads_it(explanations: list[Explanation], tmp_path: Path) -> None:
    coco = pytest.importorskip("pycocotools.coco")
    (path,) = vitrail.export(explanations, tmp_path / "areas.json", "coco")
    read = coco.COCO(str(path))
    for number, ex in enumerate(explanations, 1):
        annotation = read.loadAnns(number)[0]
        assert np.array_equal(read.annToMask(annotation).astype(bool), ex.area())
        assert read.loadCats(annotation["category_id"])[0]["name"] == ex.label
    box = coco.maskUtils.toBbox(read.annToRLE(read.loadAnns(1)[0]))
    assert box.tolist() == read.loadAnns(1)[0]["bbox"]


# Label Studio


def decoded(runs: list[int]) -> list[int]:
    """The values of Label Studio's runs, bit by bit."""
    bits = "".join(f"{byte:08b}" for byte in runs)
    place = 0

    def read(count: int) -> int:
        nonlocal place
        place += count
        return int(bits[place - count : place], 2)

    number, word, sizes = read(32), read(5) + 1, [read(4) + 1 for _ in range(4)]
    values: list[int] = []
    while len(values) < number:
        repeated, length = read(1), read(sizes[read(2)]) + 1
        values += [read(word)] * length if repeated else [read(word) for _ in range(length)]
    assert len(bits) - place < 8
    return values


@given(MASKS)
@settings(deadline=None, max_examples=60)
def test_the_brush_returns_the_mask(drawn: tuple[int, int, int]) -> None:
    mask = mask_of(drawn)
    assert decoded(brush_runs(mask)) == (255 * np.repeat(mask.ravel(), 4).astype(int)).tolist()


def test_long_runs_are_split() -> None:
    mask = np.zeros((200, 300), dtype=bool)  # 240,000 values, more than 16 bits count
    mask[199, 299] = True
    values = decoded(brush_runs(mask))
    assert (len(values), sum(values)) == (240_000, 4 * 255)


def test_label_studio(explanations: list[Explanation], tmp_path: Path) -> None:
    (path,) = vitrail.export(explanations, tmp_path / "tasks.json", "label_studio")
    first, second = json.loads(path.read_text(encoding="utf-8"))
    assert first["data"] == {"image": "/data/local-files/?d=a/first.png"}
    assert [len(first["predictions"]), len(second["predictions"])] == [2, 1]
    predictions = [*first["predictions"], *second["predictions"]]
    for ex, prediction in zip(explanations, predictions, strict=True):
        (brush,) = prediction["result"]
        assert (brush["original_width"], brush["original_height"]) == ex.image.size
        assert brush["value"]["brushlabels"] == [ex.label]
        assert prediction["score"] == ex.probability
        assert prediction["model_version"] == f"{ex.call} on {ex.model_name}"
    assert explanations[0].trust_line in first["predictions"][0]["result"][0]["meta"]["text"]


@pytest.mark.full
def test_label_studio_decodes_the_brush(explanations: list[Explanation], tmp_path: Path) -> None:
    brush = pytest.importorskip("label_studio_sdk.converter.brush")
    (path,) = vitrail.export(explanations, tmp_path / "tasks.json", "label_studio")
    result = json.loads(path.read_text(encoding="utf-8"))[1]["predictions"][0]["result"][0]
    pixels = brush.decode_rle(result["value"]["rle"]).reshape(40, 56, 4)
    assert np.array_equal(pixels[..., 3] == 255, explanations[2].area())
    assert brush.encode_rle(pixels.ravel()) == result["value"]["rle"]


@pytest.mark.full
def test_label_studio_accepts_the_tasks(explanations: list[Explanation], tmp_path: Path) -> None:
    interface = pytest.importorskip("label_studio_sdk.label_interface")
    (path,) = vitrail.export(explanations, tmp_path / "tasks.json", "label_studio")
    names = "".join(f'<Label value="{name}"/>' for name in LABELS)
    brush = f'<BrushLabels name="label" toName="image">{names}</BrushLabels>'
    config = interface.LabelInterface(f'<View><Image name="image" value="$image"/>{brush}</View>')
    predictions = [each for task in json.loads(path.read_text(encoding="utf-8")) for each in task["predictions"]]
    for prediction in predictions:
        assert config.validate_prediction(prediction)
    prediction["result"][0]["value"]["brushlabels"] = ["yak"]
    assert not config.validate_prediction(prediction)


# Values


def test_npz(explanations: list[Explanation], tmp_path: Path) -> None:
    (path,) = vitrail.export(explanations, tmp_path / "maps.npz")
    read = np.load(path)  # allow_pickle is False
    assert np.array_equal(read["maps"], torch.stack([ex.map for ex in explanations]).numpy())
    assert read["image"].tolist() == ["a/first.png", "a/first.png", "b/second.png"]
    assert read["label"].tolist() == [LABELS[place] for place in (0, 2, 3)]
    assert read["probability"].tolist() == [ex.probability for ex in explanations]
    assert read["box"].tolist() == [list(ex.box) for ex in explanations]
    assert read["size"].tolist() == [[64, 40], [64, 40], [56, 40]]
    assert read["trust"][0] == explanations[0].trust_score
    assert np.isnan(read["trust"][1:]).all()


def test_maps_of_several_shapes_are_refused(explanations: list[Explanation], tmp_path: Path) -> None:
    explanations[1].map = torch.zeros(2, 2)
    with pytest.raises(VitrailError, match=r"one shape, but got \(4, 4\) and \(2, 2\)"):
        vitrail.export(explanations, tmp_path / "maps.npz")
    assert not (tmp_path / "maps.npz").exists()


def test_tiff(explanations: list[Explanation], tmp_path: Path) -> None:
    ex = explanations[0]
    (path,) = vitrail.export(ex, tmp_path / "map.tif")
    with Image.open(path) as picture:
        values, about = np.asarray(picture), json.loads(picture.tag_v2[270])  # type: ignore[attr-defined]
    assert (values.dtype, values.shape) == (np.float32, (40, 64))
    expected = fit_to_image(ex.map, ex.box, ex.image.size).numpy()
    assert np.array_equal(values, expected, equal_nan=True)
    assert np.isnan(values).any()
    assert values[~np.isnan(values)].min() < 0  # signed, not rescaled
    assert (about["label"], about["probability"], about["trust"]) == (ex.label, ex.probability, ex.trust_score)


def test_several_tiffs_are_named_as_their_images(explanations: list[Explanation], tmp_path: Path) -> None:
    paths = vitrail.export(explanations, tmp_path / "maps", "tiff")
    assert files(tmp_path / "maps") == ["first-1.tif", "first.tif", "second.tif"]
    assert [path.name for path in paths] == ["first.tif", "first-1.tif", "second.tif"]


def test_tifffile_reads_it(explanations: list[Explanation], tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    (path,) = vitrail.export(explanations[0], tmp_path / "map.tiff")
    expected = fit_to_image(explanations[0].map, explanations[0].box, explanations[0].image.size).numpy()
    assert np.array_equal(tifffile.imread(path), expected, equal_nan=True)


# What is refused, and the command line


def test_images_in_memory_are_numbered(model: View, photo: Image.Image, tmp_path: Path) -> None:
    several = vitrail.explain(model, [photo, photo, noise(40, 40, 3)], target=[0, 1, 2])
    (path,) = vitrail.export(several, tmp_path / "maps.npz")
    assert np.load(path)["image"].tolist() == ["image-0", "image-0", "image-1"]


@pytest.mark.parametrize(("name", "kind"), [("map.json", None), ("map.npz", "voc"), ("map", None)])
def test_an_unknown_format_is_refused(explanations: list[Explanation], tmp_path: Path, name: str, kind: Any) -> None:
    with pytest.raises(VitrailError, match=r"cannot export .* expected format= one of coco, label_studio, npz, tiff"):
        vitrail.export(explanations, tmp_path / name, kind)
    with pytest.raises(VitrailError, match=r"no explanation was given"):
        vitrail.export([], tmp_path / "maps.npz")
    assert files(tmp_path) == ["images", "images/a", "images/a/first.png", "images/b", "images/b/second.png"]
