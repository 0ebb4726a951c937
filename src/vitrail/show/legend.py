"""The legend of a picture: which colour speaks for which class."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

from vitrail.show.colours import Scale
from vitrail.show.look import DEFAULT_LOOK, Look
from vitrail.show.pixels import as_image, blended, hatched, outlined
from vitrail.show.text import fit_text, font

PAPER, INK, GREY = "#ffffff", "#1c1c1e", "#636366"

_BAR = 640  # pixels at most
_SMALLEST = 9


@dataclass(frozen=True)
class Legend:
    """What the colours of a map mean.

    Args:
        scale: the values at the ends of the colours.
        look: how the map is drawn.
        target: the explained class.
        rival: the class that the target is explained against.
        numbers: whether the values at the ends are shown: not if maps of several scales share the legend.
    """

    scale: Scale
    look: Look = DEFAULT_LOOK
    target: str = ""
    rival: str | None = None
    numbers: bool = True

    @property
    def ends(self) -> tuple[str, str]:
        """The texts of the low and of the high end."""
        if not self.scale.signed:
            names = "less", "more"
        elif self.rival is None:
            names = f"against {self.target}".rstrip(), f"for {self.target}".rstrip()
        else:
            names = f"for {self.rival}", f"for {self.target}"
        if not self.numbers:
            return names
        below, above = "≤ " if self.scale.below else "", "≥ " if self.scale.above else ""
        plus = "+" if self.scale.signed else ""
        return f"{below}{_number(self.scale.low)} {names[0]}", f"{above}{plus}{_number(self.scale.high)} {names[1]}"

    @property
    def outline(self) -> str:
        """What the outline encloses."""
        evidence = f" for {self.target}" if self.scale.signed and self.target else ""
        return f"outlined: the smallest area with half of the evidence{evidence}"

    def draw(self, width: int, unit: int) -> Image.Image:
        """The legend in an image of this width, with text of about ``unit`` pixels."""
        size = max(11, round(unit * 0.8))
        unseen = round(font(size).getlength("not seen")) + 4 * size if self.scale.partial else 0
        room = min(_BAR, width - unseen)
        draw = self._draw_outline if self.look.style == "outline" else self._draw_bar
        strip = draw(width, room, size)
        if self.scale.partial:
            swatch = np.full((size, 2 * size, 3), 150, dtype=np.float32)
            hatched(swatch, swatch, np.ones(swatch.shape[:2], dtype=bool))
            strip.paste(as_image(swatch), (room + unseen - 2 * size, 0))
            right = room + unseen - 2 * size - size // 2
            ImageDraw.Draw(strip).text((right, size // 2), "not seen", fill=GREY, font=font(size), anchor="rm")
        return strip

    def _draw_bar(self, width: int, bar: int, size: int) -> Image.Image:
        """The colour bar, and below it the text of each end in its half."""
        low, high = (fit_text(text, bar // 2 - size // 2, size, smallest=_SMALLEST, lines=3) for text in self.ends)
        top = size + size // 3
        strip = Image.new("RGB", (width, top + max(low.height, high.height)), PAPER)
        positions = np.broadcast_to(np.linspace(0, 1, bar, dtype=np.float32), (size, bar))
        photo, palette = np.full((size, bar, 3), 128, dtype=np.float32), self.scale.palette(self.look.colormap)
        strip.paste(as_image(blended(photo, positions, self.scale, palette, self.look.alpha)), (0, 0))
        pen = ImageDraw.Draw(strip)
        low.draw(pen, 0, top, GREY)
        high.draw(pen, bar // 2, top, GREY, right_in=bar - bar // 2)
        return strip

    def _draw_outline(self, width: int, room: int, size: int) -> Image.Image:
        """A piece of the outline, and beside it what it encloses."""
        text = fit_text(self.outline, room - 3 * size, size, smallest=_SMALLEST, lines=3)
        strip = Image.new("RGB", (width, max(size, text.height)), PAPER)
        evidence = np.zeros((size, 2 * size), dtype=np.float32)
        evidence[3:-3, 3:-3] = 1
        photo = np.full((size, 2 * size, 3), 128, dtype=np.float32)
        strip.paste(as_image(outlined(photo, evidence, self.scale, self.look)), (0, 0))
        text.draw(ImageDraw.Draw(strip), 3 * size, 0, GREY)
        return strip


def shared_legends(legends: Sequence[Legend]) -> list[Legend]:
    """One legend per colour scale for a sheet of maps, each of which spans the colours: without numbers."""
    shared: list[Legend] = []
    for signed in (True, False):
        alike = [legend for legend in legends if legend.scale.signed is signed]
        if alike:
            targets = {legend.target for legend in alike if legend.target}
            rivals = {legend.rival for legend in alike}
            partial = not shared and any(legend.scale.partial for legend in legends)
            shared.append(
                replace(
                    alike[0],
                    scale=replace(alike[0].scale, partial=partial),
                    target=targets.pop() if len(targets) == 1 else "the class",
                    rival=rivals.pop() if len(rivals) == 1 else None,
                    numbers=False,
                )
            )
    return shared


def _number(value: float) -> str:
    return f"{value:.2g}".replace("-", "−")
