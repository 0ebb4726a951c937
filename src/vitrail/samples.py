"""The pictures that come with the package."""

from __future__ import annotations

from importlib.resources import files

from PIL import Image

FOLDER = files("vitrail") / "data" / "samples"
SAMPLES = ("cat.jpg", "coffee.jpg", "rocket.jpg", "star-and-heart.png", "ring-and-hourglass.png")


def open_sample(file: str) -> Image.Image:
    """One of ``SAMPLES``, in RGB."""
    with Image.open(str(FOLDER / file)) as picture:
        return picture.convert("RGB")
