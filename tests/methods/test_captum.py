"""Methods inside captum."""

from __future__ import annotations

import pytest
import torch
from tests import families
from torch import Tensor, nn

import vitrail
from vitrail.methods import registry
from vitrail.models.view import View


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
    ex = infidelity(Logits(view), remove_all, images, spread, target=1)
    drop = view.logits(images)[:, 1] - view.logits(torch.zeros_like(images))[:, 1]
    torch.testing.assert_close(ex, (spread.sum((1, 2, 3)) - drop) ** 2, rtol=1e-3, atol=1e-5)
