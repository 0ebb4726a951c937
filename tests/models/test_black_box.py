"""Any image classifier is explained by its logits, and by feature maps where it has some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from tests import families
from tests.common import noise, small_budget
from tests.families import BLACK_BOXES, CLASSES
from tests.helpers import assert_same_state, batch, state_of, viewed, wrapped
from tests.models.tiny import NAME, TINY
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.evaluation import default_method
from vitrail.methods.registry import get_method, list_methods, recommended_methods, supported_methods
from vitrail.metrics.base import list_metrics
from vitrail.models.black_box import BlackBox, layout
from vitrail.models.hierarchical import Hierarchical

HALF = (0.5, 0.5, 0.5)
INPUT: dict[str, Any] = {"img_size": 32, "mean": HALF, "std": HALF}
MODES: list[bool] = []  # that a network was run in


class Network(nn.Module):
    """A small classifier of nobody's library."""

    def __init__(self, answer: Callable[[Tensor], Any] = lambda logits: logits) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 4, 4), nn.BatchNorm2d(6)
        self.deep = nn.Sequential(nn.Conv2d(6, 10, 3, padding=1), nn.ReLU())
        self.drop, self.head, self.answer = nn.Dropout(0.5), nn.Linear(10, CLASSES), answer

    def forward(self, images: Tensor) -> Any:
        MODES.append(self.training)
        features = self.deep(self.norm(self.stem(images)).relu())
        return self.answer(self.head(self.drop(features.mean((2, 3)))))


def network(answer: Callable[[Tensor], Any] = lambda logits: logits) -> Network:
    module = Network(answer)
    families.randomize(module, seed=3)
    return module.train()


def pictures(count: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


# What a view of it is


@pytest.mark.parametrize("name", BLACK_BOXES)
def test_logits_are_the_modules_own_and_nothing_is_changed(name: str) -> None:
    module = BLACK_BOXES[name].build()
    images, expected = batch(name, 2, torch.float32), families.expected_logits(
        BLACK_BOXES[name], module, batch(name, 2, torch.float32)
    )  # fmt: skip
    module.train()
    before = state_of(module)
    view = wrapped(name, module)
    assert type(view) is BlackBox
    assert torch.equal(view.logits(images), expected)
    vitrail.explain(view, images, "occlusion")
    assert_same_state(before, state_of(module))
    with torch.no_grad():
        next(module.parameters()).mul_(0.5)
    assert not torch.allclose(view.logits(images), expected), "the view follows the weights"


@pytest.mark.parametrize("name", BLACK_BOXES)
def test_every_method_that_needs_no_tokens_explains_it(name: str) -> None:
    _, _, view = viewed(name)
    needed = {"logits", "features"} if view.has_features else {"logits"}
    assert supported_methods(view) == [method for method, info in list_methods().items() if info.needs in needed]
    images = batch(name, 2)
    for method in supported_methods(view):
        params: dict[str, Any] = small_budget(method)
        if "signed" in get_method(method).info.protocols:
            params["protocol"] = "signed"  # the ReLU of the default may leave nothing of a random network
        explained = vitrail.explain(view, images, method, target=1, **params)
        assert all(e.map.isfinite().all() and float(e.map.std()) > 0 for e in explained), method
        if get_method(method).info.level == "pixel":
            assert tuple(explained[0].map.shape) == view.size
    assert default_method(view) == recommended_methods(view)[0] == ("vit_cx" if view.has_features else "occlusion")


@pytest.mark.parametrize("name", BLACK_BOXES)
def test_what_it_does_not_have_is_said(name: str) -> None:
    _, _, view = viewed(name)
    with pytest.raises(VitrailError, match=r"it has no fixed tokens \(a black box\). Methods that can: .*occlusion"):
        vitrail.explain(view, batch(name, 1)[0], "decompx")
    for call in (lambda: view.embed(batch(name, 1)), lambda: view.blocks, lambda: view.grid):
        with pytest.raises(VitrailError, match="it is a black box, without fixed tokens"):
            call()
    if not view.has_features:
        with pytest.raises(VitrailError, match=r"no layer whose output is a feature map: name one, wrap\(module, feat"):
            vitrail.explain(view, batch(name, 1)[0], "grad_cam")
    assert view.note.startswith("Explained as a black box, by its logits")
    assert view.note.endswith("a plain ViT can be explained by every method.")


@pytest.mark.parametrize("name", ["timm_resnet", "timm_xcit"])
def test_metrics_that_need_only_logits_measure_it(name: str) -> None:
    _, _, view = viewed(name, torch.float32)
    images = [(noise(48, 40, seed), seed) for seed in range(2)]
    metrics = ["insertion", "deletion", "sparseness", "infidelity", "model_randomization"]
    assert set(metrics) <= set(list_metrics())
    rows = vitrail.evaluate(view, images, methods=["occlusion"], metrics=metrics)
    assert len(rows) == 2 * len(metrics)
    assert rows["value"].notna().all()


def test_occlusion_of_a_network_that_reads_one_place() -> None:
    """What decides is found: nothing else changes the logits."""

    class Corner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, images: Tensor) -> Tensor:
            return self.head(images[:, :, 4:8, 20:24].mean((2, 3)))

    module = Corner()
    families.randomize(module, seed=0)
    view = vitrail.wrap(module, **INPUT)
    assert not view.has_features
    values = vitrail.explain(view, pictures(1)[0], "occlusion", window=4, stride=4).map.abs()
    assert float(values[4:8, 20:24].min()) > 0
    values[4:8, 20:24] = 0
    assert float(values.max()) < 1e-6


