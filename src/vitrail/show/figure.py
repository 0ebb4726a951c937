"""Pictures of explanations: overlays, captions and sheets, drawn with Pillow."""

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.show.colours import Array, Scale
from vitrail.show.heatmap import resize_map
from vitrail.show.text import fit_text, font

SHORT_SIDE, LONG_SIDE, THUMBNAIL = 384, 1600, 320
"""The smallest short side and the largest long side of a picture, and the long side of a thumbnail, in pixels."""

_PAPER, _INK, _GREY = "#ffffff", "#1c1c1e", "#636366"
_GAP = 16
_SHEET_PIXELS = 60_000_000


def overlay(
    image: Image.Image,
    values: Tensor,
    signed: bool | None = None,
    alpha: float = 0.85,
    size: tuple[int, int] | None = None,
) -> Image.Image:
    """Overlays a map on an image: the stronger the evidence, the more opaque its colour.

    Args:
        values: the map, (H, W) of the image, not rescaled; NaN = not seen by the model, drawn grey and hatched.
        signed: whether the colours diverge from zero; None = if any value is negative.
        alpha: opacity of the strongest evidence.
        size: (width, height) of the result; None = ``display_size`` of the image.
    """
    if tuple(values.shape) != (image.height, image.width):
        raise VitrailError(
            f"the map of an image of {image.width} × {image.height} pixels must have shape ({image.height}, "
            f"{image.width}), but got {tuple(values.shape)}."
        )
    if not 0 <= alpha <= 1:
        raise VitrailError(f"alpha must be between 0 (only the image) and 1, but got {alpha}.")
    size = size or display_size(image.size)
    photo = np.asarray(_resized(image.convert("RGB"), size), dtype=np.float32)
    resized = resize_map(values, size)
    scale = Scale.of(values, signed)
    unseen = np.isnan(resized)
    positions = scale.positions(np.where(unseen, scale.low, resized))
    opacity = (alpha * _opacity(scale.strengths(positions)))[..., None]
    blended = photo * (1 - opacity) + scale.colours(positions) * opacity
    if unseen.any():
        blended = np.where(unseen[..., None], _not_seen(photo), blended)
    return Image.fromarray(np.rint(blended).clip(0, 255).astype(np.uint8))


def display_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """The (width, height) at which an image is shown: small ones are enlarged, large ones reduced."""
    width, height = image_size
    factor = max(1.0, SHORT_SIDE / min(width, height))
    factor = min(factor, LONG_SIDE / max(width, height))
    return max(1, round(width * factor)), max(1, round(height * factor))


