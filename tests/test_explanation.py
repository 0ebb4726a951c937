"""Explanations are shown, scored, saved and opened again; nothing is lost."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests import families
from tests.common import LABELS, files, noise

import vitrail
from vitrail import VitrailError, explanation
from vitrail.calls import split_call
from vitrail.models.view import View
from vitrail.show import text
from vitrail.show.figure import LONG_SIDE, overlay
from vitrail.show.heatmap import fit_to_image


def test_the_heatmap_lies_on_the_original_image(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo)
    heat = ex.heatmap()
    left, top, right, bottom = ex.box
    assert heat.shape == (40, 64)
    assert heat[20, [0, 63]].isnan().all()  # the sides were cut off
    inside = heat[math.ceil(top) : math.floor(bottom), math.ceil(left) : math.floor(right)]
    assert not inside.isnan().any()
    assert float(inside.min()) >= 0
    assert float(inside.max()) <= 1
    blocks = ex.heatmap(mode="nearest")
    assert blocks[~blocks.isnan()].unique().numel() == ex.map.unique().numel()
    assert float(blocks[~blocks.isnan()].min()) == 0
    assert float(blocks[~blocks.isnan()].max()) == 1
    row, column = divmod(int(ex.map.argmax()), 4)
    y = top + (row + 0.5) * (bottom - top) / 4
    x = left + (column + 0.5) * (right - left) / 4
    assert float(blocks[int(y), int(x)]) == 1
    assert torch.equal(ex.heatmap(outside=-1).isnan(), torch.zeros(40, 64, dtype=torch.bool))


@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_a_constant_map_is_a_heatmap_of_zeros(value: float, model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo)
    ex.map.fill_(value)
    heat = ex.heatmap(outside=0)
    assert torch.equal(heat, torch.zeros(40, 64))
    assert ex.picture().size[0] >= 384


def test_overlay_and_picture(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo)
    shown = ex.overlay()
    assert shown.width / shown.height == pytest.approx(64 / 40, rel=0.01)
    pixels = np.asarray(shown).astype(int)
    side = pixels[:, :20]
    assert np.ptp(side, axis=2).max() == 0  # what was not seen is grey
    assert np.ptp(pixels, axis=2).max() > 100
    assert ex.picture().height > shown.height
    row, column = divmod(int(ex.map.argmax()), 4)
    ex.map, ex.extras = torch.zeros(4, 4), {}
    ex.map[row, column] = 1e-3
    ex.map[(row + 2) % 4, (column + 2) % 4] = -1e-3
    left, top, right, bottom = ex.box
    scale = shown.width / 64
    for (r, c), warm in (((row, column), True), (((row + 2) % 4, (column + 2) % 4), False)):
        x = int((left + (c + 0.5) * (right - left) / 4) * scale)
        y = int((top + (r + 0.5) * (bottom - top) / 4) * scale)
        red, _, blue = np.asarray(ex.overlay(alpha=1))[y, x].astype(int)
        assert (red > blue) == warm


@pytest.mark.parametrize("signed", [True, False, None])
def test_the_colours_of_a_method_do_not_depend_on_the_image(signed: bool | None, model: View) -> None:
    ex = vitrail.explain(model, np.full((32, 32, 3), 128, np.uint8))
    ex.signed, ex.map = signed, torch.arange(16.0).view(4, 4)  # all for, none against
    last = int(0.85 * 384)  # in the last cell, within the crop
    red, green, blue = np.asarray(ex.overlay(alpha=1))[last, last].astype(int)
    assert (red > blue) == bool(signed)  # dark red, or the violet end of the perceptual map
    assert green < min(red, blue)


def test_styles_and_colormaps(model: View, photo: Image.Image, tmp_path: Path) -> None:
    ex = vitrail.explain(model, photo)
    drawings = [ex.overlay(style=style) for style in ("smooth", "blocks", "outline")] + [ex.overlay(colormap="PuOr")]
    assert len({drawing.tobytes() for drawing in drawings}) == 4
    assert ex.overlay(mode="nearest").tobytes() == drawings[1].tobytes()
    flat = vitrail.explain(model, np.full((32, 32, 3), 128, np.uint8)).overlay(style="blocks")
    row = np.asarray(flat).astype(int)[192, 30:-30]  # within the crop
    assert (np.diff(row, axis=0) != 0).any(1).sum() <= 3, "sharp edges between four blocks"
    path = ex.save(tmp_path / "why.png", style="outline", alpha=0.5)
    assert Image.open(path).tobytes() == ex.picture(style="outline", alpha=0.5).tobytes() != ex.picture().tobytes()
    for choice in ({"style": "dots"}, {"colormap": "x"}, {"alpha": 2}):
        for draw in (ex.overlay, ex.picture, lambda **look: ex.save(tmp_path / "wrong.png", **look)):
            with pytest.raises(VitrailError, match=next(iter(choice))):
                draw(**choice)
    assert not (tmp_path / "wrong.png").exists()


def test_the_outline_of_a_map_of_pixels_is_no_speckle(model: View) -> None:
    ex = vitrail.explain(model, np.full((128, 128, 3), 128, np.uint8))
    ex.map = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    ex.map[32:96, 32:96] += 0.5
    drawing = np.asarray(ex.overlay(style="outline"))[60:-60, 60:-60]
    assert (drawing == 255).all(2).mean() < 0.35
    assert (drawing == 128).all(2).mean() > 0.1, "there is something within the line"


def test_the_legend_names_the_classes(model: View, photo: Image.Image) -> None:
    alone = vitrail.explain(model, photo, target="elk")
    contrast = vitrail.explain(model, photo, target="elk", against="ant")
    assert alone.legend().ends[0].endswith("against elk")
    assert alone.legend().ends[1].endswith("for elk")
    assert contrast.legend().ends[0].endswith("for ant")
    assert contrast.legend().ends[1].endswith("for elk")


def test_the_focus_is_the_strongest_place(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo)
    ex.map = torch.zeros(4, 4)
    ex.map[3, 0] = 1.0
    left, top, right, bottom = ex.box
    assert ex.focus == pytest.approx(((left + (right - left) / 8) / 64, (top + 7 * (bottom - top) / 8) / 40))


@pytest.mark.parametrize("size", [(3000, 2000), (1000, 4000)])
def test_a_large_photo_is_drawn_at_the_size_at_which_it_is_shown(
    size: tuple[int, int], model: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = vitrail.explain(model, noise(*size, 0), "decompx")
    on_photo = overlay(ex.image, fit_to_image(ex.shares, ex.box, ex.image.size), ex.signed)
    fitted: list[tuple[int, int]] = []

    def fit(values: torch.Tensor, box: Any, image_size: tuple[int, int], *more: Any) -> torch.Tensor:
        fitted.append(image_size)
        return fit_to_image(values, box, image_size, *more)

    monkeypatch.setattr(explanation, "fit_to_image", fit)
    shown, _ = ex.overlay(), ex.picture()
    assert set(fitted) == {on_photo.size}
    assert max(on_photo.size) == LONG_SIDE
    differences = np.abs(np.asarray(shown, dtype=int) - np.asarray(on_photo, dtype=int)).max(axis=2)
    assert np.quantile(differences, 0.99) <= 4, "the same as on all pixels, but for the edge of the crop"
    assert ex.heatmap().shape == (size[1], size[0])


def test_notebooks_and_repr(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo, target="dog")
    shown = Image.open(io.BytesIO(ex._repr_png_()))
    assert (shown.format, shown.size) == ("PNG", ex.picture().size)
    assert repr(ex).startswith("Explanation(dog (")
    assert "decompx.skipplus, 4×4" in repr(ex)


# Kept and ex again


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny model that can be loaded by name."""
    place = tmp_path_factory.mktemp("models") / "tiny"
    families.build("hf_vit").save_pretrained(place)
    return place


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    noise(60, 40, 3).save(tmp_path / "photo.png")
    view = vitrail.load(f"hf:{folder}", labels=LABELS)
    return vitrail.explain(view, tmp_path / "photo.png", target="elk", against="ant").save(tmp_path / "why.png")


