"""Regions: models with an output per patch, asked about the mean logit over a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from tests import families
from tests.common import noise
from tests.families import CLASSES, WIDTH
from tests.helpers import assert_same_state, relative, state_of
from torch import Tensor, nn

import vitrail
from vitrail.engine.trace import trace
from vitrail.errors import VitrailError
from vitrail.models.questions import patch_weights, within
from vitrail.models.view import View
from vitrail.targets import Contrast, Region, Similarity

DOUBLE, SINGLE = torch.float64, torch.float32
# family → how many of its tokens are no patches
BACKBONES = {"timm_headless_token": 1, "timm_dinov3": 5, "torchvision_vit": 1, "hf_patches": 1, "hf_dinov3_avg": 3}


def linear_head() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES)


def deep_head() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 24), nn.GELU(), nn.Dropout(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, CLASSES)
    )


def convolution_head() -> nn.Module:
    return nn.Sequential(
        nn.Dropout2d(), nn.Conv2d(WIDTH, 16, 1, bias=False), nn.ReLU(), nn.Conv2d(16, CLASSES, kernel_size=1)
    )


HEADS = {"linear": linear_head, "deep": deep_head, "convolution": convolution_head}


def made_head(kind: str, dtype: torch.dtype = DOUBLE) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        head = HEADS[kind]()
    families.randomize(head, seed=2)
    return head.eval().to(dtype)


def view_of(name: str, kind: str = "deep", dtype: torch.dtype = DOUBLE) -> View:
    return vitrail.wrap(families.build(name, dtype), head=made_head(kind, dtype), pool="patches")


@torch.no_grad()
def logit_map(name: str, module: Any, head: nn.Module, images: Tensor) -> Tensor:
    """(B, C, rows, columns): the head on the backbone's own patch tokens."""
    library, grid = families.find(name).library, families.find(name).grid
    if library == "torchvision":
        tokens = module.encoder(torch.cat([module.class_token.expand(len(images), -1, -1),
                                           module._process_input(images)], dim=1))  # fmt: skip
    else:
        tokens = module.forward_features(images) if library == "timm" else module(images).last_hidden_state
    patches = tokens[:, BACKBONES[name] :]
    if any(isinstance(part, nn.Conv2d) for part in head.modules()):
        return head(patches.transpose(1, 2).unflatten(2, grid))
    return head(patches).transpose(1, 2).unflatten(2, grid)


