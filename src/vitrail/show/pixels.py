"""Drawing on pixels: fading an image, blending colours over it, outlines, hatching. Arrays are (…, 3) in 0…255."""

from typing import Any, TypeAlias

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
    white = LIGHTENING * amount
    muted = (1 - white) * (photo + amount * (grey(photo)[..., None] - photo))
    return np.asarray(muted + white * 255, dtype=np.float32)


def grey(photo: Array) -> Array:
    """The luminance of each pixel."""
    red, green, blue = _LUMINANCE  # no product of matrices: its library has threads of its own
    return np.asarray(photo[..., 0] * red + photo[..., 1] * green + photo[..., 2] * blue)


def blended(
    photo: Array, positions: Array, scale: Scale, palette: Array, alpha: float, weights: Array | None = None
) -> Array:
    """The colours of a map over an image: the stronger the evidence, the more opaque; ``weights`` fade it in places."""
    strengths = scale.strengths(positions) ** 0.8
    opacity = alpha * (strengths if weights is None else strengths * weights)
    places, drawing = scale.places(positions, palette), np.empty_like(photo)
    # channel by channel, each as ``faded``: NumPy is slow where the innermost axis has three elements
    white = LIGHTENING * alpha
    shade = (1 - white) * alpha * grey(photo) + white * 255
    for channel in range(3):
        faint = photo[..., channel] * ((1 - white) * (1 - alpha)) + shade
        colour = palette[:, channel].take(places, mode="clip")
        colour -= faint
        colour *= opacity
        np.add(colour, faint, out=drawing[..., channel])
    return drawing


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


def hatched(drawing: Array, photo: Array, unseen: Mask, top: int = 0) -> Array:
    """A drawing over which pixels that the model did not see are pale grey and hatched; ``top``: their first row."""
    if not unseen.any():
        return drawing
    rows, columns = unseen.nonzero()
    stripes = np.clip(1.5 - np.abs((rows + columns + top) % 10 - 5), 0, 1)
    drawing[rows, columns] = (0.3 * grey(photo[rows, columns]) + 0.7 * 215 - 32 * stripes)[:, None]
    return drawing


def as_bytes(pixels: Array) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.rint(pixels).clip(0, 255).astype(np.uint8)


def as_image(pixels: Array) -> Image.Image:
    return Image.fromarray(as_bytes(pixels))
