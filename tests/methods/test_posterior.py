"""posterior against its literal oracle, and what it promises."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.common import noise
from tests.helpers import DOUBLE, batch, relative, viewed
from tests.oracles import posterior as oracle
from torch import Tensor

import vitrail
from vitrail import VitrailError
from vitrail.engine.requests import Subsets
from vitrail.methods.base import Attribution
from vitrail.methods.posterior import Additive, certainty, standardised, trend_basis
from vitrail.methods.registry import build_method
from vitrail.models.view import View

TARGET = 3


def explained(name: str, against: int | None = None, images: int = 1, **params: Any) -> Attribution:
    return build_method("posterior", viewed(name)[2], **params).explain(batch(name, images), TARGET, against=against)


def random_model(patches: int = 36, smoothing: float = 0.0) -> Additive:
    """Random features and a random prior map."""
    generator = torch.Generator().manual_seed(0)
    prior, features = (torch.randn(shape, generator=generator, dtype=DOUBLE) for shape in ((patches,), (patches, 8)))
    side = math.isqrt(patches)
    return Additive(prior, features, (side, patches // side), smoothing)


@pytest.fixture
def subsets(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the method draws, (M, N) each."""
    drawn: list[Tensor] = []
    draw = Additive.draw

    def spy(self: Additive, count: int, seed: int) -> Tensor:
        drawn.append(draw(self, count, seed))
        return drawn[-1]

    monkeypatch.setattr(Additive, "draw", spy)
    return drawn


@pytest.mark.parametrize(
    ("name", "params", "against"),
    [
        ("timm_vit", {}, None),
        ("timm_vit", {"scale": "probability", "smoothing": 0.0, "seed": 1}, None),
        ("timm_vit", {"smoothing": 0.0}, 1),
        ("timm_vit_avg", {"smoothing": 0.0}, None),
        ("timm_vit_avg", {"scale": "probability"}, None),
        ("timm_vit_not_square", {"masks": 25}, None),
        ("timm_siglip", {}, None),
    ],
)
def test_posterior_is_its_literal_definition(
    name: str, params: dict[str, Any], against: int | None, subsets: list[Tensor]
) -> None:
    family, module, _ = viewed(name)
    result = explained(name, against, **{"masks": 40, **params})
    how = {key: value for key, value in params.items() if key in ("scale", "smoothing")}
    expected = oracle.posterior(family, module, batch(name, 1), subsets[0], TARGET, against, **how)
    assert relative(result.map[0], expected.map) < 1e-6
    assert relative(result.error[0], expected.error) < 1e-6
    assert float(result.extras["r2"][0]) == pytest.approx(float(expected.r2), rel=1e-6, abs=1e-9)
