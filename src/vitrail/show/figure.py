"""Pictures of explanations: overlays, captions and sheets, drawn with Pillow."""

import io
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.show.colours import Scale
from vitrail.show.heatmap import resize_map
from vitrail.show.legend import GREY, INK, PAPER, Legend
from vitrail.show.look import ALPHA, Look
from vitrail.show.pixels import as_bytes, blended, hatched, outlined
from vitrail.show.text import Paragraph, fit_text

Box = tuple[float, float, float, float]  # left, top, right, bottom
SHORT_SIDE, LONG_SIDE, THUMBNAIL = 384, 1600, 320
"""The smallest short side and the largest long side of a picture, and the long side of a thumbnail, in pixels."""

PNG_LEVEL = 3  # of compression: 2.6 × as fast as Pillow's default, for files 7 % larger

_GAP = 16
_LEGEND_UNIT = 22
_MOST_ELONGATED = 3  # sides of a thumbnail; of a longer picture, a part is shown
_SHEET_PIXELS = 60_000_000
_STRIP_PIXELS = 65_536


def overlay(
    image: Image.Image,
    values: Tensor,
    signed: bool | None = None,
    alpha: float = ALPHA,
    size: tuple[int, int] | None = None,
    *,
    colormap: str | None = None,
    style: str = "smooth",
    weights: Tensor | None = None,
) -> Image.Image:
    """Overlays a map on an image, which is faded: the stronger the evidence, the more opaque its colour.

    Args:
        values: the map, (H, W) of the image, not rescaled; NaN = not seen by the model, drawn grey and hatched.
        signed: whether the colours diverge from zero; None = if any value is negative.
        alpha, colormap, style: see ``Look``; "blocks" is drawn as "smooth", of a map that has blocks.
        size: (width, height) of the result; None = ``display_size`` of the image.
        weights: factors on the opacity, shaped like the map; outlines have none.
    """
    look = Look(colormap, alpha, style)
    if tuple(values.shape) != (image.height, image.width):
        raise VitrailError(
            f"the map of an image of {image.width} × {image.height} pixels must have shape ({image.height}, "
            f"{image.width}), but got {tuple(values.shape)}."
        )
    size = size or display_size(image.size)
    photo = np.asarray(_resized(image.convert("RGB"), size))
    resized, opacity = resize_map(values, size), None if weights is None else resize_map(weights, size)
    scale = Scale.of(values, signed)
    palette, blank, page = scale.palette(colormap), 0 if scale.signed else scale.low, np.empty_like(photo)
    rows = size[1] if style == "outline" else max(1, _STRIP_PIXELS // size[0])  # strips fit into a processor's cache
    for top in range(0, size[1], rows):
        strip = slice(top, top + rows)
        colours, unseen = photo[strip].astype(np.float32), np.isnan(resized[strip])
        positions = scale.positions(np.where(unseen, blank, resized[strip]))
        if style == "outline":
            drawing = outlined(colours, scale.support(positions), scale, look)
        else:
            drawing = blended(colours, positions, scale, palette, alpha, None if opacity is None else opacity[strip])
        page[strip] = as_bytes(hatched(drawing, colours, unseen, top))
    return Image.fromarray(page)


def marked(image: Image.Image, boxes: Sequence[Box]) -> Image.Image:
    """Draws a diamond in each box (left, top, right, bottom)."""
    page, width = image.copy(), max(2, min(image.size) // 160)
    pen = ImageDraw.Draw(page)
    for left, top, right, bottom in boxes:
        x, y, reach = (left + right) / 2, (top + bottom) / 2, 0.36 * min(right - left, bottom - top)
        corners = [(x, y - reach), (x + reach, y), (x, y + reach), (x - reach, y)]
        for ink, thickness in ((PAPER, 3 * width), (INK, width)):
            pen.line([*corners, *corners[:2]], fill=ink, width=thickness, joint="curve")
    return page


def linked(
    first: Image.Image, second: Image.Image, links: Sequence[tuple[Box, Box, float]], apart: int = 4 * _GAP
) -> Image.Image:
    """Two pictures side by side; a link frames a box of either and connects them by a line as wide as its weight."""
    height = max(first.height, second.height)
    page = Image.new("RGB", (first.width + apart + second.width, height), PAPER)
    corners = [(0, (height - first.height) // 2), (first.width + apart, (height - second.height) // 2)]
    for picture, corner in zip((first, second), corners, strict=True):
        page.paste(picture.convert("RGB"), corner)
    pen, unit = ImageDraw.Draw(page), max(2, height // 200)
    largest = max((weight for *_, weight in links), default=1.0)
    for box, other, weight in reversed(links):  # the largest on top
        moved = [
            (left + x, top + y, right + x, bottom + y)
            for (left, top, right, bottom), (x, y) in zip((box, other), corners, strict=True)
        ]
        ends = [((left + right) / 2, (top + bottom) / 2) for left, top, right, bottom in moved]
        width = max(1, round(2 * unit * weight / largest))
        for ink, more in ((PAPER, 2), (INK, 0)):
            pen.line(ends, fill=ink, width=width + more)
            for frame in moved:
                pen.rectangle(frame, outline=ink, width=unit + more)
    return page


def display_size(image_size: tuple[int, int]) -> tuple[int, int]:
    """The (width, height) at which an image is shown: small ones are enlarged, large ones reduced."""
    width, height = image_size
    factor = max(1.0, SHORT_SIDE / min(width, height))
    factor = min(factor, LONG_SIDE / max(width, height))
    return max(1, round(width * factor)), max(1, round(height * factor))


def labelled(
    image: Image.Image,
    title: str,
    subtitle: str | Sequence[str] = "",
    legends: Sequence[Legend] = (),
    *,
    title_on_top: bool = False,
) -> Image.Image:
    """Adds title, subtitle (one or several paragraphs) and legends below a picture; the texts above it if asked."""
    width = max(image.width, SHORT_SIDE)
    unit = max(16, min(28, width // 28))
    room = width - 2 * _GAP
    heading = fit_text(title, room, round(unit * 1.25), bold=True, lines=2)
    first, *others = [subtitle] if isinstance(subtitle, str) else subtitle or [""]
    details = [fit_text(first, room, unit, lines=3)]
    details += [fit_text(text, room, round(0.85 * unit), lines=4) for text in others]
    texts = [_strip(text, room, INK if text is heading else GREY) for text in (heading, *details) if text.lines]
    keys = [legend.draw(room, min(unit, _LEGEND_UNIT)) for legend in legends]
    above, below = (texts, keys) if title_on_top else ([], texts + keys)
    picture_top = _stack_height(above, unit)
    page = Image.new("RGB", (width, picture_top + image.height + _stack_height(below, unit)), PAPER)
    page.paste(image.convert("RGB"), ((width - image.width) // 2, picture_top))
    for blocks, start in ((above, 0), (below, picture_top + image.height)):
        top = start + _GAP
        for block in blocks:
            page.paste(block, (_GAP, top))
            top += block.height + unit // 2
    return page


def side_by_side(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Arranges pictures in rows, aligned at the top; all in one row unless ``columns`` is set."""
    if not images:
        raise VitrailError("no pictures to arrange: expected at least one.")
    columns = min(columns or len(images), len(images))
    if columns < 1:
        raise VitrailError(f"columns must be at least 1, but got {columns}.")
    rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    widths = [max(image.width for image in images[column::columns]) for column in range(columns)]
    heights = [max(image.height for image in row) for row in rows]
    page = Image.new("RGB", (sum(widths) + _GAP * (columns + 1), sum(heights) + _GAP * (len(rows) + 1)), PAPER)
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
    columns = columns or min(8, math.ceil(math.sqrt(len(pictures))))
    return side_by_side([_cell(image, caption, edge) for image, caption in pictures], columns)


def thumbnail(image: Image.Image, edge: int = THUMBNAIL, focus: tuple[float, float] = (0.5, 0.5)) -> Image.Image:
    """An RGB copy whose longer side is ``edge``; of a panorama, the part around ``focus``, a place in 0…1."""
    most = _MOST_ELONGATED * min(image.size)
    width, height = min(image.width, most), min(image.height, most)
    left = round(min(max(focus[0] * image.width - width / 2, 0), image.width - width))
    top = round(min(max(focus[1] * image.height - height / 2, 0), image.height - height))
    part = image.convert("RGB").crop((left, top, left + width, top + height))
    factor = edge / max(part.size)
    return _resized(part, (max(1, round(width * factor)), max(1, round(height * factor))))


def png_bytes(image: Image.Image) -> bytes:
    """The image as the content of a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def _cell(image: Image.Image, caption: str, edge: int) -> Image.Image:
    """A thumbnail with its caption, both centred; the first line of the caption is the most important."""
    small = thumbnail(image, edge)
    size = max(11, edge // 20)
    first, *others = caption.split("\n")
    texts = [fit_text(first, edge, size, smallest=10, lines=2)]
    texts += [fit_text(line, edge, size - 1, smallest=9, lines=2) for line in others]
    cell = Image.new("RGB", (edge, small.height + sum(text.height for text in texts) + _GAP), PAPER)
    cell.paste(small, ((edge - small.width) // 2, 0))
    pen, top = ImageDraw.Draw(cell), small.height + _GAP // 2
    for text in texts:
        text.draw(pen, 0, top, INK if text is texts[0] else GREY, centred_in=edge)
        top += text.height
    return cell


def _strip(text: Paragraph, width: int, ink: str) -> Image.Image:
    """A text as an image."""
    strip = Image.new("RGB", (width, text.height), PAPER)
    text.draw(ImageDraw.Draw(strip), 0, 0, ink)
    return strip


def _stack_height(blocks: Sequence[Image.Image], unit: int) -> int:
    """The height of blocks below each other, with the margins above and below; 0 without blocks."""
    return sum(block.height + unit // 2 for block in blocks) - unit // 2 + 2 * _GAP if blocks else 0


def _resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    return image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