@pytest.mark.parametrize("suffix", [".png", ".json"])
def test_a_saved_explanation_opens_as_it_was(suffix: str, saved: Path, folder: Path) -> None:
    assert files(saved.parent) == ["photo.png", "why.json", "why.png"]
    ex = vitrail.open(saved.with_suffix(suffix))
    again = vitrail.explain(vitrail.load(f"hf:{folder}"), saved.parent / "photo.png", target=4, against=0)
    assert torch.equal(ex.map, again.map)
    assert ex.map.dtype == torch.float32
    assert (ex.label, ex.against_label, ex.target, ex.against) == ("elk", "ant", 4, 0)
    assert ex.model is not None
    assert ex.model.labels == tuple(LABELS)
    assert (ex.probability, ex.method, ex.box) == (again.probability, again.method, again.box)
    assert ex.extras.keys() == again.extras.keys() != set()
    assert ex.top[0][2] == again.top[0][2]
    assert np.array_equal(np.asarray(ex.overlay()), np.asarray(again.overlay()))
    ex.save(saved.with_name("again.png"))
    assert vitrail.open(saved.with_name("again.png")).to_dict() == ex.to_dict()


def test_the_json_says_all_that_is_needed(saved: Path) -> None:
    about = json.loads(saved.with_suffix(".json").read_text(encoding="utf-8"))
    assert about["vitrail"] == vitrail.__version__
    assert {"python", "torch", "timm", "numpy"} <= about["versions"].keys()
    assert about["method"] == "decompx.skipplus"
    assert about["params"] == {"start_layer": None, "precision": "auto"}
    assert (about["target"], about["label"], about["against_label"]) == (4, "elk", "ant")
    assert 0 < about["probability"] < 1
    assert about["seconds"] > 0
    assert about["image"]["size"] == [60, 40]
    assert about["image"]["path"] == str(saved.parent / "photo.png")
    assert about["model"]["load"]["name"].startswith("hf:")