def corner(size: tuple[int, int]) -> np.ndarray:
    """A region that cuts through patches."""
    mask = np.zeros(size, bool)
    mask[3 : size[0] // 2 + 2, 5 : size[1] - 6] = True
    return mask


def mean_within(logits: Tensor, mask: np.ndarray) -> Tensor:
    """(B, C): of a map interpolated to the size of the mask."""
    return F.interpolate(logits, size=mask.shape, mode="bilinear")[..., torch.from_numpy(mask)].mean(-1)


# Logits


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", BACKBONES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(DOUBLE, 1e-10), (SINGLE, 1e-5)])
def test_logits_are_the_mean_of_those_of_the_head(name: str, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    module, head, images = families.build(name, dtype), made_head(kind, dtype), families.images(name, 2, dtype=dtype)
    view, logits = vitrail.wrap(module, head=head, pool="patches"), logit_map(name, module, head, images)
    mask = corner(view.size)
    region = within(view, patch_weights(torch.from_numpy(mask), view.grid).tolist())
    size = max(1.0, float(logits.abs().max()))
    assert (view.logits(images) - logits.mean((2, 3))).abs().max() <= tolerance * size
    assert (region.logits(images) - mean_within(logits, mask)).abs().max() <= tolerance * size


def test_weights_are_the_adjoint_of_the_interpolation() -> None:
    mask = torch.from_numpy(np.random.default_rng(0).random((28, 44)) < 0.2)
    values = torch.randn(1, 1, 3, 5, dtype=DOUBLE)
    weights = patch_weights(mask, (3, 5))
    expected = F.interpolate(values, size=mask.shape, mode="bilinear")[0, 0][mask].mean()
    assert torch.allclose(weights @ values.flatten(), expected, atol=1e-13)
    assert float(weights.sum()) == pytest.approx(1)


def test_a_head_from_a_file_is_loaded_with_its_backbone(tmp_path: Path) -> None:
    families.build("hf_patches").save_pretrained(tmp_path / "model")
    head = made_head("linear", SINGLE)
    torch.save({"decode_head.conv_seg.weight": head.weight[..., None, None], "decode_head.conv_seg.bias": head.bias},
               tmp_path / "head.pth")  # fmt: skip
    view = vitrail.load(f"hf:{tmp_path / 'model'}", head=tmp_path / "head.pth", pool="patches", labels=list("abcde"))
    images = families.images("hf_patches", 2)
    expected = logit_map("hf_patches", families.build("hf_patches"), head, images)
    assert (view.logits(images) - expected.mean((2, 3))).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    picture = tmp_path / "noise.png"
    noise(50, 40, 0).save(picture)
    mask = Image.fromarray(255 * corner((40, 50)).astype(np.uint8))
    ex = vitrail.explain(view, picture, "decompx", target=Region(mask, "b"), against="d")
    again = vitrail.open(ex.save(tmp_path / "out.png"))
    assert (again.label, again.against_label) == ("b", "d")
    assert again.model is not None
    assert again.model.question == ex.model.question
    pixels = view.preprocess(Image.open(picture).convert("RGB"))[None]
    assert torch.equal(again.model.logits(pixels), ex.model.logits(pixels))
    assert again.score(["insertion(steps=4)"]) == ex.score(["insertion(steps=4)"])


def test_a_classifier_saved_with_hugging_face_lends_its_backbone(tmp_path: Path) -> None:
    families.build("hf_vit").save_pretrained(tmp_path / "model")  # it has no pooler
    save_file({"weight": torch.randn(CLASSES, WIDTH)}, tmp_path / "head.safetensors")
    view = vitrail.load(f"hf:{tmp_path / 'model'}", head=tmp_path / "head.safetensors", pool="patches")
    assert (view.num_classes, view.architecture().head.pool) == (CLASSES, "patches")


def test_timm_backbones_take_a_head_from_a_file(tmp_path: Path) -> None:
    backbone = {"embed_dim": WIDTH, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 8}
    save_file({"weight": torch.ones(3, WIDTH), "bias": torch.arange(3.0)}, tmp_path / "head.safetensors")
    with pytest.warns(UserWarning, match="random weights"):
        view = vitrail.load("vit_base_patch16_224", pretrained=False, head=tmp_path / "head.safetensors",
                            pool="patches", dtype="float64", **backbone)  # fmt: skip
    assert (view.num_classes, view.dtype, view.head.weight.dtype) == (3, DOUBLE, DOUBLE)
    assert view.spec["pool"] == "patches"
    view.logits(torch.zeros(1, 3, 32, 32, dtype=DOUBLE))
    before = view.fingerprint()
    with torch.no_grad():
        view.head.weight.add_(1)
    assert view.fingerprint() != before


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"0.weight": torch.ones(8, WIDTH), "2.weight": torch.ones(3, 8)}, "does not hold a linear head"),
        ({"weight": torch.ones(3, WIDTH, 3, 3)}, "does not hold a linear head"),
        ({"weight": torch.ones(3, 7)}, "takes 7 features"),
    ],
)
def test_other_heads_from_a_file_are_refused(tmp_path: Path, state: dict[str, Tensor], message: str) -> None:
    families.build("hf_patches").save_pretrained(tmp_path / "model")
    save_file(state, tmp_path / "head.safetensors")
    with pytest.raises(VitrailError, match=message):
        vitrail.load(f"hf:{tmp_path / 'model'}", head=tmp_path / "head.safetensors", pool="patches")


NEIGHBOURS = [nn.Conv2d(WIDTH, 3, 3, padding=1), nn.Conv2d(WIDTH, 3, 3, stride=3)]


@pytest.mark.parametrize("head", [*NEIGHBOURS, nn.Sequential(nn.Linear(WIDTH, 8), nn.MaxPool1d(2), nn.Linear(4, 3))])
def test_heads_that_see_neighbours_or_compare_features_are_refused(head: nn.Module) -> None:
    with pytest.raises(VitrailError, match="is not supported"):
        vitrail.wrap(families.build("timm_headless_token"), head=head, pool="patches")


# Explanations


