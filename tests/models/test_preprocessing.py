"""The model input equals the one its own library makes, and the box says where it came from."""

import json
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.errors import VitrailError
from vitrail.models.preprocessing import Preprocess

RANDOM = np.random.default_rng(0)
SIZES = [(301, 257), (97, 133), (225, 224), (31, 150), (1, 1), (3, 40)]
IDS = [f"{width}x{height}" for width, height in SIZES]


def picture(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(RANDOM.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("image_size", SIZES, ids=IDS)
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(
    ("input_size", "crop_pct", "interpolation"),
    [
        ((224, 224), 0.9, "bicubic"),
        ((224, 224), 0.875, "bilinear"),
        ((64, 64), 1.0, "nearest"),
        ((96, 160), 0.95, "bicubic"),
        ((161, 95), 1.0, "lanczos"),
    ],
)
def test_equals_timm(
    image_size: tuple[int, int], crop_mode: str, input_size: tuple[int, int], crop_pct: float, interpolation: str
) -> None:
    from timm.data import create_transform

    config = {
        "input_size": (3, *input_size),
        "interpolation": interpolation,
        "mean": (0.48, 0.45, 0.4),
        "std": (0.26, 0.25, 0.27),
        "crop_pct": crop_pct,
        "crop_mode": crop_mode,
    }
    image = picture(image_size)
    if crop_mode == "border" and min(image_size) * max(input_size) < max(image_size):
        assert Preprocess.from_timm(config)(image).shape == (3, *input_size)  # timm itself fails: an edge rounds to 0
        return
    assert_same(Preprocess.from_timm(config)(image), create_transform(**config)(image), 1e-6)


def test_equals_timm_for_a_real_model_config() -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=1)
    config = timm.data.resolve_model_data_config(model)
    image = picture((511, 383))
    preprocess = Preprocess.from_timm(config)
    assert_same(preprocess(image), timm.data.create_transform(**config)(image), 1e-6)
    assert preprocess.mean == (0.5, 0.5, 0.5)


HUGGINGFACE: list[tuple[str, dict[str, Any]]] = [
    ("ViTImageProcessor", {}),
    ("ViTImageProcessor", {"size": {"height": 64, "width": 96}, "resample": 3}),
    ("ViTImageProcessor", {"resample": 0}),
    ("ViTImageProcessor", {"resample": 1}),
    ("ViTImageProcessor", {"do_normalize": False}),
    ("ViTImageProcessor", {"do_rescale": False}),
    ("ViTImageProcessor", {"rescale_factor": 1 / 127.5}),
    ("DeiTImageProcessor", {}),
    ("DeiTImageProcessor", {"size": {"height": 63, "width": 63}, "crop_size": {"height": 80, "width": 32}}),
    ("CLIPImageProcessor", {}),
    ("BitImageProcessor", {"size": {"shortest_edge": 257}}),
    ("BeitImageProcessor", {}),
    ("BeitImageProcessor", {"do_center_crop": True, "size": {"height": 256, "width": 256}}),
    ("SiglipImageProcessor", {}),
]


@pytest.mark.parametrize("image_size", [(301, 257), (31, 150), (1, 1)])
@pytest.mark.parametrize("backend", ["", "Pil"])
@pytest.mark.parametrize(("name", "options"), HUGGINGFACE)
def test_equals_huggingface(image_size: tuple[int, int], backend: str, name: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, name + backend)(**options)
    image = picture(image_size)
    theirs = processor(image, return_tensors="pt", input_data_format="channels_last")["pixel_values"][0].float()
    # Without rescaling the values reach 500, and so does their rounding.
    assert_same(Preprocess.from_huggingface(processor)(image), theirs, 1e-5 * max(1.0, float(theirs.abs().max()) / 3))


@pytest.mark.parametrize("image_size", SIZES, ids=IDS)
def test_equals_huggingface_dinov3(image_size: tuple[int, int]) -> None:
    transformers = pytest.importorskip("transformers")
    processor = transformers.DINOv3ViTImageProcessor()
    image = picture(image_size)
    assert_same(
        Preprocess.from_huggingface(processor)(image), processor(image, return_tensors="pt")["pixel_values"][0], 1e-5
    )


def test_huggingface_without_a_fixed_size() -> None:
    transformers = pytest.importorskip("transformers")
    loose = transformers.CLIPImageProcessor(do_center_crop=False)
    with pytest.raises(VitrailError, match=r"CLIPImageProcessor.*one size"):
        Preprocess.from_huggingface(loose)
    assert Preprocess.from_huggingface(loose, 224).size == (224, 224)
    unsized = transformers.ViTImageProcessor(do_resize=False)
    assert Preprocess.from_huggingface(unsized, (32, 48)).size == (32, 48)
    with pytest.raises(VitrailError, match="one size"):
        Preprocess.from_huggingface(transformers.CLIPImageProcessor(do_resize=False))
    with pytest.raises(VitrailError, match="one size"):
        Preprocess.from_huggingface(
            transformers.ViTImageProcessor(size={"shortest_edge": 224, "longest_edge": 448}), 224
        )


@pytest.mark.parametrize("image_size", SIZES[::2], ids=IDS[::2])
@pytest.mark.parametrize("weights", ["ViT_B_16_Weights", "Swin_T_Weights", "Swin_V2_T_Weights"])
def test_equals_torchvision(image_size: tuple[int, int], weights: str) -> None:
    import torchvision.models

    for member in getattr(torchvision.models, weights):
        transforms = member.transforms()
        image = picture(image_size)
        assert_same(Preprocess.from_torchvision(transforms)(image), transforms(image), 1e-6)


def test_torchvision_transforms_that_are_not_a_classifiers() -> None:
    with pytest.raises(VitrailError, match="ReLU"):
        Preprocess.from_torchvision(torch.nn.ReLU())


@pytest.mark.parametrize("fit", ["crop", "squash", "border"])
def test_thin_images(fit: Literal["crop", "squash", "border"]) -> None:
    preprocess = Preprocess((32, 48), fit=fit)
    for size in ((3, 500), (500, 3), (1, 2000)):
        assert preprocess(picture(size)).isfinite().all()
        left, top, right, bottom = preprocess.box(size)
        assert left < right
        assert top < bottom


def test_extreme_shapes_need_little_memory() -> None:
    preprocess = Preprocess((224, 224), fit="crop", interpolation="bicubic")
    stripe = Image.new("RGB", (60_000, 1), (128, 128, 128))
    assert torch.allclose(preprocess(stripe), preprocess.normalise(torch.full((3, 224, 224), 128 / 255)), atol=1e-6)


def test_sampling_inside_the_crop_equals_scaling_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = np.linspace(0, 255, 500).astype(np.uint8)
    image = Image.fromarray(np.stack([np.tile(gradient, (40, 1))] * 3, axis=-1))
    preprocess = Preprocess((64, 64), fit="crop", crop_pct=0.9)
    whole = preprocess(image)
    monkeypatch.setattr("vitrail.models.preprocessing._MAX_RESIZED_PIXELS", 1)
    assert (preprocess(image) - whole).abs().max() <= 1.01 / 255 / 0.224


BOXES = [
    (Preprocess((224, 224)), (448, 224), (112, 0, 336, 224)),
    (Preprocess((224, 224)), (224, 448), (0, 112, 224, 336)),
    (Preprocess((224, 224), resize=256), (512, 512), (32, 32, 480, 480)),
    (Preprocess((224, 224), crop_pct=0.875), (256, 256), (16, 16, 240, 240)),
    (Preprocess((224, 224), fit="squash"), (640, 333), (0, 0, 640, 333)),
    (Preprocess((224, 224), fit="squash", resize=(256, 256)), (512, 256), (32, 16, 480, 240)),
    (Preprocess((224, 224), fit="border"), (448, 224), (0, -112, 448, 336)),
    (Preprocess((224, 112)), (448, 224), (168, 0, 280, 224)),
    (Preprocess((210, 200), crop_pct=0.875, dropped=(14, 24)), (256, 256), (16, 16, 216, 226)),
    (Preprocess((378, 378), fit="squash", dropped=(6, 6)), (768, 384), (0, 0, 756, 378)),
    (Preprocess((64, 60), fit="border", dropped=(6, 10)), (140, 70), (0, -34, 120, 94)),
]


@pytest.mark.parametrize(
    "preprocess",
    [Preprocess((24, 24), resize=32), Preprocess((24, 24), fit="squash", resize=(24, 24)), Preprocess((24, 24)),
     Preprocess((24, 24), fit="squash", resize=(30, 27)), Preprocess((24, 24), fit="border")],
)  # fmt: skip
def test_another_input_size_shows_the_same_part_of_the_picture(preprocess: Preprocess) -> None:
    larger = preprocess.resized((48, 48))
    assert larger.size == (48, 48)
    assert larger.box((101, 83)) == pytest.approx(preprocess.box((101, 83)), abs=3)  # rounding of 24 pixels
    assert preprocess.resized((24, 24)) == preprocess


def test_a_processor_that_scales_the_shorter_edge_alone_fits_only_its_own_size() -> None:
    transformers = pytest.importorskip("transformers")
    loose = transformers.CLIPImageProcessor(do_center_crop=False)
    with pytest.raises(VitrailError, match="one size"):  # 518 pixels around 224 would be mostly black
        Preprocess.from_huggingface(loose, 518)


@pytest.mark.parametrize("preprocess", [preprocess for preprocess, _, _ in BOXES if any(preprocess.dropped)])
def test_what_is_dropped_changes_nothing_else(preprocess: Preprocess, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, image = replace(preprocess, size=preprocess.library_size, dropped=(0, 0)), picture((301, 257))
    rows, columns = preprocess.size
    mask = np.asarray(image)[..., 0] > 99
    assert torch.equal(preprocess(image), whole(image)[:, :rows, :columns])
    assert torch.equal(preprocess.mask(mask), whole.mask(mask)[:rows, :columns])
    assert torch.equal(preprocess.trim(whole(image)), preprocess(image))
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess
    monkeypatch.setattr("vitrail.models.preprocessing._MAX_RESIZED_PIXELS", 1)
    assert torch.equal(preprocess(image), whole(image)[:, :rows, :columns])


@pytest.mark.parametrize(("preprocess", "image_size", "expected"), BOXES)
def test_box(preprocess: Preprocess, image_size: tuple[int, int], expected: tuple[float, ...]) -> None:
    assert preprocess.box(image_size) == pytest.approx(expected)


@pytest.mark.parametrize("preprocess", [preprocess for preprocess, _, _ in BOXES])
@pytest.mark.parametrize("image_size", [(301, 257), (97, 133), (333, 640)])
def test_box_is_where_the_input_came_from(preprocess: Preprocess, image_size: tuple[int, int]) -> None:
    """A picture whose colours are its coordinates must come back with the coordinates of the box."""
    width, height = image_size
    plain = replace(preprocess, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bilinear")
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    colours = np.stack([np.tile(x, (height, 1)), np.tile(y[:, None], (1, width)), np.ones((height, width))], axis=-1)
    seen = plain(Image.fromarray((colours * 255).round().astype(np.uint8)))
    left, top, right, bottom = plain.box(image_size)
    rows, columns = plain.size
    expected_x = (left + (torch.arange(columns) + 0.5) * (right - left) / columns) / width
    expected_y = (top + (torch.arange(rows) + 0.5) * (bottom - top) / rows) / height
    inside = (seen[2] > 0.999).nonzero()
    middle = inside[len(inside) // 2]
    across = slice(int(inside[:, 1].min()) + 3, int(inside[:, 1].max()) - 2)
    down = slice(int(inside[:, 0].min()) + 3, int(inside[:, 0].max()) - 2)
    assert (seen[0, middle[0], across] - expected_x[across]).abs().max() < 1.5 / 255
    assert (seen[1, down, middle[1]] - expected_y[down]).abs().max() < 1.5 / 255


def test_denormalise_undoes_normalise() -> None:
    preprocess = Preprocess((16, 24), fit="squash")
    image = picture((24, 16))
    assert np.array_equal(np.asarray(preprocess.denormalise(preprocess(image))), np.asarray(image))
    with pytest.raises(VitrailError, match="expected one image"):
        preprocess.denormalise(torch.zeros(1, 3, 4, 4))


def test_normalise_keeps_shape_and_type() -> None:
    batch = torch.rand(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    result = Preprocess((4, 5)).normalise(batch)
    assert result.shape == batch.shape
    assert result.dtype == torch.float64
    assert result.requires_grad


@pytest.mark.parametrize("preprocess", [preprocess for preprocess, _, _ in BOXES])
def test_json_round_trip(preprocess: Preprocess) -> None:
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"size": (0, 224)}, "size"),
        ({"size": 224}, "size"),
        ({"mean": (0.5, 0.5)}, "mean"),
        ({"std": (0.5, 0.0, 0.5)}, "std"),
        ({"interpolation": "hamming"}, "interpolation"),
        ({"fit": "stretch"}, "fit"),
        ({"arithmetic": "jax"}, "arithmetic"),
        ({"crop_pct": 0.0}, "crop_pct"),
        ({"resize": (256, 256)}, "resize"),
        ({"fit": "squash", "resize": 256}, "resize"),
        ({"fit": "border", "resize": 256}, "resize"),
    ],
)
def test_wrong_fields(options: dict[str, Any], name: str) -> None:
    with pytest.raises(VitrailError, match=f"{name} = "):
        Preprocess(**{"size": (224, 224), **options})


def test_wrong_configs() -> None:
    with pytest.raises(VitrailError, match="1 colour channels"):
        Preprocess.from_timm({"input_size": (1, 28, 28)})
    with pytest.raises(VitrailError, match="keys"):
        Preprocess.from_dict({"size": [224, 224], "colour": "red"})
    with pytest.raises(VitrailError, match="keys"):
        Preprocess.from_dict({})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"fit": "crop", "interpolation": "nearest"}, {"interpolation": "nearest"}),
        ({"fit": "pad"}, {"fit": "border", "resize": None}),
        ({"fit": "squash", "crop_pct": 0.5}, {"fit": "squash", "resize": None, "crop_pct": 0.5}),
        ({"crop_pct": 0.875}, {"crop_pct": 0.875, "resize": None}),
        ({"mean": 0.5, "std": [0.1, 0.2, 0.3]}, {"mean": (0.5, 0.5, 0.5), "std": (0.1, 0.2, 0.3)}),
    ],
)
def test_settings_of_the_user(settings, expected):
    base = Preprocess((224, 224), resize=256)
    assert base.changed(**settings) == replace(base, **expected)


