"""Drawing on pixels: fading an image, blending colours over it, outlines, hatching. Arrays are (…, 3) in 0…255."""

from typing import TypeAlias

import numpy as np
from PIL import Image

from vitrail.show.colours import Array, Scale
from vitrail.show.look import Look

LIGHTENING = 0.75
"""How much of an image turns white below an opaque map; ``app/page/colours.js`` has the same number."""

Mask: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_LUMINANCE = np.array([0.2126, 0.7152, 0.0722], dtype=np.float32)  # as the CSS filter grayscale() has it


def faded(photo: Array, amount: float) -> Array:
    """A grey and light copy, on which the colours of a map are seen; ``amount`` 0 is the image itself."""
    grey = (photo @ _LUMINANCE)[..., None]
    muted = photo + amount * (grey - photo)
    return np.asarray(muted + LIGHTENING * amount * (255 - muted), dtype=np.float32)


def blended(photo: Array, positions: Array, scale: Scale, look: Look, weights: Array | None = None) -> Array:
    """The colours of a map over an image: the stronger the evidence, the more opaque; ``weights`` fade it in places."""
    strengths = scale.strengths(positions) ** 0.8
    opacity = (look.alpha * (strengths if weights is None else strengths * weights))[..., None]
    return faded(photo, look.alpha) * (1 - opacity) + scale.colours(positions, look.colormap) * opacity


def strongest(evidence: Array, share: float = 0.5) -> Mask:
    """The smallest area with half of the evidence, or another share; a non-negative number per pixel."""
    descending = np.sort(evidence, axis=None)[::-1]
    sums = np.cumsum(descending, dtype=np.float64)
    if not sums[-1] > 0:
        return np.zeros(evidence.shape, dtype=bool)
    return np.asarray(evidence >= descending[np.searchsorted(sums, share * sums[-1])])


def outlined(photo: Array, evidence: Array, scale: Scale, look: Look) -> Array:
    """The image, faded but for the strongest evidence, which has a line in its colour within a white one."""
    from scipy.ndimage import maximum_filter, minimum_filter

    inside = strongest(evidence)
    width = max(2, min(inside.shape) // 120)
    wider = maximum_filter(inside, 2 * width + 1, mode="constant", cval=False)
    narrower = minimum_filter(inside, 2 * width + 1, mode="constant", cval=True)
    colour = scale.colours(np.ones(1, dtype=np.float32), look.colormap)
    drawing = np.where(inside[..., None], photo, faded(photo, look.alpha))
    drawing[wider & ~inside] = 255
    drawing[inside & ~narrower] = colour
    return drawing


def hatched(photo: Array) -> Array:
    """The appearance of pixels that the model did not see: pale grey and hatched."""
    grey = photo @ _LUMINANCE
    height, width = grey.shape
    diagonals = np.add.outer(np.arange(height), np.arange(width)) % 10
    stripes = np.clip(1.5 - np.abs(diagonals - 5), 0, 1)
    muted = 0.3 * grey + 0.7 * 215
    return np.asarray(muted - 32 * stripes, dtype=np.float32)[..., None].repeat(3, axis=-1)


def as_image(pixels: Array) -> Image.Image:
    return Image.fromarray(np.rint(pixels).clip(0, 255).astype(np.uint8))
