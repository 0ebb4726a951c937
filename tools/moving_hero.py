"""Draws the moving picture at the head of the README: `python tools/moving_hero.py` writes `docs/pictures/hero.webp`.

The embedded model `photo` looks at a cat above a cup of coffee (see tools/hero.py). The patches that speak most for a
class are taken out of the token sequence one after another, first those of the cat, then those of the cup; the picture
shows what the model still sees and what it says, beside what it says if patches are taken out in random orders.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

import vitrail
from vitrail.models.vit import ViT
from vitrail.show.text import font

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
TARGET, PHOTO = FOLDER / "hero.webp", FOLDER / "cat_and_cup.jpg"
METHOD = "decompx.skipplus"
COLOURS = {"tabby": "#ff8a5c", "espresso": "#5cc8ff"}  # of the classes
CLASSES = list(COLOURS)
REMOVED = 32  # patches, at the end
ORDERS = 16  # random ones, whose mean is drawn

SHARP = 2  # drawn larger, then scaled down: Pillow's lines have no smooth edges
WIDTH, HEIGHT, MARGIN, GAP, TOP, SIDE = 960, 408, 24, 20, 72, 288
AXIS, LABELS, FOOT = 40, 116, 22  # what the chart leaves to its axis, to the right of its curves, and below them
STEP, FIRST, LAST = 110, 1900, 2300  # milliseconds of a frame, and of the first and the last one of a class
QUALITY = 82
NIGHT, LEAD, PAPER, GREY, GRID = "#14161d", "#0b0c10", "#f5f5f7", "#9a9ca6", "#30333d"

Point = tuple[float, float]


@dataclass(frozen=True)
class Removal:
    """The patches of a class in the order in which they go, and the probabilities (step, class) after each."""

    label: str
    overlay: Image.Image
    order: list[int]
    probabilities: Tensor
    at_random: Tensor  # the mean over random orders


@dataclass(frozen=True)
class Curve:
    """A line of the chart."""

    name: str
    values: list[float]
    colour: str
    thick: bool

    def label(self, step: int) -> str:
        return f"{self.name} {self.values[step]:.0%}" if self.thick else self.name


class Sheet:
    """A page to draw on, in pixels of the finished frame."""

    def __init__(self) -> None:
        self.page = Image.new("RGB", (WIDTH * SHARP, HEIGHT * SHARP), NIGHT)
        self.pen = ImageDraw.Draw(self.page)

    def write(self, at: Point, text: str, size: int, colour: str, anchor: str = "la", bold: bool = False) -> None:
        self.pen.text(scaled(at), text, fill=colour, font=font(size * SHARP, bold), anchor=anchor)

    def line(self, points: list[Point], colour: str, width: float) -> None:
        self.pen.line([scaled(point) for point in points], colour, round(width * SHARP), joint="curve")

    def dot(self, at: Point, colour: str, radius: float) -> None:
        self.pen.circle(scaled(at), radius * SHARP, colour)

    def paste(self, picture: Image.Image, left: int) -> None:
        self.page.paste(picture.resize((SIDE * SHARP,) * 2, Image.Resampling.LANCZOS), (left * SHARP, TOP * SHARP))

    def pane(self, left: int, grid: tuple[int, int], patch: int, **look: Any) -> None:
        """A patch of the picture that was pasted there."""
        row, column = divmod(patch, grid[1])
        corners = [
            (left + SIDE * (column + right) / grid[1], TOP + SIDE * (row + below) / grid[0])
            for right, below in ((0, 0), (1, 1))
        ]
        self.pen.rectangle([scaled(corner) for corner in corners], **look)

    def finished(self) -> Image.Image:
        return self.page.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def scaled(point: Point) -> Point:
    return point[0] * SHARP, point[1] * SHARP


def main() -> None:
    view = vitrail.load()
    assert isinstance(view, ViT)
    with Image.open(PHOTO) as file:
        photo = file.convert("RGB")
    removals = [removal(view, photo, name) for name in CLASSES]
    frames = [frame(view, photo, item, step) for item in removals for step in range(REMOVED + 1)]
    durations = [FIRST, *[STEP] * (REMOVED - 1), LAST] * len(removals)
    TARGET.write_bytes(animated(frames, durations))
    print(f"{TARGET.name}: {TARGET.stat().st_size / 1000:.0f} kB, {len(frames)} frames, {sum(durations) / 1000:.0f} s")
    for item in removals:
        changes = zip(CLASSES, item.probabilities[0], item.probabilities[-1], strict=True)
        print(f"{item.label}:", ", ".join(f"{name} {a:.0%} → {b:.0%}" for name, a, b in changes))


@torch.no_grad()
def removal(view: ViT, photo: Image.Image, name: str) -> Removal:
    explanation = vitrail.explain(view, photo, METHOD, name)
    best = explanation.map.flatten().argsort(descending=True)
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([best, *(torch.randperm(len(best), generator=generator) for _ in range(ORDERS))])
    tokens = view.embed(view.preprocess(photo)[None])
    classes = [view.class_index(name) for name in CLASSES]
    steps = [view.probabilities(view.encode(tokens, orders[:, step:]))[:, classes] for step in range(REMOVED + 1)]
    probabilities = torch.stack(steps, 1)  # (order, step, class)
    order = best[:REMOVED].tolist()
    return Removal(name, explanation.overlay(), order, probabilities[0], probabilities[1:].mean(0))


def frame(view: ViT, photo: Image.Image, item: Removal, step: int) -> Image.Image:
    """The map, what is left of the picture, and the probabilities so far."""
    sheet, label = Sheet(), item.label
    lefts = [MARGIN + number * (SIDE + GAP) for number in range(3)]
    sheet.write((lefts[0], 22), f"Why {label}?", 27, COLOURS[label], bold=True)
    about = f"{METHOD} · {view.name}, a ViT with {view.num_classes} classes"
    sheet.write((WIDTH - MARGIN, 31), about, 14, GREY, "ra")
    sheet.paste(item.overlay, lefts[0])
    sheet.paste(photo, lefts[1])
    for number, patch in enumerate(item.order[:step], 1):
        edge = {"outline": PAPER, "width": SHARP} if number == step else {"outline": GRID, "width": 1}
        sheet.pane(lefts[0], view.grid, patch, outline=PAPER, width=SHARP)
        sheet.pane(lefts[1], view.grid, patch, fill=LEAD, **edge)
    draw_chart(sheet, lefts[2], curves_of(item), step)
    removed = f"{step} of {view.grid[0] * view.grid[1]} patches removed"
    for left, caption in zip(lefts, ("the map: red for, blue against", removed, "what the model says"), strict=True):
        sheet.write((left, TOP + SIDE + 14), caption, 14, PAPER if left == lefts[1] else GREY)
    return sheet.finished()


def curves_of(item: Removal) -> list[Curve]:
    target = CLASSES.index(item.label)
    at_random = Curve(f"{item.label}, at random", item.at_random[:, target].tolist(), GREY, thick=False)
    classes = [
        Curve(name, item.probabilities[:, i].tolist(), COLOURS[name], thick=True) for i, name in enumerate(CLASSES)
    ]
    return [at_random, *classes]


def draw_chart(sheet: Sheet, left: int, curves: list[Curve], step: int) -> None:
    """The curves up to a step, each with its name at its end."""
    right, bottom = WIDTH - MARGIN - LABELS, TOP + SIDE - FOOT

    def at(removed: int, probability: float) -> Point:
        return left + AXIS + (right - left - AXIS) * removed / REMOVED, bottom - (bottom - TOP) * probability

    for percent in (0, 25, 50, 75, 100):
        edges = at(0, percent / 100), at(REMOVED, percent / 100)
        sheet.line(list(edges), GRID, 1)
        sheet.write((edges[0][0] - 8, edges[0][1]), f"{percent}%", 11, GREY, "rm")
    sheet.write(((left + AXIS + right) / 2, TOP + SIDE), "patches removed →", 11, GREY, "ms")
    curves = curves if step else [curve for curve in curves if curve.thick]  # all start at the same points
    heights = spread([at(step, curve.values[step])[1] for curve in curves], 17)
    for curve, height in zip(curves, heights, strict=True):
        points = [at(removed, value) for removed, value in enumerate(curve.values[: step + 1])]
        sheet.line(points, curve.colour, 3 if curve.thick else 1.5)
        sheet.dot(points[-1], curve.colour, 4.5 if curve.thick else 2.5)
        beside = points[-1][0] + 9, height
        sheet.write(beside, curve.label(step), 14 if curve.thick else 11, curve.colour, "lm", bold=curve.thick)


def spread(heights: list[float], distance: float) -> list[float]:
    """The heights of labels, moved apart where they would overlap, around their mean."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    moved = list(heights)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + distance)
    shift = sum(moved) / len(moved) - sum(heights) / len(heights)
    return [height - shift for height in moved]


def animated(frames: list[Image.Image], durations: list[int]) -> bytes:
    buffer = io.BytesIO()
    frames[0].save(
        buffer, "WEBP", save_all=True, append_images=frames[1:], duration=durations, loop=0, quality=QUALITY, method=4
    )
    return buffer.getvalue()


if __name__ == "__main__":
    main()
