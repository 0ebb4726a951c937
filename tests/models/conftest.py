"""A tiny model, and no network."""

from __future__ import annotations

import pytest
import timm
from tests import families
from tests.models.tiny import NAME, TINY
from torch import Tensor, nn


@pytest.fixture(scope="module")
def module() -> nn.Module:
    """A tiny timm model with seven classes."""
    made = timm.create_model(NAME, num_classes=7, **TINY)
    families.randomize(made, seed=3)
    return made.eval()


@pytest.fixture(scope="module")
def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
