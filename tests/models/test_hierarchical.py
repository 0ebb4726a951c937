"""Swin in every library: the copy that runs, the weights it follows, and the heads and channels it may have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import timm
import torch
from tests import families
from tests.families import HIERARCHICAL
from tests.helpers import assert_same_state, batch, state_of, wrapped
from torch import Tensor, nn

import vitrail
from vitrail import VitrailError
from vitrail.models.clone import evaluation_clone


def swin(name: str = "timm_swin") -> Any:
    return HIERARCHICAL[name].build()


def own_logits(name: str, module: nn.Module, images: Tensor) -> Tensor:
    """What the module itself says in evaluation mode."""
    return families.expected_logits(HIERARCHICAL[name], module.eval(), images)


def head_place(module: Any) -> tuple[nn.Module, str]:
    """The module that holds the last linear layer, and under which name."""
    path = next(
        path for path, m in module.named_modules() if isinstance(m, nn.Linear) and m.out_features == families.CLASSES
    )
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


@pytest.mark.parametrize("name", HIERARCHICAL)
@torch.no_grad()
def test_a_swin_view_follows_its_module(name: str) -> None:
    module = swin(name)
    view, images = wrapped(name, module), batch(name, 2, torch.float32)
    owner, place = head_place(module)
    head: Any = getattr(owner, place)

    norm = [path for path, m in module.named_modules() if isinstance(m, nn.LayerNorm)][-1]

    def change_in_place() -> None:
        head.weight.mul_(0.5)

    def replace_a_parameter() -> None:
        head.weight = nn.Parameter(head.weight.flip(0))

    def replace_the_norm() -> None:
        module.set_submodule(norm, nn.Identity())

    def replace_the_head() -> None:
        setattr(owner, place, nn.Sequential(nn.Dropout(0.5), nn.Linear(head.in_features, 3)))

    usual = view.logits(images)
    for change in (change_in_place, replace_a_parameter, replace_the_norm, replace_the_head, module.double):
        change()
        found = view.logits(images)
        assert found.shape != usual.shape or found.dtype != usual.dtype or not torch.allclose(found, usual)
        assert torch.equal(found, own_logits(name, module, images.to(view.dtype)))
        assert view.num_classes == found.shape[1]
        usual = found


def test_a_copy_shares_tensors_and_nothing_else() -> None:
    module = swin().train()
    module.head.again = module.head.fc  # one module in two places
    before = state_of(module)
    copied = evaluation_clone(module)
    pairs = list(
        zip(module.named_modules(remove_duplicate=False), copied.named_modules(remove_duplicate=False), strict=True)
    )
    assert all(name == other and a is not b and type(a) is type(b) for (name, a), (other, b) in pairs)
    assert not any(part.training for part in copied.modules())
    assert copied.head.again is copied.head.fc
    assert all(a is b for a, b in zip(module.parameters(), copied.parameters(), strict=True))
    assert all(a is b for a, b in zip(module.buffers(), copied.buffers(), strict=True))
    copied.register_forward_hook(print)
    copied.register_forward_pre_hook(print)
    copied.register_buffer("extra", torch.zeros(1))
    copied.norm.weight, copied.layers[0] = nn.Parameter(torch.zeros(32)), nn.Identity()
    assert_same_state(before, state_of(module))


def test_compiled_parts_are_read_through() -> None:
    images = batch("timm_swin", 2, torch.float32)
    plain = wrapped("timm_swin", swin())
    part, whole = swin(), swin()
    part.layers[0] = torch.compile(part.layers[0], backend="eager")
    whole.compile(backend="eager")
    for module in (part.train(), whole.train()):
        view = wrapped("timm_swin", module)
        assert torch.equal(view.logits(images), plain.logits(images))
        assert torch.equal(view.features(images, 0), plain.features(images, 0))


@torch.no_grad()
def test_a_forward_method_that_was_replaced() -> None:
    module, images = swin().train(), batch("timm_swin", 2, torch.float32)
    usual = type(module).forward
    module.forward = MethodType(lambda self, x: 2 * usual(self, x), module)
    view = wrapped("timm_swin", module)
    found, features = view.logits(images), view.features(images)
    assert torch.equal(found, own_logits("timm_swin", module, images))
    assert torch.equal(features, wrapped("timm_swin", swin()).features(images))
    module.forward = partial(module.forward)
    assert torch.equal(wrapped("timm_swin", module).features(images), features)
    patched = module.forward
    module.forward = lambda x: 1 * patched(x)
    with pytest.raises(VitrailError, match="SwinTransformer cannot be explained: its forward method was replaced"):
        wrapped("timm_swin", module)


@pytest.mark.parametrize("name", HIERARCHICAL)
@torch.no_grad()
def test_under_autocast_the_head_of_a_swin_keeps_its_precision(name: str) -> None:
    module, pooled = swin(name), []
    owner, place = head_place(module)
    head: Any = getattr(owner, place)
    view, images = wrapped(name, module), batch(name, 2, torch.float32)
    norm: Any = [m for m in module.modules() if isinstance(m, nn.LayerNorm)][-1]
    norm.register_forward_hook(lambda _, __, out: pooled.append(out.flatten(1, -2).mean(1)))
    with torch.autocast("cpu", torch.bfloat16):
        found = view.logits(images)
    assert found.dtype == torch.float32
    assert torch.allclose(found, nn.functional.linear(pooled[0].float(), head.weight, head.bias), atol=1e-5)
    assert not torch.allclose(found, view.logits(images), atol=1e-5), "the blocks have fewer bits"


# Heads and channels

HEADS: dict[str, Callable[[int], nn.Module]] = {
    "another number of classes": lambda width: nn.Linear(width, 7),
    "one output": lambda width: nn.Linear(width, 1),
    "dropout": lambda width: nn.Sequential(nn.Dropout(0.5), nn.Linear(width, 7)),
    "mlp": lambda width: nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Dropout(0.5), nn.Linear(9, 4)),
    "weight norm": lambda width: nn.utils.parametrizations.weight_norm(nn.Linear(width, 7)),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", HIERARCHICAL)
@torch.no_grad()
def test_heads_of_other_kinds(name: str, head: str) -> None:
    module = swin(name)
    owner, place = head_place(module)
    replacement = HEADS[head](getattr(owner, place).in_features)
    families.randomize(replacement, seed=2)
    setattr(owner, place, replacement)
    view, images = wrapped(name, module.train()), batch(name, 2, torch.float32)
    found = view.logits(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert view.logits(images).dtype == torch.float32
    explanation = vitrail.explain(view, images[0], "grad_cam", target=1)
    assert torch.isfinite(torch.as_tensor(explanation.map)).all()
    assert torch.equal(found, own_logits(name, module, images))
    assert (view.num_outputs, view.num_classes) == (found.shape[1], max(2, found.shape[1]))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (nn.Identity(), "it has no classification head; build it with one"),
        (nn.Linear(33, 7), r"its forward pass fails on an image of 32×32 pixels \(.*33"),
        (nn.Sequential(nn.Linear(32, 1), nn.Flatten(0)), r"its output has shape \(1,\); expected one row"),
    ],
)
@pytest.mark.parametrize("name", HIERARCHICAL)
def test_heads_that_give_no_logits_are_refused_by_wrap(name: str, head: nn.Module, message: str) -> None:
    module = swin(name)
    setattr(*head_place(module), head)
    with pytest.raises(VitrailError, match=f"{type(module).__name__} cannot be explained: .*{message}"):
        wrapped(name, module)


TINY = {"img_size": 64, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_chans": 1}, "it takes 1 colour channels"),
        ({"in_chans": 4}, "it takes 4 colour channels"),
        ({"num_classes": 0}, "it has no classification head"),
        ({"global_pool": ""}, r"its output has shape \(1, 8, 8, 1000\)"),
    ],
)
@pytest.mark.parametrize("kind", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_networks_that_are_no_classifiers_of_colour_images(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VitrailError, match=message):
        vitrail.wrap(timm.create_model(kind, **TINY, **options))


def test_other_channels_of_the_other_libraries() -> None:
    import transformers

    config = transformers.SwinConfig(image_size=64, embed_dim=16, depths=[2], num_heads=[2], num_channels=4)
    with pytest.raises(VitrailError, match="it takes 4 colour channels"):
        vitrail.wrap(transformers.SwinForImageClassification(config))
    module = swin("torchvision_swin")
    module.features[0][0] = nn.Conv2d(1, 16, 4, 4)
    with pytest.raises(VitrailError, match="it takes 1 colour channels"):
        wrapped("torchvision_swin", module)


def test_a_size_that_the_network_does_not_take_is_refused_by_wrap() -> None:
    with pytest.raises(VitrailError, match="fails on an image of 96×96 pixels"):
        vitrail.wrap(swin(), img_size=96)