def labelled(image: Image.Image, title: str, subtitle: str = "", scale: Scale | None = None) -> Image.Image:
    """Adds a caption below a picture: title, subtitle and colour scale."""
    width = max(image.width, SHORT_SIDE)
    unit = max(16, min(28, width // 28))
    room = width - 2 * _GAP
    heading = fit_text(title, room, round(unit * 1.25), bold=True, lines=2)
    detail = fit_text(subtitle, room, unit, lines=3)
    legend = _legend(scale, room, unit) if scale else None
    blocks = [block.height for block in (heading, detail) if block.lines] + ([legend.height] if legend else [])
    strip = sum(blocks) + unit // 2 * (len(blocks) - 1) + 2 * _GAP if blocks else 0
    page = Image.new("RGB", (width, image.height + strip), _PAPER)
    page.paste(image.convert("RGB"), ((width - image.width) // 2, 0))
    draw, top = ImageDraw.Draw(page), image.height + _GAP
    for block, colour in ((heading, _INK), (detail, _GREY)):
        if block.lines:
            block.draw(draw, _GAP, top, colour)
            top += block.height + unit // 2
    if legend:
        page.paste(legend, (_GAP, top))
    return page


def side_by_side(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Arranges pictures in rows, aligned at the top; all in one row unless ``columns`` is set."""
    if not images:
        raise VitrailError("no pictures to arrange: expected at least one.")
    columns = _checked_columns(columns or len(images), len(images))
    rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    widths = [max(image.width for image in images[column::columns]) for column in range(columns)]
    heights = [max(image.height for image in row) for row in rows]
    page = Image.new("RGB", (sum(widths) + _GAP * (columns + 1), sum(heights) + _GAP * (len(rows) + 1)), _PAPER)
    top = _GAP
    for row, height in zip(rows, heights, strict=True):
        left = _GAP
        for image, width in zip(row, widths, strict=False):
            page.paste(image.convert("RGB"), (left + (width - image.width) // 2, top))
            left += width + _GAP
        top += height + _GAP
    return page


def contact_sheet(pictures: Sequence[tuple[Image.Image, str]], columns: int | None = None) -> Image.Image:
    """Arranges captioned pictures on one page; the more pictures, the smaller each."""
    if not pictures:
        raise VitrailError("no pictures for a contact sheet: expected at least one.")
    edge = max(96, min(THUMBNAIL, math.isqrt(_SHEET_PIXELS // len(pictures))))
    columns = _checked_columns(columns or min(8, math.ceil(math.sqrt(len(pictures)))), len(pictures))
    return side_by_side([_cell(image, caption, edge) for image, caption in pictures], columns)


def thumbnail(image: Image.Image, edge: int = THUMBNAIL) -> Image.Image:
    """An RGB copy whose longer side is ``edge``."""
    factor = edge / max(image.size)
    return _resized(image.convert("RGB"), (max(1, round(image.width * factor)), max(1, round(image.height * factor))))


def png_bytes(image: Image.Image) -> bytes:
    """The image as the content of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _cell(image: Image.Image, caption: str, edge: int) -> Image.Image:
    """A thumbnail with its caption, both centred."""
    small = thumbnail(image, edge)
    text = fit_text(caption, edge, max(11, edge // 20), smallest=10, lines=2)
    cell = Image.new("RGB", (edge, small.height + text.height + _GAP), _PAPER)
    cell.paste(small, ((edge - small.width) // 2, 0))
    text.draw(ImageDraw.Draw(cell), 0, small.height + _GAP // 2, _INK, centred_in=edge)
    return cell


def _legend(scale: Scale, width: int, unit: int) -> Image.Image:
    """The colour bar with labelled ends, and the hatching of pixels that were not seen."""
    size = max(11, round(unit * 0.8))
    face = font(size)
    names = ("against", "for") if scale.signed else ("less", "more")
    plus = "+" if scale.signed else ""
    low, high = f"{names[0]} {_number(scale.low)}", f"{plus}{_number(scale.high)} {names[1]}"
    strip = Image.new("RGB", (width, round(size * 1.5)), _PAPER)
    draw, middle = ImageDraw.Draw(strip), strip.height // 2
    unseen_width = round(face.getlength("not seen")) + 3 * size if scale.partial else 0
    bar = min(240, width - unseen_width - round(face.getlength(low + high)) - 2 * size)
    left = 0
    draw.text((left, middle), low, fill=_GREY, font=face, anchor="lm")
    left += round(face.getlength(low)) + size // 2
    if bar > 0:
        strip.paste(_colour_bar(scale, bar, size), (left, middle - size // 2))
        left += bar + size // 2
    draw.text((left, middle), high, fill=_GREY, font=face, anchor="lm")
    if scale.partial:
        swatch = _not_seen(np.full((size, 2 * size, 3), 150, dtype=np.float32))
        strip.paste(Image.fromarray(swatch.astype(np.uint8)), (width - 2 * size, middle - size // 2))
        draw.text((width - 2 * size - size // 2, middle), "not seen", fill=_GREY, font=face, anchor="rm")
    return strip


def _colour_bar(scale: Scale, width: int, height: int) -> Image.Image:
    positions = np.linspace(0, 1, width, dtype=np.float32)
    opacity = _opacity(scale.strengths(positions))[:, None]
    # As opaque as on the image, over a mid grey.
    row = 215 * (1 - opacity) + scale.colours(positions) * opacity
    return Image.fromarray(np.rint(np.broadcast_to(row, (height, width, 3))).astype(np.uint8))


def _number(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")


def _opacity(strengths: Array) -> Array:
    """Opacity by strength: weak evidence fades out, strong evidence stands out."""
    return np.asarray(strengths**0.8, dtype=np.float32)


def _not_seen(photo: Array) -> Array:
    """The appearance of pixels that the model did not see: pale grey and hatched."""
    grey = photo @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    height, width = grey.shape
    diagonals = np.add.outer(np.arange(height), np.arange(width)) % 10
    stripes = np.clip(1.5 - np.abs(diagonals - 5), 0, 1)
    muted = 0.4 * grey + 0.6 * 200
    return np.asarray(muted - 28 * stripes, dtype=np.float32)[..., None].repeat(3, axis=-1)


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def _checked_columns(columns: int, pictures: int) -> int:
    if columns < 1:
        raise VitrailError(f"columns must be at least 1, but got {columns}.")
    return min(columns, pictures)
