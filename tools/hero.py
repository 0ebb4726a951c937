"""Draws the picture of two classes and five methods: `python tools/hero.py` writes `docs/pictures/hero.png`.

Two photographs that scikit-image ships, both CC0 (Chelsea the cat by Stéfan van der Walt, a cup of coffee by Rachel
Michetti), are stacked, and the embedded model `photo` is explained for both objects.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from skimage import data

import vitrail
from vitrail.show.text import fit_text

TARGET = Path(__file__).parents[1] / "docs" / "pictures" / "hero.png"
COLLAGE = TARGET.with_name("cat_and_cup.jpg")
SIDE = 480
CLASSES = {"tabby": "Why a cat?", "espresso": "Why a coffee?"}
METHODS = {  # method → caption
    "decompx.skipplus": "red: for, blue: against",
    "gen_att": "attention × gradient",
    "tis": "tokens taken out",
    "vit_cx": "masks from features",
    "rollout": "knows no class",
}
CELL, GAP, HEADER, FOOTER, MARGIN, ASIDE = 190, 8, 36, 34, 14, 36
LARGE = 2 * CELL + GAP
INK, GREY, PAPER = "#1c1c1e", "#636366", "#ffffff"


@dataclass(frozen=True)
class Page:
    """A white page and where its parts are."""

    picture: Image.Image
    pen: ImageDraw.ImageDraw

    def write(self, text: str, left: int, top: int, width: int, colour: str = INK, size: int = 15) -> None:
        fit_text(text, width, size, smallest=10, lines=1).draw(self.pen, left, top, colour, centred_in=width)


def main() -> None:
    picture = collage()
    picture.save(COLLAGE, quality=90)
    view = vitrail.load()
    rows = [[vitrail.explain(view, picture, method, name) for method in METHODS] for name in CLASSES]
    TARGET.write_bytes(few_colours(draw(picture, rows)))
    print(
        f"{TARGET.name}: {TARGET.stat().st_size / 1000:.0f} kB, {COLLAGE.name}: {COLLAGE.stat().st_size / 1000:.0f} kB"
    )


def collage() -> Image.Image:
    """The cat above the cup, as a square: the model's centre crop covers all of it."""
    half = SIDE // 2
    cat = Image.fromarray(data.chelsea()).crop((0, 30, 451, 255)).resize((SIDE, half), Image.Resampling.LANCZOS)
    cup = Image.fromarray(data.coffee()).crop((60, 60, 60 + SIDE, 60 + half))
    page = Image.new("RGB", (SIDE, SIDE))
    page.paste(cat, (0, 0))
    page.paste(cup, (0, half))
    return page


def draw(picture: Image.Image, rows: list[list[vitrail.Explanation]]) -> Image.Image:
    """The collage and its explanations: a row per class, a column per method."""
    left = MARGIN + LARGE + GAP + ASIDE
    width = left + len(METHODS) * (CELL + GAP) - GAP + MARGIN
    page = Image.new("RGB", (width, HEADER + LARGE + FOOTER), PAPER)
    sheet = Page(page, ImageDraw.Draw(page))
    page.paste(picture.resize((LARGE, LARGE), Image.Resampling.LANCZOS), (MARGIN, HEADER))
    sheet.write(", ".join(f"{row[0].label} {row[0].probability:.0%}" for row in rows), MARGIN, 9, LARGE)
    sheet.write("what the model sees and says", MARGIN, HEADER + LARGE + 8, LARGE, GREY, 13)
    for place, (method, about) in enumerate(METHODS.items()):
        sheet.write(method, left + place * (CELL + GAP), 9, CELL)
        sheet.write(about, left + place * (CELL + GAP), HEADER + LARGE + 8, CELL, GREY, 13)
    for number, (row, question) in enumerate(zip(rows, CLASSES.values(), strict=True)):
        top = HEADER + number * (CELL + GAP)
        page.paste(sideways(question), (left - ASIDE + 2, top))
        for place, ex in enumerate(row):
            cell = ex.overlay().resize((CELL, CELL), Image.Resampling.LANCZOS)
            page.paste(cell, (left + place * (CELL + GAP), top))
    return page


def sideways(text: str) -> Image.Image:
    """A question, rotated to stand beside its row."""
    page = Image.new("RGB", (CELL, ASIDE - 4), PAPER)
    Page(page, ImageDraw.Draw(page)).write(text, 0, 6, CELL)
    return page.transpose(Image.Transpose.ROTATE_90)


def few_colours(picture: Image.Image) -> bytes:
    """A PNG with a palette of 256 colours, dithered."""
    buffer = io.BytesIO()
    palette = picture.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=3)
    picture.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