# What is accepted as a classifier


@pytest.mark.parametrize(
    "answer",
    [lambda z: z, lambda z: SimpleNamespace(logits=z), lambda z: {"logits": z, "loss": None}, lambda z: z[:, :1]],
)
def test_forms_of_output(answer: Callable[[Tensor], Any]) -> None:
    module = network(answer)
    MODES.clear()
    view, images = vitrail.wrap(module, **INPUT), pictures()
    found = view.logits(images)
    assert set(MODES) == {False}, "run in evaluation mode"
    assert module.training
    module.eval()
    expected = module(images)
    expected = expected["logits"] if isinstance(expected, dict) else getattr(expected, "logits", expected)
    assert torch.equal(found, expected)
    assert view.num_classes == max(2, found.shape[1])
    assert view.probabilities(found).sum(1).allclose(torch.ones(2))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda z: (z, z), "the module returns a tuple, but a classifier returns a tensor of logits"),
        (lambda z: z[:, 0], r"Network cannot be explained: for a batch of 1 its output has shape \(1,\)"),
        (lambda z: z[:, :, None], r"its output has shape \(1, 5, 1\)"),
        (lambda z: z.sum(0, keepdim=True), r"for a batch of 2 its output has shape \(1, 5\)"),
        (lambda z: z - z.mean(0), "the logits of an image change with the other images of its batch"),
        (lambda z: z + torch.rand(()), "two passes over one image differ: it draws random numbers"),
        (lambda z: 1 / 0, r"its forward pass fails on an image of 32×32 pixels \(division by zero"),
    ],
)
def test_what_is_no_classifier_is_refused(answer: Callable[[Tensor], Any], message: str) -> None:
    module = network(answer)
    before = state_of(module)
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(module, **INPUT)
    assert_same_state(before, state_of(module))


def test_numbers_that_are_drawn_and_not_used_leave_no_trace() -> None:
    module = network(lambda z: z + 0 * torch.rand(()))
    before = state_of(module)
    assert vitrail.wrap(module, **INPUT).num_classes == CLASSES
    assert_same_state(before, state_of(module))


@pytest.mark.parametrize("missing", INPUT)
def test_a_class_of_ones_own_must_say_how_images_become_inputs(missing: str) -> None:
    with pytest.raises(VitrailError, match=r"Network is no model of timm.*img_size=, mean= and std="):
        vitrail.wrap(network(), **{key: value for key, value in INPUT.items() if key != missing})
    assert vitrail.wrap(network(), **INPUT).preprocessing.mean == HALF


