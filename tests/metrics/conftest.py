"""Methods that only these tests know."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitrail.methods import registry
from vitrail.models.view import View


@pytest.fixture
def constant_method() -> str:
    """The name of a method that gives ``level`` everywhere and looks at nothing."""
    name = "tests_constant"

    @registry.method(name, class_specific=False, needs="logits")
    def constant(model: View, images: Tensor, target: Tensor, level: float = 1.0) -> Tensor:
        return torch.full((len(images), 4, 4), level, dtype=images.dtype)

    return name


@pytest.fixture
def picture_method() -> str:
    """The name of a method that shows the picture itself, whatever the model is."""
    name = "tests_picture"

    @registry.method(name, class_specific=False, needs="logits", level="pixel")
    def picture(model: View, images: Tensor, target: Tensor) -> Tensor:
        return images.mean(1)

    return name
