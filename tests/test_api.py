"""``explain``: every input and target, reproducible, without side effects."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests import families
from tests.common import noise, small_budget
from tests.helpers import assert_same_state, relative, required_parameters, state_of
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.models.view import View


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
        explanations = vitrail.explain(model, form)
        assert isinstance(explanations, list)
        assert [relative(ex.map, alone) < 1e-5 for ex, alone in zip(explanations, single, strict=True)] == [True, True]
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
    doubts = {"tiny": "x.png: the image has only 1 × 1 pixels", "thin": "x.png: the image has only 400 × 4 pixels"}
    with pytest.warns(UserWarning, match=doubts[kind]) if kind in doubts else nullcontext():
        ex = vitrail.explain(model, next(tmp_path.iterdir()))
    assert ex.map.isfinite().all()
    assert ex.heatmap().shape == (image.height, image.width)
    ex.save(tmp_path / "out" / "why.png")
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
    explanations = vitrail.explain(model, images, target=chosen, batch_size=2)
    assert [e.target for e in explanations] == [3, 1, 0, 4, 2]
    for image, target, ex in zip(images, chosen, explanations, strict=True):
        assert relative(ex.map, vitrail.explain(model, image, target=target).map) < 1e-5


def test_another_order_gives_the_same_maps(model: View) -> None:
    images = [noise(32, 32, seed) for seed in range(4)]
    forth = vitrail.explain(model, images, target=[0, 1, 2, 3])
    back = vitrail.explain(model, images[::-1], target=[3, 2, 1, 0])
    for first, second in zip(forth, back[::-1], strict=True):
        assert relative(first.map, second.map) < 1e-5
        assert first.probability == pytest.approx(second.probability, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": [1, 2, 3]}, "3 classes for 2 images"),
        ({"target": []}, "0 classes for 2 images"),
        ({"target": [1]}, "target names 1 classes for 2 images"),
        ({"against": ("ant",)}, "against names 1 classes for 2 images"),
        ({"against": [1, 2, 3]}, "against names 3 classes for 2 images"),
        ({"target": 5}, "no class 5"),
        ({"target": "kat"}, "Did you mean 'cat'"),
        ({"against": "kat"}, "Did you mean 'cat'"),
        ({"target": "dog", "against": 3}, "both dog: give another"),
        ({"target": [0, 1], "against": [1, 1]}, "both bee: give another"),
        ({"against": 0, "method": "raw_attention"}, "same for every class"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"batch_size": "a"}, "an integer of at least 1, but got 'a'"),
        ({"batch_size": 1.5}, "an integer of at least 1"),
        ({"method": ["gen_att", "rollout"]}, "a method is one name"),
        ({"method": 3}, "a method is one name"),
        ({"method": "decompx.skiplus"}, "no aggregation 'skiplus'"),
        ({"method": "decomp"}, "Did you mean decompx"),
        ({"method": "random.plus"}, "no layers"),
        ({"start_layers": 1}, "no parameter start_layers; it has: start_layer=None"),
        ({"start_layer": 99}, "layer 99 does not fit"),
        ({"shape": "input"}, "shape="),
        ({"method": "rise(shape=map)"}, "shape="),
        ({"method": "rise(masks=8"}, "cannot parse 'rise\\(masks=8'"),
        ({"method": "rise(mask=8)"}, "rise has no parameter mask"),
    ],
)
def test_wrong_requests(options: dict[str, Any], message: str, model: View) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.explain(model, [noise(32, 32, 0), noise(32, 32, 1)], **options)


def test_a_call_names_a_method_with_its_parameters(model: View) -> None:
    image = noise(32, 32, 0)
    expected = vitrail.explain(model, image, "rise", masks=8, seed=3)
    torch.testing.assert_close(vitrail.explain(model, image, "rise(masks=8, seed=3)").map, expected.map)
    ex = vitrail.explain(model, image, "rise(masks=8, seed=1)", seed=3)  # keywords override
    assert ex.params == expected.params
    torch.testing.assert_close(ex.map, expected.map)
    assert vitrail.similar(model, image, image, "rise(masks=8)").second.params["masks"] == 8


def test_against_the_predicted_class_nothing_is_left(model: View, photo: Image.Image) -> None:
    predicted = vitrail.explain(model, photo)
    with pytest.raises(VitrailError, match=f"both {predicted.label}: give another"):
        vitrail.explain(model, photo, against=predicted.target)


@pytest.mark.parametrize("method", ["decompx.skipplus", "input_x_gradient"])
def test_against_explains_the_difference(method: str, model: View, photo: Image.Image) -> None:
    dog, ant = (vitrail.explain(model, photo, method, target=name).map for name in ("dog", "ant"))
    contrast = vitrail.explain(model, photo, method, target="dog", against="ant")
    torch.testing.assert_close(contrast.map, dog - ant, rtol=1e-4, atol=1e-6)
    assert (contrast.against, contrast.against_label) == (0, "ant")
    dog_share, ant_share = (f"{vitrail.explain(model, photo, target=name).probability:.1%}" for name in ("dog", "ant"))
    assert contrast.title == f"dog {dog_share} rather than ant {ant_share}"


# The same every time, whatever is around it


@pytest.mark.parametrize("method", families.few(sorted(vitrail.list_methods()), 6))
def test_batches_equal_single_images(method: str, model: View) -> None:
    images = [noise(32, 32, seed) for seed in range(3)]
    params = {**small_budget(method), **required_parameters(method, model)}
    batched = vitrail.explain(model, images, method, target=[4, 0, 2], **params)
    for image, target, ex in zip(images, [4, 0, 2], batched, strict=True):
        alone = vitrail.explain(model, image, method, target=target, **params)
        assert relative(ex.map, alone.map) < 1e-5
        assert ex.extras.keys() == alone.extras.keys()


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
            explanations = vitrail.explain(view, images.clone(), method)
            assert all(e.map.isfinite().all() for e in explanations)
            if method is None:
                torch.testing.assert_close(explanations[0].map, expected[0].map)


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
