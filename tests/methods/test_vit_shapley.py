"""ViT Shapley: the literal explainer, values that add up, and files that are refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from tests.families import FAMILIES, Family, images
from tests.helpers import DOUBLE, assert_same_state, random_explainer, relative, state_of, wrapped
from tests.oracles import network
from tests.oracles import vit_shapley as literal
from torch import Tensor, nn

import vitrail
from vitrail.bench.run import work_of
from vitrail.errors import VitrailError
from vitrail.methods.registry import build_method
from vitrail.methods.vit_shapley import FORMAT, Explainer, VitShapley, embedded_explainer
from vitrail.models.view import View

TARGET = torch.tensor([0, 1, 1])


def _with_head(classes: int) -> Family:
    tiny = {"img_size": (24, 32), "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    make = functools.partial(timm.create_model, "vit_base_patch16_224", pretrained=False, num_classes=classes, **tiny)
    return Family("timm_vit", make, (24, 32), (3, 4), 1, "timm")


ONE_OUTPUT, SIGMOID = _with_head(1), _with_head(4)
CASES: dict[str, tuple[Family, str]] = {
    "class token": (FAMILIES["timm_vit"], "softmax"),
    "mean": (FAMILIES["timm_vit_avg"], "softmax"),
    "no prefix": (FAMILIES["timm_vit_gap"], "softmax"),
    "distilled pair": (FAMILIES["timm_deit_distilled"], "softmax"),
    "attention pool": (FAMILIES["timm_siglip"], "softmax"),
    "class token and mean": (FAMILIES["hf_dinov2"], "softmax"),
    "one output": (ONE_OUTPUT, "softmax"),
    "sigmoid": (SIGMOID, "sigmoid"),
}


@functools.cache
def case(name: str) -> tuple[Family, nn.Module, View, Tensor]:
    """A family, its module, the view and three images."""
    family, output = CASES[name]
    module = family.build(DOUBLE)
    pixels = torch.randn(3, 3, *family.image_size, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    view = vitrail.wrap(module, output=output) if output == "sigmoid" else wrapped(family.name, module)
    return family, module, view, pixels


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "explainer.safetensors"


def built(name: str, path: Path, **shape: int) -> VitShapley:
    """The method with a random explainer, which is written to the path."""
    view = case(name)[2]
    random_explainer(view, **shape).save(path)
    method = build_method("vit_shapley", view, explainer=str(path))
    assert isinstance(method, VitShapley)
    return method


@pytest.mark.parametrize("name", CASES)
def test_maps_are_those_of_the_literal_explainer(name: str, path: Path) -> None:
    family, module, view, pixels = case(name)
    result = built(name, path).explain(pixels, TARGET)
    recorded = network.run(family, module, pixels, torch.zeros_like(TARGET))
    full = literal.probabilities(recorded.logits, view.output)
    heads = [head.weight.detach() for head in recorded.recipe.readout.heads]
    values = literal.shapley_values(path, recorded.x, heads, family.prefix, full)
    rows = torch.arange(len(TARGET))
    expected = values[rows, :, TARGET].reshape(-1, *family.grid)
    assert result.map.shape == expected.shape
    assert relative(result.map, expected) < 1e-6
    assert relative(result.extras["score"], full[rows, TARGET]) < 1e-6
    assert float(expected.std()) > 1e-4, "equal shares would agree for other reasons"


@pytest.mark.parametrize("name", CASES)
def test_values_add_up_to_the_image_minus_nothing(name: str, path: Path) -> None:
    family, _, view, pixels = case(name)
    result = built(name, path).explain(pixels, TARGET)
    tokens = view.embed(pixels[:1])
    blank = view.logits(torch.zeros_like(pixels[:1])) if view.pools_patches else view.encode(tokens[:, : family.prefix])
    empty = literal.probabilities(blank, view.output)[0, TARGET]
    full = literal.probabilities(view.logits(pixels), view.output)[torch.arange(3), TARGET]
    torch.testing.assert_close(result.map.sum((1, 2)), (full - empty).detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(result.extras["score_patches"], result.map.sum((1, 2)))
    torch.testing.assert_close(result.extras["score_baseline"], empty.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [{"hidden": 20, "blocks": 1}, {"hidden": 96, "blocks": 3}])
def test_explainers_of_other_sizes(shape: dict[str, int], path: Path) -> None:
    family, module, _, pixels = case("class token")
    maps = built("class token", path, **shape).attribute(pixels, TARGET)
    recorded = network.run(family, module, pixels, TARGET)
    full = literal.probabilities(recorded.logits, "softmax")
    heads = [head.weight.detach() for head in recorded.recipe.readout.heads]
    values = literal.shapley_values(path, recorded.x, heads, family.prefix, full)
    assert relative(maps.flatten(1), values[torch.arange(3), :, TARGET]) < 1e-6


@pytest.mark.parametrize("name", ["class token", "one output", "sigmoid"])
def test_a_contrast_is_the_difference_of_two_classes(name: str, path: Path) -> None:
    pixels, method = case(name)[3], built(name, path)
    first, second = (method.explain(pixels, target) for target in (1, 0))
    contrast = method.explain(pixels, 1, against=0)
    assert relative(contrast.map, first.map - second.map) < 1e-12
    for part in ("score", "score_patches", "score_baseline"):
        torch.testing.assert_close(contrast.extras[part], first.extras[part] - second.extras[part])


@pytest.mark.parametrize("name", ["class token", "attention pool"])
def test_a_batch_is_its_images_one_by_one(name: str, path: Path) -> None:
    pixels, method = case(name)[3], built(name, path)
    maps = method.attribute(pixels, TARGET)
    alone = torch.cat([method.attribute(pixels[i : i + 1], int(TARGET[i])) for i in range(3)])
    assert relative(maps, alone) < 1e-9
    predicted = case(name)[2].logits(pixels).argmax(1)
    assert torch.equal(method.attribute(pixels), method.attribute(pixels, predicted))


def test_the_model_is_left_alone(path: Path) -> None:
    _, module, _, pixels = case("class token")
    method = built("class token", path)
    before = state_of(module)
    method.attribute(pixels)
    assert_same_state(before, state_of(module))


def test_single_and_double_precision_agree(path: Path) -> None:
    module = FAMILIES["timm_vit"].build(torch.float32)
    pixels = images("timm_vit", 2)
    random_explainer(vitrail.wrap(module)).save(path)
    single = build_method("vit_shapley", vitrail.wrap(module), explainer=str(path)).attribute(pixels, 2)
    double = build_method("vit_shapley", vitrail.wrap(module.double()), explainer=str(path)).attribute(pixels, 2)
    assert single.dtype == torch.float32
    assert relative(single, double) < 1e-4


# Files


def test_a_file_that_was_written_anew_is_another_version(path: Path) -> None:
    view, works = case("class token")[2], []
    for seed in (0, 0, 1):
        random_explainer(view, seed).save(path)
        method = build_method("vit_shapley", view, explainer=str(path))
        works.append(work_of((method.info.name, method.version, method.params), ("sparseness", 1, {}), "predicted"))
    assert works[0] == works[1] != works[2]
    assert VitShapley.version == 1, "the class itself is not changed"


def test_embedded_explainers() -> None:
    scenes = vitrail.load("scenes")
    assert embedded_explainer(scenes) is not None
    assert VitShapley.unsupported(scenes) is None
    picture = vitrail.data.open_data("scenes:1")[0].image
    explanation = vitrail.explain(scenes, picture, "vit_shapley")
    assert explanation.call == "vit_shapley"
    assert explanation.score_line.startswith("probability +")
    assert explanation.map.max() > 2 * explanation.map.abs().mean()
    with torch.no_grad():
        scenes.module.head.bias += 1 + torch.arange(len(scenes.module.head.bias))
    with pytest.raises(VitrailError, match="was trained for other weights of scenes than those of scenes"):
        vitrail.explain(scenes, picture, "vit_shapley")


def test_randomised_models_are_not_explained() -> None:
    rows = vitrail.evaluate(
        "scenes", "scenes:1", "vit_shapley, gradient", "model_randomization(way=independent)", images=1
    )
    applies = rows.set_index("method")["value"].notna()
    assert not applies["vit_shapley"]
    assert applies["gradient"]


def rewritten(path: Path, **tensors: Tensor | None) -> None:
    """Changes tensors of an explainer; None removes one."""
    card = literal.read(path)[0]
    content = {name: tensor for name, tensor in {**load_file(path), **tensors}.items() if tensor is not None}
    save_file(content, path, {"format": FORMAT, "card": json.dumps(card)})


def described(path: Path, **values: Any) -> None:
    """Changes the description of an explainer."""
    card = {**literal.read(path)[0], **values}
    save_file(load_file(path), path, {"format": FORMAT, "card": json.dumps(card)})


DAMAGED = r"the explainer .* is damaged: its tensors are not those that its description promises"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "there is no explainer .*: `vitrail train-explainer` makes one"),
        (lambda path: path.write_bytes(b""), "is not a readable safetensors file"),
        (lambda path: path.write_text("no explainer"), "is not a readable safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is not a readable safetensors file"),
        (lambda path: save_file(load_file(path), path), "is no explainer: expected a file that"),
        (lambda path: save_file(load_file(path), path, {"format": FORMAT}), DAMAGED),
        (lambda path: save_file(load_file(path), path, {"format": FORMAT, "card": "{"}), DAMAGED),
        (lambda path: described(path, blocks=3), DAMAGED),
        (lambda path: described(path, hidden=33), DAMAGED),
        (lambda path: described(path, hidden=0), DAMAGED),
        (lambda path: described(path, layers=[]), DAMAGED),
        (lambda path: described(path, layers="abc"), DAMAGED),
        (lambda path: described(path, colour="red"), DAMAGED),
        (lambda path: rewritten(path, probe=None), DAMAGED),
        (lambda path: rewritten(path, probe=torch.tensor(1.0)), DAMAGED),
        (lambda path: rewritten(path, empty=torch.zeros(3)), DAMAGED),
        (lambda path: rewritten(path, more=torch.zeros(3)), DAMAGED),
        (lambda path: rewritten(path, empty=torch.full((5,), torch.nan)), "holds NaN or infinite values"),
        (lambda path: rewritten(path, probe=torch.ones(1)), "was trained for other weights"),
        (lambda path: rewritten(path, probe=torch.ones(5)), "was trained for other weights"),
    ],
)
def test_unusable_files(damage: Callable[[Path], Any], message: str, path: Path) -> None:
    built("class token", path)
    damage(path)
    _, _, view, pixels = case("class token")
    with pytest.raises(VitrailError, match=message) as raised:
        build_method("vit_shapley", view, explainer=str(path)).attribute(pixels, TARGET)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["mean", "class token and mean", "one output", "sigmoid"])
def test_explainers_of_other_models(name: str, path: Path) -> None:
    built("class token", path)
    other = case(name)[2]
    with pytest.raises(VitrailError, match=r"was trained for vit_base_patch16_224 \(4 × 4 patches, 5 classes"):
        build_method("vit_shapley", other, explainer=str(path))


def test_the_depth_and_the_head_must_fit(path: Path) -> None:
    view = case("class token")[2]
    explainer = random_explainer(view)
    for card, message in (
        (replace(explainer.card, layers=(0, 1, 1, 2)), "2 blocks, a head of 32.* 3 blocks"),
        (replace(explainer.card, directions=64), "a head of 64.* a head of 32"),
    ):
        changed = Explainer(card, view.num_outputs)
        changed.save(path)
        with pytest.raises(VitrailError, match=message):
            build_method("vit_shapley", view, explainer=str(path))
    assert Explainer.read(path).card == card
    assert asdict(card)["training"] == {}


def test_models_without_an_explainer() -> None:
    view = case("class token")[2]
    with pytest.raises(
        VitrailError, match="it needs an explainer of this model, which `vitrail train-explainer` makes"
    ):
        build_method("vit_shapley", view)
    with pytest.raises(VitrailError, match=r"explainer must be .*, but got 3"):
        build_method("vit_shapley", view, explainer=3)
    with pytest.raises(VitrailError, match="its explainer reads several layers at once"):
        build_method("vit_shapley.plus", view)
