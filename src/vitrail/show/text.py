"""Text on pictures, fitted to the available width."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from PIL import ImageDraw, ImageFont

LINE_HEIGHT = 1.3

_BASIC = ImageFont.Layout.BASIC
_KEPT_AT_END = 10


@dataclass(frozen=True)
class Paragraph:
    """Lines of text in one font."""

    lines: tuple[str, ...]
    size: int
    bold: bool

    @property
    def height(self) -> int:
        """Height of all lines in pixels."""
        return round(len(self.lines) * self.size * LINE_HEIGHT)

    def draw(
        self, draw: ImageDraw.ImageDraw, left: int, top: int, colour: str, centred_in: int = 0, right_in: int = 0
    ) -> None:
        """Draws the lines, aligned left, centred in a width, or aligned right in a width."""
        face = font(self.size, self.bold)
        for number, line in enumerate(self.lines):
            spare = (centred_in or right_in) - face.getlength(line)
            indent = spare / 2 if centred_in else spare if right_in else 0
            draw.text((left + indent, top + number * self.size * LINE_HEIGHT), line, fill=colour, font=face)


def fit_text(text: str, width: int, size: int, *, bold: bool = False, smallest: int = 11, lines: int = 2) -> Paragraph:
    """Wraps text into at most ``lines`` lines, in a smaller font where needed, with an ellipsis as the last resort."""
    words = "".join(character if character.isprintable() else " " for character in text).split()
    if not words:
        return Paragraph((), size, bold)
    for points in range(size, min(smallest, size) - 1, -1):
        face = font(points, bold)
        wrapped = _wrap(words, width, face, lines)
        whole = points == min(smallest, size) or all(face.getlength(word) <= width for word in words)
        if whole and face.getlength(wrapped[-1]) <= width:
            return Paragraph(tuple(wrapped), points, bold)
    return Paragraph((*wrapped[:-1], _cut(wrapped[-1], width, face)), points, bold)


@lru_cache(maxsize=64)
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which comes with matplotlib."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    # The basic layout engine is always available and measures the same widths everywhere.
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", name), size, layout_engine=_BASIC)


def _wrap(words: list[str], width: int, face: ImageFont.FreeTypeFont, lines: int) -> list[str]:
    """Breaks words into at most ``lines`` lines; the last one holds the rest, even if it is too wide."""
    wrapped: list[str] = []
    remaining = words[::-1]
    while remaining and len(wrapped) < lines - 1:
        line = remaining.pop()
        fits = max(1, _fitting_length(line, width, face))
        if fits < len(line):
            remaining.append(line[fits:])
            line = line[:fits]
        while remaining and face.getlength(f"{line} {remaining[-1]}") <= width:
            line += f" {remaining.pop()}"
        wrapped.append(line)
    return [*wrapped, " ".join(remaining[::-1])] if remaining else wrapped


def _cut(line: str, width: int, face: ImageFont.FreeTypeFont) -> str:
    """Replaces the middle of a line by an ellipsis: captions end with numbers, which are kept."""
    if face.getlength(line) <= width:
        return line
    tail = "…" + line[-_KEPT_AT_END:].lstrip()
    if face.getlength(tail) > width / 2:
        tail = "…"
    kept = _fitting_length(line[:-_KEPT_AT_END], width - round(face.getlength(tail) + 1), face)
    return line[:kept].rstrip() + tail


def _fitting_length(text: str, width: int, face: ImageFont.FreeTypeFont) -> int:
    """The number of leading characters that fit, by bisection: labels can be thousands of characters long."""
    longer = bisect_right(range(len(text) + 1), float(width), key=lambda length: face.getlength(text[:length]))
    return max(0, longer - 1)