def test_a_model_of_another_precision_is_found_again(folder: Path, tmp_path: Path) -> None:
    noise(32, 32, 3).save(tmp_path / "photo.png")
    view = vitrail.load(f"hf:{folder}", dtype="bfloat16")
    path = vitrail.explain(view, tmp_path / "photo.png").save(tmp_path / "why.png")
    ex = vitrail.open(path)
    assert ex.model is not None
    assert ex.model.dtype == torch.bfloat16


def test_all_of_a_script_may_run_in_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        view = vitrail.load(f"hf:{folder}")
        image = torch.zeros(3, 32, 32)
        ex = vitrail.explain(view, image)
        assert torch.is_inference_mode_enabled()
    torch.testing.assert_close(vitrail.explain(view, torch.zeros(3, 32, 32)).map, ex.map)


def test_a_changed_image_is_noticed(saved: Path) -> None:
    photo = Image.open(saved.parent / "photo.png").convert("RGB")
    photo.putpixel((0, 0), (1, 2, 3))
    photo.save(saved.parent / "photo.png")
    with pytest.raises(VitrailError, match=r"photo\.png is not the one explained.*changed"):
        vitrail.open(saved)
    with pytest.raises(VitrailError, match="the given image is not the one explained"):
        vitrail.open(saved, image=noise(60, 40, 4), check=False)
    noise(60, 40, 4).save(saved.parent / "other.png")
    with pytest.raises(VitrailError, match=r"the image \S*other\.png is not the one explained"):
        vitrail.open(saved, image=saved.parent / "other.png", check=False)
    assert vitrail.open(saved, image=noise(60, 40, 3)).label == "elk"


def test_a_moved_image_can_be_given(saved: Path) -> None:
    (saved.parent / "photo.png").rename(saved.parent / "moved.png")
    with pytest.raises(VitrailError, match=r"no longer at .*photo\.png: give it as image="):
        vitrail.open(saved)
    assert vitrail.open(saved, image=saved.parent / "moved.png").label == "elk"


def test_changed_weights_are_noticed(saved: Path, folder: Path) -> None:
    module = families.build("hf_vit")
    with torch.no_grad():
        module.classifier.bias[0] += 1e-3
    with pytest.raises(VitrailError, match=r"is not the one of .* weights changed"):
        vitrail.open(saved, model=module)
    assert vitrail.open(saved, model=module, check=False).label == "elk"
    assert vitrail.open(saved, check=False).model is None
    assert vitrail.open(saved, model=f"hf:{folder}").model is not None
    with pytest.raises(VitrailError, match="preprocessing changed"):
        vitrail.open(saved, model=vitrail.wrap(families.build("hf_vit"), mean=(0, 0, 0)))


