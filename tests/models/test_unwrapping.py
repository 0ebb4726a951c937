"""Networks as they come out of training: compiled, parallel, with adapters, behind a normalisation, in a class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from tests import families
from tests.helpers import assert_same_state, state_of
from tests.models.tiny import NAME, TINY, picture
from torch import Tensor, nn
from torchvision import transforms
from torchvision.transforms import v2

import vitrail
from vitrail import VitrailError
from vitrail.engine.trace import trace
from vitrail.models.black_box import BlackBox
from vitrail.models.vit import ViT

HALF = (0.5, 0.5, 0.5)
INPUT: dict[str, Any] = {"img_size": 32, "mean": HALF, "std": HALF}


def tiny(**options: Any) -> Any:
    made = timm.create_model(NAME, num_classes=7, **{**TINY, **options})
    families.randomize(made, seed=3)
    return made.eval()


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "parallel": nn.DataParallel,
    "compiled parallel": lambda module: torch.compile(nn.DataParallel(module), backend="eager"),
    "parallel compiled": lambda module: nn.DataParallel(torch.compile(module, backend="eager")),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_training_puts_around_a_network_is_taken_off(around: str) -> None:
    module = tiny()
    view = vitrail.wrap(AROUND[around](module))
    assert isinstance(view, ViT)
    assert view.module is module
    assert torch.equal(view.logits(picture()), vitrail.wrap(module).logits(picture()))


def test_hooks_around_are_refused() -> None:
    parallel = nn.DataParallel(tiny())
    parallel.register_forward_hook(lambda _, __, out: 2 * out)
    with pytest.raises(VitrailError, match=r"the DataParallel around the network has hooks.*inner module \(module\)"):
        vitrail.wrap(parallel)


@pytest.mark.parametrize("kind", [transforms.Normalize, v2.Normalize])
def test_a_normalisation_before_the_network_becomes_preprocessing(kind: Any) -> None:
    module, mean, std = tiny(), [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    whole = nn.Sequential(kind(mean, std), module)
    view = vitrail.wrap(whole)
    assert isinstance(view, ViT)
    assert (view.preprocessing.mean, view.preprocessing.std) == (tuple(mean), tuple(std))
    pixels = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    normalised = (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(view.logits(normalised), whole(pixels).detach())
    with pytest.raises(VitrailError, match="normalises its inputs itself"):
        vitrail.wrap(whole, mean=HALF, std=HALF)


class Classifier(nn.Module):
    """As Lightning modules and training scripts have it: the network is one of its parts."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network(images.clamp(-3, 3))


def test_a_class_around_a_vit_is_a_black_box_that_names_it() -> None:
    module = Classifier(tiny())
    view = vitrail.wrap(module, **INPUT)
    assert isinstance(view, BlackBox)
    assert "It has one inside, network (VisionTransformer): give that to wrap()" in view.note
    assert torch.equal(view.logits(picture()), module(picture()))


class Grey(nn.Module):
    """RGB → one channel."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(1, keepdim=True)


@pytest.mark.parametrize("name", [NAME, "resnet10t"])
def test_other_channels_say_what_to_do_and_that_works(name: str) -> None:
    module = timm.create_model(name, num_classes=3, in_chans=1, **(TINY if name == NAME else {})).eval()
    with pytest.raises(VitrailError, match=r"takes 1 colour channels.*nn.Sequential\(channels, model\)"):
        vitrail.wrap(module, img_size=32 if name != NAME else None)
    whole = nn.Sequential(Grey(), module)
    view = vitrail.wrap(whole, **INPUT)
    assert torch.equal(view.logits(picture()), whole(picture()))


def test_transformers_wrapper_of_timm_models_is_the_timm_model() -> None:
    import transformers

    config = transformers.TimmWrapperConfig(
        architecture=NAME, num_labels=7, model_args={**TINY}, id2label={i: f"kind {i}" for i in range(7)}
    )
    module = transformers.TimmWrapperForImageClassification(config)
    families.randomize(module, seed=3)
    view = vitrail.wrap(module.eval())
    assert isinstance(view, ViT)
    torch.testing.assert_close(view.logits(picture()), module(picture()).logits.detach())
    assert view.label(6) == "kind 6"


def lora(module: nn.Module, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    made = peft.get_peft_model(module, peft.LoraConfig(r=2, lora_alpha=3, **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


@pytest.mark.parametrize(
    ("name", "targets", "saved"),
    [
        ("timm_vit", ["qkv", "proj", "fc1", "fc2"], ["head"]),
        ("timm_vit", ["attn.proj"], None),
        ("hf_vit", ["q_proj", "v_proj"], ["classifier"]),
    ],
)
def test_lora_is_seen_merged(name: str, targets: list[str], saved: list[str] | None) -> None:
    module, images = families.build(name), families.images(name, 2)
    before = vitrail.wrap(module).logits(images)
    adapted = lora(module, target_modules=targets, modules_to_save=saved, lora_dropout=0.1)
    state = state_of(adapted)
    view = vitrail.wrap(adapted)
    assert isinstance(view, ViT)
    expected = adapted(images)
    expected = getattr(expected, "logits", expected).detach()
    torch.testing.assert_close(view.logits(images), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-2)
    found = trace(view, images, rule="frozen", keep={"x", "gx", "bias"})
    gap = found.y - (found["x"][0] * found["gx"][0]).sum((1, 2)) - found.bias_from(0)
    assert gap.abs().max() < 1e-5
    assert_same_state(state, state_of(adapted))
    with adapted.disable_adapter():
        torch.testing.assert_close(view.logits(images), before)
    adapted.merge_adapter()
    torch.testing.assert_close(view.logits(images), expected, atol=1e-5, rtol=1e-5)


def test_dora_is_refused_with_what_to_do() -> None:
    adapted = lora(tiny(), target_modules=["qkv"], use_dora=True)
    with pytest.raises(VitrailError, match=r"merge_and_unload\(\)"):
        vitrail.wrap(adapted)