def test_decompx_is_complete() -> None:
    view, images = view_of("timm_dinov3"), families.images("timm_dinov3", 2, dtype=DOUBLE)
    mask = corner(view.size)
    before = state_of(view.module)
    explanations = vitrail.explain(view, images, "decompx", target=Region(mask, 3), against=1)
    assert_same_state(before, state_of(view.module))
    expected = mean_within(logit_map("timm_dinov3", view.module, view.head, images), mask)
    for explanation, logits in zip(explanations, expected, strict=True):
        split = explanation.split
        assert split["score"] == pytest.approx(float(logits[3] - logits[1]), abs=1e-9)
        assert sum(split.values()) - split["score"] == pytest.approx(split["score"], abs=1e-9)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_biases_and_tokens_add_up_to_the_logit_at_every_layer(layer: int) -> None:
    view, images = view_of("hf_patches"), families.images("hf_patches", 2, dtype=DOUBLE)
    region = within(view, patch_weights(torch.from_numpy(corner(view.size)), view.grid).tolist())
    made = trace(region, images, rule="frozen", keep=("x", "gx", "bias"), layers=[layer])
    total = (made["x"][layer] * made["gx"][layer]).sum((1, 2)) + made.bias_from(layer)
    assert relative(total, made.y) < 1e-10


def test_the_default_class_is_the_largest_of_the_region() -> None:
    view, images = view_of("timm_dinov3"), families.images("timm_dinov3", 1, dtype=DOUBLE)
    logits = logit_map("timm_dinov3", view.module, view.head, images)
    masks = [np.zeros(view.size, bool) for _ in range(2)]
    for mask, cell in zip(masks, (logits[0, 1].argmax(), logits[0, 4].argmax()), strict=True):
        row, column = divmod(int(cell), view.grid[1])
        mask[8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = True
    explanations = vitrail.explain(view, [images[0], images[0]], target=[Region(mask) for mask in masks])
    expected = [mean_within(logits, mask)[0] for mask in masks]
    assert [explanation.target for explanation in explanations] == [int(values.argmax()) for values in expected]
    probabilities = [float(values.softmax(0).max()) for values in expected]
    assert [explanation.probability for explanation in explanations] == pytest.approx(probabilities, abs=1e-9)


def test_of_the_patches_that_are_present_those_of_the_region_count() -> None:
    view, images = view_of("timm_dinov3"), families.images("timm_dinov3", 1, dtype=DOUBLE)
    weights = torch.zeros(12, dtype=DOUBLE)
    weights[[1, 2, 6]] = torch.tensor([0.5, 0.3, 0.2], dtype=DOUBLE)
    region, tokens = within(view, weights.tolist()), view.embed(images)
    alone = [within(view, F.one_hot(torch.tensor(patch), 12).double().tolist()) for patch in (1, 6)]
    keep = torch.tensor([[6, 0, 1, 9]])
    first, second = (single.encode(tokens, keep) for single in alone)
    assert torch.allclose(region.encode(tokens, keep), (0.5 * first + 0.2 * second) / 0.7, atol=1e-12)
    assert torch.equal(region.encode(tokens, torch.tensor([[0, 3, 9]])), torch.zeros(1, CLASSES, dtype=DOUBLE))
    assert torch.allclose(region.readout(images)[0, 5:], weights)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("decompx.skipplus", {}),
        ("tis", {"masks": 16}),
        ("lrp", {}),
        ("rise", {"masks": 8}),
        ("grad_cam", {}),
        ("shapley", {"permutations": 4}),
    ],
)
def test_methods_explain_regions(method: str, params: dict[str, Any]) -> None:
    view, images = view_of("timm_headless_token"), families.images("timm_headless_token", 1, dtype=DOUBLE)
    made = vitrail.explain(view, images[0], method, target=Region(corner(view.size), 2), **params)
    assert made.map.isfinite().all()
    assert made.map.abs().sum() > 0
    assert made.label == "class 2"


# Masks


