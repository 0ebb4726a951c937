"""``explain`` and what it gives: every input, every target, saved and opened again, nothing changed, nothing lost."""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests import families
from tests.helpers import assert_same_state, relative, state_of
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.methods import registry
from vitrail.models.view import View

LABELS = ["ant", "bee", "cat", "dog", "elk"]


@pytest.fixture(scope="module")
def model() -> View:
    return vitrail.wrap(families.build("timm_vit"), labels=LABELS)


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    """A wide picture: the crop of the preprocessing does not see its sides."""
    return noise(64, 40, 0)


@pytest.fixture
def own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods registered by a test are gone after it."""
    vitrail.list_methods()  # all built-in ones are registered by now
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def noise(width: int, height: int, seed: int) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST)


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# What can be explained


def test_every_form_of_the_same_image_gives_the_same_map(model: View, photo: Image.Image, tmp_path: Path) -> None:
    photo.save(tmp_path / "photo.png")
    tensor = model.preprocess(photo)
    expected = vitrail.explain(model, photo).map
    assert expected.shape == (4, 4)
    assert (expected.dtype, expected.device.type) == (torch.float32, "cpu")
    for form in (
        tmp_path / "photo.png",
        str(tmp_path / "photo.png"),
        np.asarray(photo),
        photo.convert("RGBA"),
        tensor,
        tensor.double(),
        tensor.requires_grad_(),
    ):
        torch.testing.assert_close(vitrail.explain(model, form).map, expected)


def test_lists_and_batches_give_lists_in_their_order(model: View, photo: Image.Image) -> None:
    other = noise(40, 40, 1)
    tensors = torch.stack([model.preprocess(image) for image in (photo, other)])
    single = [vitrail.explain(model, image).map for image in (photo, other)]
    assert relative(single[0], single[1]) > 0.01
    for form in ([photo, other], (photo, np.asarray(other)), tensors, list(tensors), [tensors[0], other]):
        found = vitrail.explain(model, form)
        assert isinstance(found, list)
        assert [relative(one.map, alone) < 1e-5 for one, alone in zip(found, single, strict=True)] == [True, True]
    assert isinstance(vitrail.explain(model, [photo]), list)


def test_a_picture_turned_by_its_camera_is_explained_upright(model: View, tmp_path: Path) -> None:
    upright = noise(48, 32, 5)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    turned = vitrail.explain(model, tmp_path / "turned.png")
    assert turned.image.size == (48, 32)
    torch.testing.assert_close(turned.map, vitrail.explain(model, upright).map)
    assert turned.heatmap().shape == (32, 48)


def odd(kind: str) -> Image.Image:
    colour = noise(44, 44, 7)
    if kind == "16-bit":
        return Image.fromarray(np.asarray(colour.convert("L")).astype(np.uint16) * 257)
    if kind == "palette":
        return colour.quantize()
    return {"tiny": noise(4, 4, 0).resize((1, 1)), "thin": noise(400, 4, 0)}.get(kind) or colour.convert(kind)


@pytest.mark.parametrize("kind", ["L", "CMYK", "RGBA", "LA", "1", "16-bit", "palette", "tiny", "thin"])
def test_odd_pictures_are_explained(kind: str, model: View, tmp_path: Path) -> None:
    image = odd(kind)
    image.save(tmp_path / ("x.jpg" if kind == "CMYK" else "x.png"))
    found = vitrail.explain(model, next(tmp_path.iterdir()))
    assert found.map.isfinite().all()
    assert found.heatmap().shape == (image.height, image.width)
    found.save(tmp_path / "out" / "why.png")
    assert Image.open(tmp_path / "out" / "why.png").size[0] >= 384


def test_the_first_frame_of_an_animation_is_explained(model: View, tmp_path: Path) -> None:
    frames = [noise(32, 32, seed) for seed in range(3)]
    frames[0].save(tmp_path / "a.png", save_all=True, append_images=frames[1:])
    torch.testing.assert_close(
        vitrail.explain(model, tmp_path / "a.png").map, vitrail.explain(model, frames[0]).map, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("no such file.png", "was not found"),
        (".", "is a folder"),
        (np.zeros((8, 8, 3)), "expected uint8"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"expected \(H, W\)"),
        (torch.zeros(3, 8, 8), r"shape \(3, 32, 32\).*got \(3, 8, 8\)"),
        (torch.zeros(32, 32), r"shape \(3, 32, 32\)"),
        (torch.zeros(2, 1, 32, 32), r"shape \(3, 32, 32\)"),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), "finite floats"),
        (torch.full((3, 32, 32), math.nan), "finite floats.* 3072 NaN"),
        (torch.zeros(0, 3, 32, 32), "no image was given"),
        ([], "no image was given"),
        (None, "must be a path"),
        (7, "must be a path"),
        ([None], "must be a path"),
    ],
)
def test_what_cannot_be_explained(image: Any, message: str, model: View) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.explain(model, image)


def test_a_corrupt_picture_says_so(model: View, tmp_path: Path) -> None:
    noise(64, 64, 0).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:300])
    with pytest.raises(VitrailError, match="truncated or corrupt"):
        vitrail.explain(model, tmp_path / "a.png")


def test_the_model_may_be_a_module_or_a_name(photo: Image.Image) -> None:
    module = families.build("timm_vit")
    torch.testing.assert_close(vitrail.explain(module, photo).map, vitrail.explain(vitrail.wrap(module), photo).map)
    with pytest.raises(VitrailError, match="there is no model 'nonsense'"):
        vitrail.explain("nonsense", photo)
    with pytest.raises(VitrailError, match=r"takes an nn\.Module"):
        vitrail.explain(3, photo)  # type: ignore[call-overload]


# Targets


def test_the_target_by_number_name_and_default(model: View, photo: Image.Image) -> None:
    predicted = vitrail.explain(model, photo)
    assert predicted.top[0] == (predicted.target, predicted.label, predicted.probability)
    assert predicted.probability == max(p for _, _, p in predicted.top)
    assert sum(p for _, _, p in predicted.top) == pytest.approx(1)
    by_number = vitrail.explain(model, photo, target=2)
    assert (by_number.target, by_number.label) == (2, "cat")
    for target in ("cat", "CAT", "c", [2], ["cat"], torch.tensor([2]), np.array([2])):
        same = vitrail.explain(model, photo, target=target)
        assert same.target == 2
        assert torch.equal(same.map, by_number.map)
    assert relative(vitrail.explain(model, photo, target=3).map, by_number.map) > 0.01


def test_one_target_for_all_or_one_for_each(model: View) -> None:
    images = [noise(32, 32, seed) for seed in range(5)]
    assert [e.target for e in vitrail.explain(model, images, target="dog")] == [3] * 5
    chosen = ["dog", 1, "ant", 4, 2]
    found = vitrail.explain(model, images, target=chosen, batch_size=2)
    assert [e.target for e in found] == [3, 1, 0, 4, 2]
    for image, target, one in zip(images, chosen, found, strict=True):
        assert relative(one.map, vitrail.explain(model, image, target=target).map) < 1e-5


def test_another_order_gives_the_same_maps(model: View) -> None:
    images = [noise(32, 32, seed) for seed in range(4)]
    forth = vitrail.explain(model, images, target=[0, 1, 2, 3])
    back = vitrail.explain(model, images[::-1], target=[3, 2, 1, 0])
    for one, other in zip(forth, back[::-1], strict=True):
        assert relative(one.map, other.map) < 1e-5
        assert one.probability == pytest.approx(other.probability, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": [1, 2, 3]}, "3 classes for 2 images"),
        ({"target": []}, "0 classes for 2 images"),
        ({"against": [1, 2, 3]}, "against names 3 classes for 2 images"),
        ({"target": 5}, "no class 5"),
        ({"target": "kat"}, "Did you mean 'cat'"),
        ({"against": "kat"}, "Did you mean 'cat'"),
        ({"target": "dog", "against": 3}, "both dog: nothing is left"),
        ({"target": [0, 1], "against": [1, 1]}, "both bee: nothing is left"),
        ({"against": 0, "method": "raw_attention"}, "same for every class"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"method": "decompx.skiplus"}, "no aggregation 'skiplus'"),
        ({"method": "decomp"}, "Did you mean decompx"),
        ({"method": "random.plus"}, "no layers"),
        ({"start_layers": 1}, "no parameter start_layers; it has: start_layer=None"),
        ({"start_layer": 99}, "layer 99 does not fit"),
        ({"shape": "input"}, "shape="),
    ],
)
def test_wrong_requests(options: dict[str, Any], message: str, model: View) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.explain(model, [noise(32, 32, 0), noise(32, 32, 1)], **options)


def test_against_the_predicted_class_nothing_is_left(model: View, photo: Image.Image) -> None:
    predicted = vitrail.explain(model, photo)
    with pytest.raises(VitrailError, match=f"both {predicted.label}: nothing is left"):
        vitrail.explain(model, photo, against=predicted.target)


@pytest.mark.parametrize("method", ["decompx.skipplus", "input_x_gradient"])
def test_against_explains_the_difference(method: str, model: View, photo: Image.Image) -> None:
    dog, ant = (vitrail.explain(model, photo, method, target=name).map for name in ("dog", "ant"))
    contrast = vitrail.explain(model, photo, method, target="dog", against="ant")
    torch.testing.assert_close(contrast.map, dog - ant, rtol=1e-4, atol=1e-6)
    assert (contrast.against, contrast.against_label) == (0, "ant")
    assert contrast.title.startswith("dog, not ant (")


# The same every time, whatever is around it


@pytest.mark.parametrize("method", sorted(vitrail.list_methods()))
def test_batches_equal_single_images(method: str, model: View) -> None:
    images = [noise(32, 32, seed) for seed in range(3)]
    together = vitrail.explain(model, images, method, target=[4, 0, 2])
    for image, target, found in zip(images, [4, 0, 2], together, strict=True):
        alone = vitrail.explain(model, image, method, target=target)
        assert relative(found.map, alone.map) < 1e-5
        assert found.extras.keys() == alone.extras.keys()


@pytest.mark.parametrize("method", ["decompx.skipplus", "raw_attention", "random"])
def test_the_same_call_gives_the_same_map_and_draws_no_global_random_number(
    method: str, model: View, photo: Image.Image
) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = vitrail.explain(model, photo, method).map
    torch.manual_seed(99)
    assert torch.equal(vitrail.explain(model, photo, method).map, first)
    torch.set_rng_state(before[0])
    vitrail.explain(model, photo, method)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("name", ["timm_vit", "timm_eva02_tiny", "timm_beit", "timm_siglip", "hf_dinov2"])
def test_explaining_works_where_gradients_are_off(name: str, guard: Callable[[], Any]) -> None:
    view = vitrail.wrap(families.build(name))
    images = families.images(name, 2)
    expected = vitrail.explain(view, images)
    with guard():
        for method in (None, "raw_attention", "input_x_gradient"):
            found = vitrail.explain(view, images.clone(), method)
            assert all(e.map.isfinite().all() for e in found)
            if method is None:
                torch.testing.assert_close(found[0].map, expected[0].map)


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["timm_vit", "hf_vit", "torchvision_vit"])
def test_the_model_stays_as_it_was_after_success_and_failure(name: str, training: bool, photo: Image.Image) -> None:
    @vitrail.method("breaks_in_the_middle")
    def breaks(model: Any, images: Tensor, target: Tensor) -> Tensor:
        model.logits(images.requires_grad_()).sum().backward()
        raise RuntimeError("broken on purpose")

    module = families.build(name).train(training)
    first = next(module.parameters())
    first.grad = torch.ones_like(first)
    list(module.parameters())[1].requires_grad_(False)
    view = vitrail.wrap(module)
    before = state_of(module)
    for method in ("decompx.skipplus", "rollout", "input_x_gradient"):
        vitrail.explain(view, photo, method)
    with pytest.raises(RuntimeError, match="on purpose"):
        vitrail.explain(view, photo, "breaks_in_the_middle")
    with pytest.raises(VitrailError):
        vitrail.explain(view, photo, target="nothing")
    assert_same_state(before, state_of(module))


def test_broken_weights_are_told_before_any_map(photo: Image.Image) -> None:
    module = families.build("timm_vit")
    with torch.no_grad():
        module.blocks[0].mlp.fc1.weight[0, 0] = math.nan
    with pytest.raises(VitrailError, match="NaN or infinite: its weights are broken"):
        vitrail.explain(module, photo)


def test_hierarchical_models_name_the_methods_that_work(photo: Image.Image) -> None:
    view = vitrail.wrap(families.build("timm_swin"))
    assert vitrail.explain(view, photo).method == "vit_cx"
    with pytest.raises(VitrailError, match=r"decompx cannot explain .* Methods that can: .*random"):
        vitrail.explain(view, photo, "decompx")
    assert vitrail.explain(view, photo, "random").heatmap().shape == (40, 64)


# What comes back


def test_the_heatmap_lies_on_the_original_image(model: View, photo: Image.Image) -> None:
    found = vitrail.explain(model, photo)
    heat = found.heatmap()
    left, top, right, bottom = found.box
    assert heat.shape == (40, 64)
    assert heat[20, [0, 63]].isnan().all()  # the sides were cut off
    inside = heat[math.ceil(top) : math.floor(bottom), math.ceil(left) : math.floor(right)]
    assert not inside.isnan().any()
    assert float(inside.min()) >= 0
    assert float(inside.max()) <= 1
    blocks = found.heatmap(mode="nearest")
    assert blocks[~blocks.isnan()].unique().numel() == found.map.unique().numel()
    assert float(blocks[~blocks.isnan()].min()) == 0
    assert float(blocks[~blocks.isnan()].max()) == 1
    row, column = divmod(int(found.map.argmax()), 4)
    y = top + (row + 0.5) * (bottom - top) / 4
    x = left + (column + 0.5) * (right - left) / 4
    assert float(blocks[int(y), int(x)]) == 1
    assert torch.equal(found.heatmap(outside=-1).isnan(), torch.zeros(40, 64, dtype=torch.bool))


@pytest.mark.parametrize("value", [0.0, 3.5, -2.0])
def test_a_constant_map_is_a_heatmap_of_zeros(value: float, model: View, photo: Image.Image) -> None:
    found = vitrail.explain(model, photo)
    found.map.fill_(value)
    heat = found.heatmap(outside=0)
    assert torch.equal(heat, torch.zeros(40, 64))
    assert found.picture().size[0] >= 384


def test_overlay_and_picture(model: View, photo: Image.Image) -> None:
    found = vitrail.explain(model, photo)
    shown = found.overlay()
    assert shown.width / shown.height == pytest.approx(64 / 40, rel=0.01)
    pixels = np.asarray(shown).astype(int)
    side = pixels[:, :20]
    assert np.ptp(side, axis=2).max() == 0  # what was not seen is grey
    assert np.ptp(pixels, axis=2).max() > 100
    assert found.picture().height > shown.height
    row, column = divmod(int(found.map.argmax()), 4)
    found.map = torch.zeros(4, 4)
    found.map[row, column] = 1e-3
    found.map[(row + 2) % 4, (column + 2) % 4] = -1e-3
    left, top, right, bottom = found.box
    scale = shown.width / 64
    for (r, c), warm in (((row, column), True), (((row + 2) % 4, (column + 2) % 4), False)):
        x = int((left + (c + 0.5) * (right - left) / 4) * scale)
        y = int((top + (r + 0.5) * (bottom - top) / 4) * scale)
        red, _, blue = np.asarray(found.overlay(alpha=1))[y, x].astype(int)
        assert (red > blue) == warm


@pytest.mark.parametrize("signed", [True, False, None])
def test_the_colours_of_a_method_do_not_depend_on_the_image(signed: bool | None, model: View) -> None:
    found = vitrail.explain(model, np.full((32, 32, 3), 128, np.uint8))
    found.signed, found.map = signed, torch.arange(16.0).view(4, 4)  # all for, none against
    last = int(0.85 * 384)  # in the last cell, within the crop
    red, green, blue = np.asarray(found.overlay(alpha=1))[last, last].astype(int)
    assert (red > 2 * green) == bool(signed)  # dark red, or the yellow end of the perceptual map
    assert red > blue


def test_notebooks_and_repr(model: View, photo: Image.Image) -> None:
    found = vitrail.explain(model, photo, target="dog")
    shown = Image.open(io.BytesIO(found._repr_png_()))
    assert (shown.format, shown.size) == ("PNG", found.picture().size)
    assert repr(found).startswith("Explanation(dog (")
    assert "decompx.skipplus, 4×4" in repr(found)


# Kept and found again


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
    found = vitrail.open(saved.with_suffix(suffix))
    again = vitrail.explain(vitrail.load(f"hf:{folder}"), saved.parent / "photo.png", target=4, against=0)
    assert torch.equal(found.map, again.map)
    assert found.map.dtype == torch.float32
    assert (found.label, found.against_label, found.target, found.against) == ("elk", "ant", 4, 0)
    assert found.model is not None
    assert found.model.labels == tuple(LABELS)
    assert (found.probability, found.method, found.box) == (again.probability, again.method, again.box)
    assert found.extras.keys() == again.extras.keys() != set()
    assert found.top[0][2] == again.top[0][2]
    assert np.array_equal(np.asarray(found.overlay()), np.asarray(again.overlay()))
    found.save(saved.with_name("again.png"))
    assert vitrail.open(saved.with_name("again.png")).to_dict() == found.to_dict()


def test_the_json_says_all_that_is_needed(saved: Path) -> None:
    about = json.loads(saved.with_suffix(".json").read_text(encoding="utf-8"))
    assert about["vitrail"] == vitrail.__version__
    assert {"python", "torch", "timm", "numpy"} <= about["versions"].keys()
    assert about["method"] == "decompx.skipplus"
    assert about["params"] == {"start_layer": None}
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
    found = vitrail.open(path)
    assert found.model is not None
    assert found.model.dtype == torch.bfloat16


def test_all_of_a_script_may_run_in_inference_mode(folder: Path) -> None:
    with torch.inference_mode():
        view = vitrail.load(f"hf:{folder}")
        image = torch.zeros(3, 32, 32)
        found = vitrail.explain(view, image)
        assert torch.is_inference_mode_enabled()
    torch.testing.assert_close(vitrail.explain(view, torch.zeros(3, 32, 32)).map, found.map)


def test_a_changed_image_is_noticed(saved: Path) -> None:
    photo = Image.open(saved.parent / "photo.png").convert("RGB")
    photo.putpixel((0, 0), (1, 2, 3))
    photo.save(saved.parent / "photo.png")
    with pytest.raises(VitrailError, match=r"photo\.png is not the one explained.*changed"):
        vitrail.open(saved)
    with pytest.raises(VitrailError, match="is not the one explained"):
        vitrail.open(saved, image=noise(60, 40, 4), check=False)
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
    found = vitrail.explain(model, photo)
    assert found.save(tmp_path / "a" / "b") == tmp_path / "a" / "b.png"
    assert found.save(str(tmp_path / "c.JPG")) == tmp_path / "c.JPG"
    assert Image.open(tmp_path / "c.JPG").format == "JPEG"
    assert files(tmp_path) == ["a", "a/b.json", "a/b.png", "c.JPG", "c.json"]


@pytest.mark.parametrize("name", ["file/why.png", "why.txt", "why.gif", "taken.png", "", "photo.png"])
def test_places_that_cannot_be_saved_to(name: str, model: View, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken.png").mkdir()
    noise(32, 32, 0).save(tmp_path / "photo.png")
    found = vitrail.explain(model, tmp_path / "photo.png")
    before, photo = files(tmp_path), (tmp_path / "photo.png").read_bytes()
    with pytest.raises(VitrailError):
        found.save(tmp_path / name if name else "")
    assert files(tmp_path) == before
    assert (tmp_path / "photo.png").read_bytes() == photo


@pytest.mark.parametrize("written", [0, 1])
def test_a_full_disk_leaves_nothing_new_and_nothing_lost(
    written: int, model: View, photo: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = vitrail.explain(model, photo)
    found.save(tmp_path / "old.png")
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
            found.save(tmp_path / name)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == old


# Methods of one's own


@pytest.mark.usefixtures("own_names")
def test_a_function_becomes_a_method(model: View, photo: Image.Image) -> None:
    @vitrail.method("brightness")
    def brightness(model: Any, images: Tensor, target: Tensor, power: float = 1.0) -> Tensor:
        """How bright each patch is."""
        return torch.nn.functional.adaptive_avg_pool2d(images.mean(1), model.grid) ** power

    info = vitrail.list_methods("bright*")["brightness"]
    assert (info.family, info.params, info.summary) == ("custom", {"power": 1.0}, "How bright each patch is.")
    found = vitrail.explain(model, [photo, noise(32, 32, 2)], "brightness", power=2)
    expected = brightness(model, model.preprocess(photo)[None], torch.tensor([0]), power=2)[0]
    torch.testing.assert_close(found[0].map, expected)
    assert found[0].params == {"power": 2}
    with pytest.raises(VitrailError, match=r"no parameter strength; it has: power=1\.0"):
        vitrail.explain(model, photo, "brightness", strength=2)
    with pytest.raises(VitrailError, match="against"):
        vitrail.explain(model, photo, "brightness", target=0, against=1)


@pytest.mark.usefixtures("own_names")
def test_a_gradient_of_ones_own_works(model: View, photo: Image.Image) -> None:
    @vitrail.method("saliency", level="pixel")
    def saliency(model: Any, images: Tensor, target: Tensor) -> Tensor:
        images = images.clone().requires_grad_()
        score = model.logits(images).gather(1, target[:, None]).sum()
        return torch.autograd.grad(score, images)[0].abs().sum(1)

    found = vitrail.explain(model, photo, "saliency", target="dog")
    assert found.map.shape == (32, 32)
    assert float(found.map.max()) > 0
    assert found.heatmap().shape == (40, 64)


@pytest.mark.usefixtures("own_names")
def test_a_class_becomes_a_method(model: View, photo: Image.Image) -> None:
    from vitrail.methods.base import Attribution

    @vitrail.method("corner", class_specific=False, needs="logits", cost=(0, 0))
    @dataclass(kw_only=True)
    class Corner(vitrail.Method):
        value: float = 1.0

        def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Attribution:
            maps = torch.zeros(len(images), 2, 2)
            maps[:, 0, 0] = self.value
            return Attribution(maps, {"sum": maps.sum((1, 2))})

    found = vitrail.explain(model, photo, "corner", value=3)
    assert found.map.tolist() == [[3, 0], [0, 0]]
    assert found.extras == {"sum": 3}
    assert "corner" in vitrail.list_methods()
    assert Corner(model).attribute(torch.zeros(2, 3, 32, 32)).shape == (2, 2, 2)


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("shape", [(16,), (2, 4, 4), (1, 4), (1, 1, 4, 4)])
def test_maps_of_the_wrong_shape_are_told(shape: tuple[int, ...], model: View, photo: Image.Image) -> None:
    vitrail.method("wrong_shape")(lambda model, images, target: torch.zeros(shape))
    with pytest.raises(VitrailError, match=r"wrong_shape gave maps of shape"):
        vitrail.explain(model, photo, "wrong_shape")


@pytest.mark.usefixtures("own_names")
@pytest.mark.parametrize("name", ["decompx", "Mine", "a.b", "a b", ""])
def test_names_that_a_method_cannot_have(name: str) -> None:
    with pytest.raises(VitrailError):
        vitrail.method(name)(lambda model, images, target: images)


# captum


class Logits(nn.Module):
    def __init__(self, view: View):
        super().__init__()
        self.view = view

    def forward(self, images: Tensor) -> Tensor:
        return self.view.logits(images)


@pytest.mark.parametrize("method", ["decompx.skipplus", "rollout", "input_x_gradient"])
def test_shape_input_keeps_the_total(method: str) -> None:
    view = vitrail.wrap(families.build("timm_vit_not_square"))
    images = families.images("timm_vit_not_square", 2)
    build = registry.build_method
    maps = build(method, view).attribute(images, target=1)
    spread = build(method, view, shape="input").attribute(images, target=1)
    assert maps.shape == (2, 3, 5)
    assert spread.shape == images.shape
    torch.testing.assert_close(spread.sum((1, 2, 3)), maps.sum((1, 2)), rtol=1e-4, atol=1e-5)


@pytest.fixture
def tiny() -> tuple[View, Tensor, vitrail.Method]:
    view = vitrail.wrap(families.build("timm_vit"))
    method = registry.build_method("decompx.skipplus", view, shape="input")
    torch.manual_seed(0)
    return view, families.images("timm_vit", 2), method


def test_captum_smooths_a_method(tiny: tuple[View, Tensor, vitrail.Method]) -> None:
    from captum.attr import NoiseTunnel

    _, images, method = tiny
    smooth = NoiseTunnel(method).attribute(images, nt_samples=2, stdevs=0.0, target=1)
    torch.testing.assert_close(smooth, method.attribute(images, target=1), rtol=1e-4, atol=1e-6)


def test_captum_measures_the_sensitivity_of_a_method(tiny: tuple[View, Tensor, vitrail.Method]) -> None:
    from captum.metrics import sensitivity_max

    _, images, method = tiny
    still, moved = (
        sensitivity_max(method.attribute, images, target=1, n_perturb_samples=2, perturb_radius=radius)
        for radius in (0.0, 0.1)
    )
    assert still.shape == moved.shape == (2,)
    assert (still < 1e-4).all()
    assert (moved > 1e-3).all()


def test_captum_measures_the_infidelity_of_a_method(tiny: tuple[View, Tensor, vitrail.Method]) -> None:
    from captum.metrics import infidelity

    view, images, method = tiny

    def remove_all(inputs: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(inputs), torch.zeros_like(inputs)

    spread = method.attribute(images, target=1)
    found = infidelity(Logits(view), remove_all, images, spread, target=1)
    drop = view.logits(images)[:, 1] - view.logits(torch.zeros_like(images))[:, 1]
    torch.testing.assert_close(found, (spread.sum((1, 2, 3)) - drop) ** 2, rtol=1e-3, atol=1e-5)