def test_a_model_that_is_gone_is_told(saved: Path, folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    try:
        with pytest.raises(VitrailError, match=r"has no config\.json"):
            vitrail.open(saved)
    finally:
        folder.with_name("away").rename(folder)


def test_what_was_in_memory_must_be_given(model: View, photo: Image.Image, tmp_path: Path) -> None:
    path = vitrail.explain(model, photo).save(tmp_path / "why.png")
    with pytest.raises(VitrailError, match="give it as image="):
        vitrail.open(path)
    with pytest.raises(VitrailError, match="not loaded by name: give it as model="):
        vitrail.open(path, image=photo)
    assert vitrail.open(path, image=photo, model=model).map.shape == (4, 4)
    assert vitrail.open(path, image=photo, model=model.module).map.shape == (4, 4)


def test_a_folder_is_found_again_from_elsewhere(
    folder: Path, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    path = vitrail.explain(vitrail.load("hf:./tiny"), photo).save(tmp_path / "why.png")
    monkeypatch.chdir(tmp_path)
    ex = vitrail.open(path, image=photo)
    assert ex.model is not None
    assert ex.model_name == "hf:./tiny"


# Scores


def test_the_tensor_that_was_explained_is_scored(model: View, tmp_path: Path) -> None:
    pixels = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)) * 3  # more than a picture can show
    tensor = pixels.clone()
    ex = vitrail.explain(model, tensor)
    tensor.zero_()  # the explanation holds a copy
    (expected,) = vitrail.metrics.measure("insertion(steps=8)", model, pixels[None], ex.map[None], ex.target)
    assert ex.score("insertion(steps=8)") == {"insertion(steps=8)": pytest.approx(expected.value, rel=1e-5)}
    assert "pixels" not in repr(ex)
    path = ex.save(tmp_path / "why.png")
    again = vitrail.open(path, image=pixels, model=model)
    assert again.score("insertion(steps=8)") == ex.scores
    assert again.to_dict() == ex.to_dict()
    by_picture = vitrail.open(path, image=ex.image, model=model)
    assert by_picture.to_dict() == ex.to_dict()
    with pytest.raises(VitrailError, match=r"a tensor was explained.* give the tensor"):
        by_picture.score("insertion(steps=8)")
    with pytest.raises(VitrailError, match="the given tensor is not the one explained"):
        vitrail.open(path, image=pixels * 1.5, model=model)


def test_a_tensor_is_not_the_picture_that_was_explained(model: View, photo: Image.Image, tmp_path: Path) -> None:
    path = vitrail.explain(model, photo).save(tmp_path / "why.png")
    with pytest.raises(VitrailError, match="but image= is a tensor"):
        vitrail.open(path, image=model.preprocess(photo), model=model)


def test_metrics_as_one_text_or_a_list(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo, "gen_att")
    scores = ex.score("deletion(steps=4), sparseness")
    assert list(scores) == ["deletion(steps=4)", "sparseness"]
    assert vitrail.explain(model, photo, "gen_att").score(["deletion(steps=4)", "sparseness"]) == pytest.approx(scores)


