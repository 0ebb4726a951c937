"""Methods inside captum."""

from __future__ import annotations

import pytest
import torch
from tests import families
from torch import Tensor

import vitrail
from vitrail.methods import registry
from vitrail.models.view import View


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


METHODS: dict[str, dict[str, int]] = {"gen_att": {}, "grad_cam": {}, "tis": {}, "rise": {"masks": 8}}


@pytest.mark.parametrize("shape", ["map", "input"])
@pytest.mark.parametrize("name", METHODS)
def test_captum_takes_methods_of_every_kind_and_a_class_for_each_image(name: str, shape: str) -> None:
    from captum.attr import NoiseTunnel
    from captum.metrics import sensitivity_max

    view, images = vitrail.wrap(families.build("timm_vit")), families.images("timm_vit", 2)
    method = registry.build_method(name, view, shape=shape, **METHODS[name])
    classes = torch.tensor([1, 3])
    maps, moved = (method.attribute(pixels, target=classes) for pixels in (images, images + 0.1))
    assert not torch.allclose(maps[0], method.attribute(images, target=classes.flip(0))[0])
    for kind, expected in (("smoothgrad", maps), ("smoothgrad_sq", maps**2), ("vargrad", torch.zeros_like(maps))):
        tunnel = NoiseTunnel(method).attribute(
            images, nt_type=kind, nt_samples=3, nt_samples_batch_size=2, stdevs=0.0, target=classes
        )
        torch.testing.assert_close(tunnel, expected, rtol=1e-3, atol=1e-5)
    torch.manual_seed(0)
    noisy = NoiseTunnel(method).attribute(images, nt_samples=2, stdevs=0.3, target=classes)
    assert noisy.shape == maps.shape
    assert not torch.allclose(noisy, maps, rtol=1e-2)
    change = sensitivity_max(
        method.attribute, images, perturb_func=lambda pixels: pixels + 0.1, n_perturb_samples=1, target=classes
    )
    norms = [values.flatten(1).norm(dim=1) for values in (moved - maps, maps)]
    torch.testing.assert_close(change, norms[0] / norms[1], rtol=1e-3, atol=1e-5)


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
    ex = infidelity(method.forward_func, remove_all, images, spread, target=1)
    drop = view.logits(images)[:, 1] - view.logits(torch.zeros_like(images))[:, 1]
    torch.testing.assert_close(ex, (spread.sum((1, 2, 3)) - drop) ** 2, rtol=1e-3, atol=1e-5)
