"""A model and a photo for the tests of ``explain``."""

from __future__ import annotations

import pytest
from PIL import Image
from tests import families
from tests.explaining.given import LABELS, noise

import vitrail
from vitrail.models.view import View


@pytest.fixture(scope="module")
def model() -> View:
    return vitrail.wrap(families.build("timm_vit"), labels=LABELS)


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    """A wide picture: the crop of the preprocessing does not see its sides."""
    return noise(64, 40, 0)
