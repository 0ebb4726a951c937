"""Custom methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from tests.common import noise
from tests.helpers import viewed
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.models.view import View


def test_a_function_becomes_a_method(model: View, photo: Image.Image) -> None:
    @vitrail.method("brightness")
    def brightness(model: Any, images: Tensor, target: Tensor, power: float = 1.0) -> Tensor:
        """How bright each patch is."""
        return torch.nn.functional.adaptive_avg_pool2d(images.mean(1), model.grid) ** power

    info = vitrail.list_methods("bright*")["brightness"]
    assert (info.family, info.params, info.summary) == ("custom", {"power": 1.0}, "How bright each patch is.")
    explanations = vitrail.explain(model, [photo, noise(32, 32, 2)], "brightness", power=2)
    expected = brightness(model, model.preprocess(photo)[None], torch.tensor([0]), power=2)[0]
    torch.testing.assert_close(explanations[0].map, expected)
    assert explanations[0].params == {"power": 2}
    with pytest.raises(VitrailError, match=r"no parameter strength; it has: power=1\.0"):
        vitrail.explain(model, photo, "brightness", strength=2)
    with pytest.raises(VitrailError, match="against"):
        vitrail.explain(model, photo, "brightness", target=0, against=1)


def test_a_custom_gradient(model: View, photo: Image.Image) -> None:
    @vitrail.method("saliency", level="pixel")
    def saliency(model: Any, images: Tensor, target: Tensor) -> Tensor:
        images = images.clone().requires_grad_()
        score = model.logits(images).gather(1, target[:, None]).sum()
        return torch.autograd.grad(score, images)[0].abs().sum(1)

    ex = vitrail.explain(model, photo, "saliency", target="dog")
    assert ex.map.shape == (32, 32)
    assert float(ex.map.max()) > 0
    assert ex.heatmap().shape == (40, 64)


def test_protocols_are_the_values_of_the_parameter() -> None:
    @dataclass(kw_only=True)
    class Chosen(vitrail.Method):
        protocol: Literal["default", "authors"] = "default"

    assert vitrail.method("chosen")(Chosen).info.protocols == ("default", "authors")
    assert vitrail.method("chosen", protocols=("default",))(Chosen).info.protocols == ("default",)


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

    ex = vitrail.explain(model, photo, "corner", value=3)
    assert ex.map.tolist() == [[3, 0], [0, 0]]
    assert ex.extras == {"sum": 3}
    assert "corner" in vitrail.list_methods()
    assert Corner(model).attribute(torch.zeros(2, 3, 32, 32)).shape == (2, 2, 2)


@pytest.mark.parametrize("shape", [(16,), (2, 4, 4), (1, 4), (1, 1, 4, 4)])
def test_maps_of_the_wrong_shape_are_refused(shape: tuple[int, ...], model: View, photo: Image.Image) -> None:
    vitrail.method("wrong_shape")(lambda model, images, target: torch.zeros(shape))
    with pytest.raises(VitrailError, match=r"wrong_shape gave maps of shape"):
        vitrail.explain(model, photo, "wrong_shape")


def test_token_maps_are_on_the_grid(model: View, photo: Image.Image) -> None:
    vitrail.method("off_grid")(lambda model, images, target: torch.zeros(len(images), 3, 5))
    with pytest.raises(
        VitrailError, match=r"shape \(1, 3, 5\) for a batch of 1: expected \(1, 4, 4\), one value per patch"
    ):
        vitrail.explain(model, photo, "off_grid")
    with pytest.raises(VitrailError, match="one value per patch"):
        vitrail.evaluate(model, [photo], "off_grid", "sparseness")


@pytest.mark.parametrize(
    ("returned", "kind"), [(None, "NoneType"), (np.zeros((1, 4, 4)), "ndarray"), ([[1.0]], "list")]
)
def test_what_is_no_tensor_is_no_map(returned: Any, kind: str, model: View, photo: Image.Image) -> None:
    vitrail.method("no_tensor")(lambda model, images, target: returned)
    with pytest.raises(VitrailError, match=f"no_tensor returned {kind}: expected maps as a torch tensor"):
        vitrail.explain(model, photo, "no_tensor")

    @vitrail.method("bare")
    class Bare(vitrail.Method):
        def run(self, images: Tensor, target: Tensor, against: Tensor | None) -> Any:
            return returned

    with pytest.raises(VitrailError, match=f"bare returned {kind}.* in an Attribution"):
        vitrail.explain(model, photo, "bare")


def test_a_method_without_a_name_is_refused_at_once() -> None:
    with pytest.raises(VitrailError, match="with parentheses"):

        @vitrail.method  # type: ignore[arg-type]
        def unnamed(model: Any, images: Tensor, target: Tensor) -> Tensor:
            return images


@pytest.mark.parametrize("name", ["decompx", "Mine", "a.b", "a b", ""])
def test_names_that_a_method_cannot_have(name: str) -> None:
    with pytest.raises(VitrailError):
        vitrail.method(name)(lambda model, images, target: images)


def test_a_function_may_take_against(model: View, photo: Image.Image) -> None:
    @vitrail.method("contrast")
    def contrast(model: Any, images: Tensor, target: Tensor, against: Tensor | None = None) -> Tensor:
        return torch.full((len(images), *model.grid), -1.0 if against is None else float(against[0]))

    assert vitrail.list_methods()["contrast"].params == {}
    assert vitrail.explain(model, photo, "contrast", target=0, against=3).map.unique().tolist() == [3]
    assert vitrail.explain(model, photo, "contrast").map.unique().tolist() == [-1]


def test_the_refusal_of_an_own_method_has_its_own_reason(photo: Image.Image) -> None:
    swin = viewed("timm_swin", torch.float32)[2]
    vitrail.method("by_function")(lambda model, images, target: images.mean(1))

    @vitrail.method("by_class")
    class ByClass(vitrail.Method):
        """Registered for tokens, as by default."""

    for name in ("by_function", "by_class"):
        with pytest.raises(VitrailError, match=rf'{name} cannot explain .* register it with needs="logits"'):
            vitrail.explain(swin, photo, name)
    with pytest.raises(VitrailError, match=r"by_class\.plus does not exist: it has no scores of layers"):
        vitrail.explain(swin, photo, "by_class.plus")