@pytest.mark.parametrize(
    "settings", [{"fit": "stretch"}, {"mean": "grey"}, {"std": 0}, {"crop_pct": 0}, {"interpolation": "cubic"}]
)
def test_wrong_settings_of_the_user(settings):
    with pytest.raises(VitrailError, match=r"preprocessing has .* expected"):
        Preprocess((224, 224)).changed(**settings)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (
            Preprocess((224, 224), resize=256),
            "shorter edge scaled to 256 pixels (bicubic); 224×224 cut from",
        ),
        (Preprocess((224, 224), fit="squash"), "squashed to 224×224 (bicubic); mean 0.485, 0.456, 0.406"),
        (Preprocess((8, 8), fit="border"), "longer edge scaled to 8 pixels, the rest padded (bicubic); mean"),
    ],
)
def test_what_happens_to_an_image_in_words(steps, text):
    assert steps.describe().startswith(text)


@pytest.mark.parametrize(
    ("fit", "size", "doubt"),
    [
        ("crop", (1, 1), "only 1 × 1 pixels"),
        ("crop", (3000, 100), "sees 3% of the image"),
        ("squash", (100, 3000), "30 times more in one direction"),
        ("border", (3000, 100), None),
        ("crop", (400, 200), None),
    ],
)
def test_images_that_are_hardly_seen(fit, size, doubt):
    reason = Preprocess((224, 224), fit=fit).doubt(size)
    assert reason is None if doubt is None else doubt in reason