def test_metrics_that_an_explanation_cannot_answer(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo, "gen_att")
    for name, message in (
        ("max_sensitivity", r"explains again, which score\(\) does not: use vitrail\.metrics\.measure"),
        ("mean_iou", "needs masks, which this explanation does not have"),
        ("completeness", "needs a method that promises to be complete"),
    ):
        with pytest.raises(VitrailError, match=message):
            ex.score([name])
    complete = vitrail.explain(model, photo, "integrated_gradients")
    assert complete.score(["completeness"]) == {"completeness": complete.extras["completeness_gap"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read"),
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "not a vitrail explanation"),
        (b"{}", "not a vitrail explanation"),
        (b'{"vitrail": "1"}', "not a complete vitrail explanation"),
        (b'{"vitrail": "1", "image": 3}', "not a complete vitrail explanation"),
    ],
)
def test_garbage_is_not_opened(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(VitrailError, match=message):
        vitrail.open(tmp_path / "x.json")


@pytest.mark.parametrize(
    "change",
    [
        {"map": {"shape": [4, 5], "dtype": "float32", "base64": "AAAA"}},
        {"map": {"shape": [1, 1], "base64": "§"}},
        {"map": None},
        {"box": 3},
        {"top": [1]},
        {"model": {"name": "x", "load": {"name": 3}}},
        {"model": {"name": "x", "load": {"name": "vit", "nonsense": 3}}},
        {"image": {"path": 3}},
    ],
)
def test_damaged_files_are_one_error(change: dict[str, Any], saved: Path) -> None:
    path = saved.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(VitrailError):
        vitrail.open(path)


# Nothing half-written, nothing lost


def test_saving_makes_folders_and_adds_the_suffix(model: View, photo: Image.Image, tmp_path: Path) -> None:
    ex = vitrail.explain(model, photo)
    assert ex.save(tmp_path / "a" / "b") == tmp_path / "a" / "b.png"
    assert ex.save(str(tmp_path / "c.JPG")) == tmp_path / "c.JPG"
    assert Image.open(tmp_path / "c.JPG").format == "JPEG"
    assert files(tmp_path) == ["a", "a/b.json", "a/b.png", "c.JPG", "c.json"]


@pytest.mark.parametrize("name", ["file/why.png", "why.txt", "why.gif", "taken.png", "", "photo.png"])
def test_places_that_cannot_be_saved_to(name: str, model: View, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken.png").mkdir()
    noise(32, 32, 0).save(tmp_path / "photo.png")
    ex = vitrail.explain(model, tmp_path / "photo.png")
    before, photo = files(tmp_path), (tmp_path / "photo.png").read_bytes()
    with pytest.raises(VitrailError):
        ex.save(tmp_path / name if name else "")
    assert files(tmp_path) == before
    assert (tmp_path / "photo.png").read_bytes() == photo


@pytest.mark.parametrize("written", [0, 1])
def test_a_full_disk_leaves_nothing_new_and_nothing_lost(
    written: int, model: View, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ex = vitrail.explain(model, photo)
    ex.save(tmp_path / "old.png")
    old = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = []

    def full(handle: int) -> None:
        done.append(handle)
        if len(done) > written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for name in ("old.png", "new/why.png"):
        done.clear()
        with pytest.raises(VitrailError, match="No space left on device"):
            ex.save(tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old


@pytest.mark.parametrize("method", ["decompx.skipplus", "gen_att", "rollout", "integrated_gradients(steps=4)"])
@pytest.mark.parametrize("against", [None, "ant"])
def test_a_caption_says_what_was_asked_how_sure_the_model_is_which_colour_speaks_for_it_and_how_far_to_trust_it(
    method: str, against: str | None, model: View, photo: Image.Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, params = split_call(method)
    if name == "rollout" and against:
        pytest.skip("it is the same for every class")
    ex = vitrail.explain(model, photo, name, target="dog", against=against, **params)
    ex.trust()
    drawn: list[str] = []
    fit = text.fit_text

    def spy(content: str, *arguments: Any, **options: Any) -> Any:
        paragraph = fit(content, *arguments, **options)
        drawn.append(" ".join(paragraph.lines))
        return paragraph

    for module in ("figure", "legend"):
        monkeypatch.setattr(f"vitrail.show.{module}.fit_text", spy)
    ex.picture()
    caption = "\n".join(drawn)
    assert "…" not in caption, "nothing is cut off"
    assert f"dog {ex.probability:.1%}" in caption if against else f"dog ({ex.probability:.1%})" in caption
    assert ex.call in caption
    assert ex.trust_line in caption
    if against:
        assert f"rather than ant {ex.against_probability:.1%}" in caption
    predicted = ex.top[0]
    assert re.search(rf"{predicted[1]} \(?{predicted[2]:.1%}", caption), "how sure the model is, and of what"
    ends = (f"for {against}" if against else "against dog", "for dog") if ex.signed else ("less", "more")
    assert all(end in caption for end in ends)
    if ex.split is not None:
        assert ex.score_line in caption