def test_timm_and_transformers_say_it_themselves() -> None:
    module = timm.create_model("resnet10t", num_classes=CLASSES)
    expected = timm.data.resolve_model_data_config(module)
    view = vitrail.wrap(module)
    assert view.size == expected["input_size"][1:]
    assert view.preprocessing.crop_pct == expected["crop_pct"]
    with pytest.raises(VitrailError, match="does not say the size of its inputs; give img_size="):
        vitrail.wrap(BLACK_BOXES["hf_resnet"].build())


def test_other_channels_and_headless_networks_are_refused() -> None:
    with pytest.raises(VitrailError, match="takes 1 colour channels"):
        vitrail.wrap(timm.create_model("resnet10t", in_chans=1, num_classes=2))
    with pytest.raises(VitrailError, match="no classification head"):
        vitrail.wrap(timm.create_model("resnet10t", num_classes=0))
    with pytest.raises(VitrailError, match="head= is for backbones with tokens"):
        vitrail.wrap(timm.create_model("resnet10t", num_classes=2), head=nn.Linear(512, 2), pool="avg")


def test_no_gradient_is_no_obstacle_to_masks() -> None:
    view = vitrail.wrap(network(lambda z: z.detach()), **INPUT)
    assert not view.differentiable
    assert "occlusion" in supported_methods(view)
    assert "integrated_gradients" not in supported_methods(view)
    with pytest.raises(VitrailError, match="no gradient flows through it"):
        vitrail.explain(view, pictures(1)[0], "integrated_gradients")
    assert vitrail.explain(view, pictures(1)[0], "occlusion").map.isfinite().all()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization", "ignore:.*quantize_per_tensor")
def test_quantised_weights_can_be_a_black_box() -> None:
    module = torch.ao.quantization.quantize_dynamic(network().eval(), {nn.Linear}, dtype=torch.qint8)
    view, images = vitrail.wrap(module, **INPUT), pictures()
    assert torch.equal(view.logits(images), module(images))
    assert not view.differentiable
    assert vitrail.explain(view, images[0], "occlusion").map.isfinite().all()
    assert len(view.fingerprint()) == 32


# Feature layers


def test_the_last_feature_map_is_found_and_others_can_be_named() -> None:
    module = network()
    view = vitrail.wrap(module, **INPUT)
    assert view.stage_names == ("deep",)
    named = vitrail.wrap(module, **INPUT, features=["stem", "deep"])
    images = pictures()
    clone = network().eval()
    torch.testing.assert_close(named.features(images, 0), clone.stem(images))
    assert torch.equal(named.features(images), view.features(images))
    last, first = (vitrail.explain(named, images[0], "hires_cam", target=0, layer=i) for i in (None, 0))
    assert last.map.shape == first.map.shape == (8, 8)
    expected = vitrail.explain(view, images[0], "hires_cam", target=0)
    assert torch.equal(last.map, expected.map)
    assert not torch.equal(last.map, first.map)
    assert not vitrail.wrap(module, **INPUT, features=()).has_features


def test_cams_on_a_named_layer_are_activations_times_gradients() -> None:
    module = network()
    view = vitrail.wrap(module, **INPUT, features="deep")
    found = vitrail.explain(view, pictures(1)[0], "hires_cam", target=2, protocol="signed").map
    module.eval()
    kept: list[Tensor] = []
    module.deep.register_forward_hook(lambda _, __, out: kept.append(out))
    (gradient,) = torch.autograd.grad(module(pictures(1))[0, 2], kept)
    torch.testing.assert_close(found, (kept[0] * gradient).sum(1)[0].detach())


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("layer9", r"it has no layer 'layer9' for features=; at the top it has stem, norm, deep, drop, head"),
        ("head", r"the output of head is no feature map, but of shape \(1, 5\)"),
        (["deep", "drop"], r"the output of drop is no feature map"),
    ],
)
def test_layers_without_a_feature_map_are_refused(features: Any, message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(network(), **INPUT, features=features)


@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((1, 64, 7, 7), (224, 224), "channels first"),
        ((1, 7, 7, 64), (224, 224), "channels last"),
        ((1, 8, 7, 7), (224, 224), "channels first"),
        ((1, 7, 7, 7), (224, 224), None),
        ((1, 30, 3, 5), (96, 160), "channels first"),
        ((1, 3, 5, 30), (96, 160), "channels last"),
        ((1, 30, 7, 8), (250, 250), "channels first"),
        ((1, 196, 64), (224, 224), "tokens"),
        ((1, 15, 64), (96, 160), "tokens"),
        ((1, 197, 64), (224, 224), None),
        ((4, 64, 7, 7), (224, 224), None),
        ((1, 64), (224, 224), None),
    ],
)
def test_layouts_of_feature_maps(shape: tuple[int, ...], size: tuple[int, int], expected: str | None) -> None:
    assert layout(torch.empty(shape), 1, size) == expected


