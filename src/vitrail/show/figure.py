"""Pictures of explanations: overlays, captions and sheets, drawn with Pillow alone."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional

from vitrail.errors import VitrailError
from vitrail.show.colours import Array, Scale
from vitrail.show.text import fit_text, font

SHORT_SIDE, LONG_SIDE, THUMBNAIL = 384, 1600, 320
"""Pictures are shown with at least this short side and at most this long side; sheets use thumbnails."""

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
    """Lay a map over a photo: the stronger the evidence, the stronger its colour.

    Args:
        values: (H, W) of the image, raw; NaN marks pixels the model did not see, drawn grey and hatched.
        signed: Whether zero is the neutral middle; None = if any value is negative.
        alpha: Opacity of the strongest evidence.
        size: (width, height) of the result; None = `display_size` of the image.
    """
    if tuple(values.shape) != (image.height, image.width):
        raise VitrailError(
            f"A map of shape {tuple(values.shape)} was given for an image of {image.width} × {image.height} pixels, "
            f"expected ({image.height}, {image.width})."
        )
    if not 0 <= alpha <= 1:
        raise VitrailError(f"alpha = {alpha} was given, expected 0 (only the photo) to 1.")
    size = size or display_size(image.size)
    photo = np.asarray(_resized(image.convert("RGB"), size), dtype=np.float32)
    shown = _resized_map(values, size)
    scale = Scale.of(values, signed)
    unseen = np.isnan(shown)
    positions = scale.positions(np.where(unseen, scale.low, shown))
    opacity = (alpha * _opacity(scale.strengths(positions)))[..., None]
    blended = photo * (1 - opacity) + scale.colours(positions) * opacity
    if unseen.any():
        blended = np.where(unseen[..., None], _not_seen(photo), blended)
    return Image.fromarray(np.rint(blended).clip(0, 255).astype(np.uint8))


def display_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """Return the (width, height) at which an image is shown: small ones enlarged, huge ones reduced."""
    width, height = image_size
    factor = max(1.0, SHORT_SIDE / min(width, height))
    factor = min(factor, LONG_SIDE / max(width, height))
    return max(1, round(width * factor)), max(1, round(height * factor))


def labelled(image: Image.Image, title: str, subtitle: str = "", scale: Scale | None = None) -> Image.Image:
    """Put a caption under a picture: a title, a line of detail and what the colours mean."""
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
    """Arrange pictures in rows, aligned at their tops; all in one row unless `columns` is given."""
    if not images:
        raise VitrailError("No picture was given, expected at least one to arrange.")
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
    """Show many pictures with captions on one page; the more pictures, the smaller each."""
    if not pictures:
        raise VitrailError("No picture was given, expected at least one for a contact sheet.")
    edge = max(96, min(THUMBNAIL, math.isqrt(_SHEET_PIXELS // len(pictures))))
    columns = _checked_columns(columns or min(8, math.ceil(math.sqrt(len(pictures)))), len(pictures))
    return side_by_side([_cell(image, caption, edge) for image, caption in pictures], columns)


def thumbnail(image: Image.Image, edge: int = THUMBNAIL) -> Image.Image:
    """Return an RGB copy scaled so that its longer side is `edge`."""
    factor = edge / max(image.size)
    return _resized(image.convert("RGB"), (max(1, round(image.width * factor)), max(1, round(image.height * factor))))


def _cell(image: Image.Image, caption: str, edge: int) -> Image.Image:
    """Put a caption under a thumbnail, both centred in a cell of one width."""
    small = thumbnail(image, edge)
    text = fit_text(caption, edge, max(11, edge // 20), smallest=10, lines=2)
    cell = Image.new("RGB", (edge, small.height + text.height + _GAP), _PAPER)
    cell.paste(small, ((edge - small.width) // 2, 0))
    text.draw(ImageDraw.Draw(cell), 0, small.height + _GAP // 2, _INK, centred_in=edge)
    return cell


def _legend(scale: Scale, width: int, unit: int) -> Image.Image:
    """Draw the colour bar with its ends named, and the sign for pixels that were not seen."""
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
    # The same fade as on the photo, over a mid grey in the photo's place.
    row = 215 * (1 - opacity) + scale.colours(positions) * opacity
    return Image.fromarray(np.rint(np.broadcast_to(row, (height, width, 3))).astype(np.uint8))


def _number(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")


def _opacity(strengths: Array) -> Array:
    """Let weak evidence fade out gently and strong evidence stand out."""
    return np.asarray(strengths**0.8, dtype=np.float32)


def _not_seen(photo: Array) -> Array:
    """Paint pixels the model did not look at: grey, pale and hatched."""
    grey = photo @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    height, width = grey.shape
    diagonals = np.add.outer(np.arange(height), np.arange(width)) % 10
    stripes = np.clip(1.5 - np.abs(diagonals - 5), 0, 1)
    muted = 0.4 * grey + 0.6 * 200
    return np.asarray(muted - 28 * stripes, dtype=np.float32)[..., None].repeat(3, axis=-1)


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)


def _resized_map(values: Tensor, size: tuple[int, int]) -> Array:
    """Resize a map with holes: unseen pixels neither bleed into seen ones nor vanish."""
    raw = values.detach().to("cpu", torch.float32)[None, None]
    shape = (size[1], size[0])
    if raw.shape[2:] == shape:
        return np.asarray(raw[0, 0].numpy(), dtype=np.float32)
    seen = (~raw.isnan()).float()

    def smooth(tensor: Tensor) -> Tensor:
        return functional.interpolate(tensor, shape, mode="bilinear", align_corners=False, antialias=True)

    weight = smooth(seen)
    resized = smooth(raw.nan_to_num(0.0)) / weight.clamp(min=1e-6)
    resized[weight < 0.5] = math.nan
    return np.asarray(resized[0, 0].numpy(), dtype=np.float32)


def _checked_columns(columns: int, pictures: int) -> int:
    if columns < 1:
        raise VitrailError(f"columns = {columns} was given, expected at least 1.")
    return min(columns, pictures)
