"""Draws the pictures of the method pages: `python tools/pictures.py [NAME…]`.

One picture per page, made offline with the two embedded models, so that anyone can reproduce them. Rows: a photograph
(Grace Hopper, public domain, from matplotlib's sample data) explained for the predicted class, and a generated scene
with two objects, explained once for each of them.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import matplotlib
from PIL import Image, ImageDraw

import vitrail
from vitrail.data import Scenes
from vitrail.show.figure import overlay
from vitrail.show.heatmap import fit_to_image
from vitrail.show.text import fit_text

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PHOTO = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
SCENE = 10  # of Scenes(…, objects=2): two large objects, far apart

CELL, GAP, HEADER, FOOTER = 120, 8, 44, 20
LIMIT = 215_000  # maximum bytes of a picture
INK, GREY, PAPER = "#1c1c1e", "#636366", "#ffffff"

Column = tuple[str, str, dict[str, Any]]  # caption, method, parameters


def column(method: str, caption: str | None = None, **params: Any) -> Column:
    parameters = ", ".join(f"{key}={value}" for key, value in params.items())
    return caption or " ".join(filter(None, (method, parameters))), method, params


def names(text: str) -> list[Column]:
    return [column(name) for name in text.split()]


PAGES: dict[str, list[Column]] = {
    "attention": [
        *names("raw_attention rollout"),
        column("rollout", fusion="max", discard=0.5),
        column("rollout", protocol="tis"),
        *names("raw_attention.plus attn_cam attn_cam.plus"),
    ],
    "gradients": [
        *names("gradient attention_gradient input_x_gradient cat full_grad full_grad_plus att_ixg att_cat"),
        column("integrated_gradients", "integrated_ gradients"),
        column("smooth_grad"),
    ],
    "cams": [
        *names("grad_cam xgrad_cam xgrad_cam_plus grad_cam_pp hires_cam"),
        column("grad_cam_elementwise", "grad_cam_ elementwise"),
        column("layer_cam"),
        column("hires_cam", rule="frozen"),
        column("grad_cam", protocol="authors"),
    ],
    "relevance": names("gen_att grad_sam trans_att partial_lrp lrp epsilon_lrp conservative_lrp attn_lrp"),
    "markov": [*names("tam bt_h bt_t"), *(column(name, protocol="authors") for name in ("tam", "bt_h", "bt_t"))],
    "decomposition": names("decompx decompx.skipplus attin attin_residual globenc alti alti.plus"),
    "transformation": [
        column("vtranm"),
        column("vtranm", "aggregate, length", necc=False),
        column("vtranm", "aggregate only", length=False, necc=False),
        column("vtranm", "none of the three", aggregate=False, length=False, necc=False),
        column("vtranm", rule="frozen"),
        column("vtranm", reference="normed"),
        column("gen_att"),
    ],
    "masks": [
        *names("tis vit_cx"),
        column("rise", masks=1000),
        *names("pami occlusion score_cam atman lime"),
        column("kernel_shap", space="tokens"),
        column("hsic"),
    ],
    "aggregations": [
        *names("decompx decompx.plus decompx.skipplus gen_att gen_att.plus gen_att.skipplus raw_attention rollout"),
        column("raw_attention.skipplus", "raw_attention .skipplus"),
    ],
    "rules": [
        column("input_x_gradient", "input_x_gradient plain"),
        column("conservative_lrp", "input_x_gradient conservative"),
        column("attn_lrp", "input_x_gradient attn_lrp"),
        column("input_x_gradient", "input_x_gradient frozen", rule="frozen"),
        column("att_cat", "att_cat plain"),
        column("att_cat", "att_cat frozen", rule="frozen"),
        column("full_grad_plus.skipplus", "full_grad_plus .skipplus plain"),
        column("full_grad_plus.skipplus", "full_grad_plus .skipplus frozen", rule="frozen"),
    ],
}


def main() -> None:
    wanted = sys.argv[1:] or list(PAGES)
    photo, scenes = vitrail.load(), vitrail.load("scenes")
    scene = Scenes(SCENE + 1, objects=2)[SCENE]
    rows: list[tuple[Any, Any, int | None]] = [(photo, PHOTO, None)]
    rows += [(scenes, scene.image, thing.label) for thing in scene.objects]
    FOLDER.mkdir(exist_ok=True)
    for page in wanted:
        picture = draw([explain_row(*row, PAGES[page]) for row in rows], PAGES[page])
        target = FOLDER / f"{page}.png"
        target.write_bytes(compressed(picture))
        sys.stdout.write(f"{target.name}: {picture.width}×{picture.height}, {target.stat().st_size / 1000:.0f} kB\n")


def compressed(picture: Image.Image) -> bytes:
    """A PNG with as many colours as the size limit allows."""
    for colours in range(256, 32, -32):
        buffer = io.BytesIO()
        few = picture.quantize(colours, method=Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE)
        few.save(buffer, "PNG", optimize=True)
        if buffer.tell() <= LIMIT:
            break
    return buffer.getvalue()


def explain_row(model: Any, image: Any, target: int | None, columns: list[Column]) -> list[vitrail.Explanation]:
    return [vitrail.explain(model, image, method, target, **params) for _, method, params in columns]


def draw(rows: list[list[vitrail.Explanation]], columns: list[Column]) -> Image.Image:
    """The input, then the maps: a row per explained class, a column per method."""
    width = GAP + (CELL + GAP) * (len(columns) + 1)
    page = Image.new("RGB", (width, HEADER + (CELL + FOOTER + GAP) * len(rows)), PAPER)
    pen = ImageDraw.Draw(page)
    for place, (caption, _, _) in enumerate(columns, 1):
        text = fit_text(caption, CELL + GAP - 2, 13, smallest=10, lines=2)
        text.draw(pen, GAP // 2 + place * (CELL + GAP), HEADER - text.height - 4, INK, centred_in=CELL + GAP)
    for number, row in enumerate(rows):
        top = HEADER + number * (CELL + FOOTER + GAP)
        cells = [cropped(row[0], row[0].image), *(cropped(ex, on_grey(ex)) for ex in row)]
        for place, cell in enumerate(cells):
            page.paste(cell, (GAP + place * (CELL + GAP), top))
        title = fit_text(row[0].title, CELL + GAP - 2, 12, smallest=9, lines=1)
        title.draw(pen, GAP // 2, top + CELL + 3, GREY, centred_in=CELL + GAP)
    return page


def on_grey(ex: vitrail.Explanation) -> Image.Image:
    """The map over a greyscale copy of the image, whose colours would mix with those of the map."""
    grey = ex.image.convert("L").convert("RGB")
    return overlay(grey, fit_to_image(ex.map, ex.box, ex.image.size), ex.signed, alpha=0.9)


def cropped(ex: vitrail.Explanation, picture: Image.Image) -> Image.Image:
    """The model's crop of a picture, resized to a cell."""
    factor = picture.width / ex.image.width
    box = tuple(round(edge * factor) for edge in ex.box)
    return picture.convert("RGB").crop(box).resize((CELL, CELL), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
