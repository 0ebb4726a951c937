"""Colours are seen: with every common colour blindness, in print without colour, and on every photograph."""

import numpy as np
import pytest
import torch
from PIL import Image
from skimage.color import rgb2lab

from vitrail.show.colours import Scale
from vitrail.show.figure import overlay

SIDE = 384

# Machado, Oliveira and Fernandes (2009), severity 1: what reaches the eye, in linear RGB.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def plain(*colour: int) -> Image.Image:
    return Image.new("RGB", (SIDE, SIDE), colour)


def busy() -> Image.Image:
    """Stripes and squares in every colour, as a crowd or a market has them."""
    colours = np.random.default_rng(0).integers(0, 256, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
    return Image.fromarray(colours.repeat(8, 0).repeat(8, 1))


PHOTOS = {"dark": plain(12, 12, 16), "red": plain(178, 24, 36), "white": plain(252, 252, 252), "busy": busy()}


def seen(picture: Image.Image, vision: str) -> np.ndarray:
    """The picture in CIELAB, as somebody with this vision sees it."""
    values = np.asarray(picture, dtype=np.float64) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    simulated = (linear @ np.array(VISION[vision]).T).clip(0, 1)
    encoded = np.where(simulated <= 0.0031308, simulated * 12.92, 1.055 * simulated ** (1 / 2.4) - 0.055)
    return np.asarray(rgb2lab(encoded))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("photo", PHOTOS)
def test_for_against_and_nothing_are_told_apart(photo: str, vision: str) -> None:
    values = torch.tensor([-1.0, 0.0, 1.0]).repeat_interleave(SIDE // 3).expand(SIDE, -1)
    lab = seen(overlay(PHOTOS[photo], values), vision)
    against, nothing, favour = (lab[:, i * SIDE // 3 : (i + 1) * SIDE // 3].mean((0, 1)) for i in range(3))
    for left, right in ((against, nothing), (nothing, favour), (against, favour)):
        assert np.linalg.norm(left - right) > 25
    chroma = np.linalg.norm(nothing[1:])
    assert chroma < 12, "where there is no evidence, the photograph has nearly no colour of its own"


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("photo", PHOTOS)
@pytest.mark.parametrize("end", [-1.0, 1.0, 2.0])
def test_strength_is_read_from_lightness_alone(photo: str, vision: str, end: float) -> None:
    values = torch.linspace(0, end, SIDE).expand(SIDE, -1)
    lightness = seen(overlay(PHOTOS[photo], values, signed=end < 2), vision)[..., 0]
    steps = lightness.mean(0).reshape(8, -1).mean(1)
    assert (np.diff(steps) < -1.5).all(), "the stronger, the darker, whatever the photograph"
    assert steps[0] - steps[-1] > 20


def test_colormaps_of_matplotlib() -> None:
    positions = np.array([0.0, 0.5, 1.0], dtype=np.float32)
    scale = Scale(0.0, 1.0, False)
    greys = scale.colours(positions, "Greys")
    assert (np.ptp(greys, axis=1) < 1).all()
    assert greys[0, 0] > greys[1, 0] > greys[2, 0] == 0
    assert scale.colours(positions).tolist() == scale.colours(positions, "viridis_r").tolist()