# A plain ViT is never a black box unawares


def test_a_plain_vit_becomes_a_black_box_only_when_asked() -> None:
    module = timm.create_model(NAME, num_classes=7, **TINY).eval()
    families.randomize(module, seed=3)
    plain, box = vitrail.wrap(module), vitrail.wrap(module, black_box=True)
    assert (plain.has_tokens, box.has_tokens, box.has_features) == (True, False, False)
    torch.testing.assert_close(plain.logits(pictures()), box.logits(pictures()))
    module.blocks[0].attn.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(VitrailError, match=r"differ on a random image.*wrap\(module, black_box=True\)"):
        vitrail.wrap(module)
    changed = vitrail.wrap(module, black_box=True)
    torch.testing.assert_close(changed.logits(pictures()), module(pictures()))
    assert not torch.allclose(changed.logits(pictures()), plain.logits(pictures()))


def test_a_subclass_of_a_plain_vit_is_refused_unless_asked() -> None:
    class Mine(timm.models.vision_transformer.VisionTransformer):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    module = Mine(img_size=32, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3).eval()
    with pytest.raises(VitrailError, match=r"something else than timm.*VisionTransformer.*black_box=True"):
        vitrail.wrap(module, **INPUT)
    assert torch.equal(vitrail.wrap(module, black_box=True, **INPUT).logits(pictures()), module(pictures()))


def test_swin_as_a_black_box() -> None:
    module = families.build("timm_swin")
    assert type(vitrail.wrap(module)) is Hierarchical
    box = vitrail.wrap(module, black_box=True)
    assert type(box) is BlackBox
    assert torch.equal(box.logits(pictures()), vitrail.wrap(module).logits(pictures()))
    assert box.features(pictures()).shape[1] == 32


# By name


def test_load_by_name(tmp_path: Path) -> None:
    module = timm.create_model("resnet10t", num_classes=3)
    families.randomize(module, seed=1)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    options: dict[str, Any] = {"checkpoint": tmp_path / "w.safetensors", "img_size": 64, "features": ("layer3",)}
    view = vitrail.load("resnet10t", **options)
    assert (view.size, view.stage_names, view.num_classes) == ((64, 64), ("layer3",), 3)
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(view.logits(images), module.eval()(images))
    assert view.spec is not None
    again = vitrail.load(**view.spec)
    assert again.fingerprint() == view.fingerprint()
    assert again.stage_names == view.stage_names


@pytest.mark.filterwarnings("ignore:.*random weights")
def test_models_without_weights_tell_what_they_support() -> None:
    view = vitrail.load("resnet10t", pretrained=False, num_classes=2, device="meta")
    assert (view.num_classes, view.stage_names) == (2, ("layer4",))
    assert "grad_cam" in supported_methods(view)
    box = vitrail.load(NAME, pretrained=False, num_classes=2, black_box=True, device="meta", **TINY)
    assert "grad_cam" not in supported_methods(box)
    assert box.spec is not None
    assert box.spec["black_box"] is True


@pytest.mark.filterwarnings("ignore:.*random weights")
def test_torchvision_networks_by_name() -> None:
    view = vitrail.load("torchvision:mobilenet_v3_small", pretrained=False, num_classes=2, img_size=64)
    assert (view.size, view.stage_names) == ((64, 64), ("features",))
    assert vitrail.explain(view, torch.randn(3, 64, 64), "grad_cam").map.isfinite().all()