def test_a_mask_of_the_image_passes_the_crop_of_the_model(tmp_path: Path) -> None:
    view = view_of("timm_headless_token", "linear")  # 42 × 56 pixels, seen through a crop
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 150, 3), np.uint8))
    mask = np.zeros((90, 150), bool)
    mask[20:60, 40:100] = True
    expected = patch_weights(view.preprocessing.mask(mask), view.grid)
    colours = Image.fromarray(np.stack([0 * mask, 9 * mask, 0 * mask], 2).astype(np.uint8))
    transparent = Image.fromarray(np.stack([9 + 0 * mask, 255 * mask], 2).astype(np.uint8), "LA")
    arrays = (mask, torch.from_numpy(mask), torch.from_numpy(mask)[None], mask.astype(np.float32))
    for spelling in (*arrays, Image.fromarray(mask), colours, transparent):
        made = vitrail.explain(view, image, target=Region(spelling))
        assert torch.allclose(torch.tensor(made.model.question["weights"], dtype=DOUBLE), expected)
    Image.fromarray(mask).save(tmp_path / "mask.png")
    made = vitrail.explain(view, image, target=Region(tmp_path / "mask.png"))
    assert torch.allclose(torch.tensor(made.model.question["weights"], dtype=DOUBLE), expected)
    seen = view.preprocessing.mask(mask)
    made = vitrail.explain(view, image, target=Region(seen))
    assert torch.allclose(torch.tensor(made.model.question["weights"], dtype=DOUBLE), expected)


def outside(size: tuple[int, int]) -> np.ndarray:
    mask = np.zeros(size, bool)
    mask[:, :2] = True
    return mask


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((30, 20), bool), r"the mask has 20 × 30 pixels, but the image has 200 × 90 and the input of"),
        (np.zeros((90, 200), bool), "the mask is empty"),
        (outside((90, 200)), "the region lies outside the part of the image"),
        (np.ones((90, 200, 3)), "a mask is a picture, or an array of shape"),
        (np.array([["a"]]), "a mask is a picture, or an array of shape"),
        ("nowhere.png", r"^cannot read the mask nowhere\.png: No such file or directory\.$"),
        (__file__, r"^cannot read the mask .*: it is not an image\.$"),
    ],
)
def test_wrong_masks_get_one_sentence(mask: Any, message: str) -> None:
    view = view_of("timm_headless_token", "linear")
    with pytest.raises(VitrailError, match=message):
        vitrail.explain(view, Image.new("RGB", (200, 90)), target=Region(mask))


def test_wrong_questions_get_one_sentence() -> None:
    view, images = view_of("timm_headless_token", "linear"), families.images("timm_headless_token", 1, dtype=DOUBLE)
    mask = corner(view.size)
    classifier = vitrail.wrap(families.build("timm_dinov2", DOUBLE))
    with pytest.raises(VitrailError, match="has no output per patch"):
        vitrail.explain(classifier, families.images("timm_dinov2", 1, dtype=DOUBLE)[0], target=Region(corner((42, 56))))
    with pytest.raises(VitrailError, match="there is no class 7"):
        vitrail.explain(view, images[0], target=Region(mask, 7))
    with pytest.raises(VitrailError, match="at the same place"):
        vitrail.explain(view, images[0], target=Contrast(Region(mask, 1), Region(~mask, 2)))
    with pytest.raises(VitrailError, match="at the same place"):
        vitrail.explain(view, images[0], target=1, against=Region(mask, 2))
    with pytest.raises(VitrailError, match="2 targets for 1 images"):
        vitrail.explain(view, images, target=[Region(mask), Region(mask)])
    made = vitrail.explain(view, images[0], "decompx", target=Contrast(Region(mask, 1), Region(mask, 2)))
    assert (made.target, made.against) == (1, 2)


def test_a_segmentation_model_has_embeddings() -> None:
    view, images = view_of("timm_dinov3"), families.images("timm_dinov3", 2, dtype=DOUBLE)
    made = vitrail.explain(view, images[0], "decompx", target=Similarity(images[1]))
    with torch.no_grad():
        embeddings = view.module.forward_features(images)[:, 5:].mean(1)
    assert made.probability == pytest.approx(float(F.cosine_similarity(*embeddings, dim=0)), abs=1e-9)


def test_a_region_of_one_image_is_not_evaluated_on_others() -> None:
    view = view_of("timm_patches", "linear", torch.float32)
    with pytest.raises(VitrailError, match='belongs to a single image: explain it, or evaluate target="region"'):
        vitrail.evaluate(view, [noise(32, 24, 0)], ["random"], ["deletion(steps=2)"], target=Region(corner((24, 32))))
