"""The controls of an explanation redraw its picture as their values say."""

from __future__ import annotations

import base64
import builtins
from typing import Any

import pytest
import torch
from PIL import Image

import vitrail
from vitrail import Explanation, VitrailError
from vitrail.models.view import View
from vitrail.show.figure import png_bytes
from vitrail.show.widget import Choice, only_strongest


@pytest.fixture
def ex(model: View, photo: Image.Image) -> Explanation:
    return vitrail.explain(model, photo)


def test_the_strongest_values_stay() -> None:
    values = torch.tensor([[3.0, -4.0], [1.0, 2.0]])
    assert only_strongest(values, 0.5, 0.0).tolist() == [[3.0, 0.0], [0.0, 2.0]]
    assert only_strongest(values, 0.01, -9.0).tolist() == [[3.0, -9.0], [-9.0, -9.0]]
    assert torch.equal(only_strongest(values, 1.0, 0.0), values)


def test_without_ipywidgets_the_error_says_what_to_install(ex: Explanation, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "ipywidgets":
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(VitrailError, match=r"needs ipywidgets.*pip install 'vitrail\[notebook\]'"):
        ex.widget()


@pytest.mark.full
def test_controls_redraw_the_picture(ex: Explanation, model: View, photo: Image.Image) -> None:
    pytest.importorskip("ipywidgets")
    controls = ex.widget()
    assert controls.choice == Choice(ex.target, 0.85, 1.0, True)
    assert controls.picture.value == ex._repr_png_()

    controls.alpha.value = 0.5
    assert controls.picture.value == png_bytes(ex.picture(alpha=0.5))

    second = ex.top[1][0]
    controls.target.value = second
    asked = vitrail.explain(model, photo, target=second)
    assert controls.picture.value == png_bytes(asked.picture(alpha=0.5))

    controls.signed.value = False
    absolute = controls.picture.value
    controls.signed.value = True
    controls.share.value = 0.25
    reduced = controls.picture.value
    assert len({absolute, reduced, png_bytes(asked.picture(alpha=0.5))}) == 3

    controls.share.value = 1.0
    controls.target.value = ex.target
    controls.alpha.value = 0.85
    assert controls.picture.value == ex._repr_png_()


@pytest.mark.full
def test_another_class_is_explained_as_if_it_had_been_asked_for(model: View, photo: Image.Image) -> None:
    ex = vitrail.explain(model, photo, "posterior", masks=8)
    other = ex.top[2][0]
    asked, chosen = vitrail.explain(model, photo, "posterior", other, masks=8), ex._about(other)
    assert torch.equal(chosen.map, asked.map)
    assert chosen.error is not None
    assert torch.equal(chosen.error, asked.error)
    assert (chosen.title, chosen.params) == (asked.title, asked.params)
    assert chosen.extras == {name: asked.extras[name] for name in chosen.extras}


@pytest.mark.full
def test_reduced_maps_keep_their_largest_values(ex: Explanation) -> None:
    reduced = ex._reduced(0.25, True)
    kept = reduced.shares != 0
    assert int(kept.sum()) == 4
    assert torch.equal(reduced.shares[kept], ex.shares[kept])
    assert float(ex.shares[~kept].max()) <= float(ex.shares[kept].min())
    absolute = ex._reduced(1.0, False)
    assert torch.equal(absolute.shares, ex.shares.abs())
    assert absolute.signed is False
    assert ex.map is not absolute.map


@pytest.mark.full
def test_a_rival_is_no_choice_and_an_explanation_without_its_model_has_no_other(
    ex: Explanation, model: View, photo: Image.Image
) -> None:
    pytest.importorskip("ipywidgets")
    contrast = vitrail.explain(model, photo, target=ex.top[0][0], against=ex.top[1][0])
    offered = [index for _, index in contrast.widget().target.options]
    assert offered == [index for index, *_ in ex.top if index != ex.top[1][0]]
    contrast.model = None
    assert [index for _, index in contrast.widget().target.options] == [contrast.target]


@pytest.mark.full
def test_a_notebook_without_a_kernel_has_the_picture(ex: Explanation) -> None:
    pytest.importorskip("ipywidgets")
    bundle = ex.widget()._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == ex._repr_png_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
