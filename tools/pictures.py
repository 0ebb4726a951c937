"""Draws the pictures of the method pages, of the styles and of questions: `python tools/pictures.py [NAME…]`.

One picture per page, made offline with the embedded models, so that anyone can reproduce them. Rows: a photograph
(Grace Hopper, public domain, from matplotlib's sample data) explained for the predicted class, and a generated scene
with two objects, explained once for each of them.
"""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from PIL import Image, ImageDraw

import vitrail
from vitrail.data import CaptionedScenes, Scenes
from vitrail.show.text import fit_text

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PHOTO = Path(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
CAT = files("vitrail.data") / "samples" / "cat.jpg"
TRUST = Path(__file__).parents[1] / "docs" / "results" / "trust.csv"
SCENE = 10  # of Scenes(…, objects=2): two large objects, far apart
STARS = (42, 357)  # of CaptionedScenes(…, seed=8, objects=3): a red star and a blue one, and something else
TEXTS = ("a red star", "a blue star")

CELL, GAP, HEADER, FOOTER = 120, 8, 44, 20
LIMIT = 215_000  # maximum bytes of a PNG
LOSSY = ("pairs",)  # photographs in full size
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
        column("grad_cam", protocol="signed"),
        column("hires_cam", protocol="signed"),
    ],
    "relevance": names("gen_att grad_sam trans_att partial_lrp lrp epsilon_lrp conservative_lrp attn_lrp"),
    "markov": [*names("tam bt_h bt_t"), *(column(name, protocol="tis") for name in ("tam", "bt_h", "bt_t"))],
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
        *names("decompx decompx.plus decompx.skipplus gen_att gen_att.plus gen_att.skipplus raw_attention"),
        column("raw_attention.rollout", "raw_attention .rollout"),
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
    others = {"styles": draw_styles, "trust": draw_trust, "texts": draw_texts, "pairs": draw_pairs}
    wanted = sys.argv[1:] or [*PAGES, *others]
    FOLDER.mkdir(exist_ok=True)
    for page in wanted:
        picture = others[page]() if page in others else draw_methods(PAGES[page])
        target = FOLDER / f"{page}{'.webp' if page in LOSSY else '.png'}"
        if page in LOSSY:
            picture.save(target, quality=85, method=6)
        else:
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


def draw_methods(columns: list[Column]) -> Image.Image:
    """The input, then the maps: a row per explained class, a column per method."""
    photo, scenes = vitrail.load(), vitrail.load("scenes")
    scene = Scenes(SCENE + 1, objects=2)[SCENE]
    questions: list[tuple[Any, Any, int | None]] = [(photo, PHOTO, None)]
    questions += [(scenes, scene.image, thing.label) for thing in scene.objects]
    rows = []
    for question in questions:
        explanations = [explain(*question, column) for column in columns]
        first = explanations[0]
        rows.append(([cropped(first, first.image), *(cropped(ex, ex.overlay()) for ex in explanations)], first.title))
    return draw(rows, ["", *(caption for caption, _, _ in columns)])


def explain(model: Any, image: Any, target: int | None, asked: Column) -> vitrail.Explanation:
    _, method, params = asked
    return vitrail.explain(model, image, method, target, **params)


def draw_styles() -> Image.Image:
    """The same two maps in every style, over a photograph in four versions that hide colours."""
    photo = Image.open(str(CAT)).convert("RGB")
    signed, unsigned = (vitrail.explain("photo", photo, method) for method in ("decompx.skipplus", "gen_att"))
    rows = []
    for name, version in versions(photo).items():
        over = [replace(ex, image=version) for ex in (signed, unsigned)]
        pictures = [version, *(over[0].overlay(style=style) for style in ("smooth", "blocks", "outline"))]
        pictures += [over[1].overlay(style=style) for style in ("smooth", "outline")]
        rows.append(([cropped(signed, picture) for picture in pictures], name))
    captions = ["", "signed: smooth", "signed: blocks", "signed: outline", "unsigned: smooth", "unsigned: outline"]
    return draw(rows, captions)


def draw_trust() -> Image.Image:
    """A point per image: agreement against insertion − deletion, for each model of `benchmarks/trust.py`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = pd.read_csv(TRUST)
    figure = Figure(figsize=(10, 2.9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, rows["model"].nunique(), sharex=True, sharey=True)
    for axes, (name, group) in zip(panels, rows.groupby("model", sort=False), strict=True):
        rho = group["agreement"].corr(group["quality"], method="spearman")
        axes.scatter(group["agreement"], group["quality"], s=11, color="#0b7a75", alpha=0.6, linewidths=0)
        axes.set_title(f"{name}\nSpearman {rho:.2f}", fontsize=9)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("insertion − deletion")
    figure.supxlabel("agreement with 64 subsets of patches", fontsize=10)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")


def draw_texts() -> Image.Image:
    """Scenes with two stars: why the one, why the other, why the one rather than the other."""
    model, scenes = vitrail.load("scenes-text"), CaptionedScenes(max(STARS) + 1, seed=8, objects=3, shared="colour")
    red, blue = TEXTS
    asked = [(red, None), (blue, None), (red, blue), (blue, red), ("a star", None)]
    rows = []
    for number in STARS:
        scene = scenes[number]
        maps = [vitrail.explain(model, scene.image, target=text, against=rival) for text, rival in asked]
        (other,) = (item.caption for item in scene.objects if item.caption not in TEXTS)
        rows.append(([cropped(maps[0], maps[0].image), *(cropped(ex, ex.overlay()) for ex in maps)], f"and {other}"))
    return draw(rows, ["", *(text if rival is None else f"{text} rather than {rival}" for text, rival in asked)])


def draw_pairs() -> Image.Image:
    """Two pictures with a cat, and the pairs of patches that make them similar; some minutes on a CPU."""
    cat = Image.open(str(CAT)).convert("RGB")
    left = (cat.width - cat.height) // 2
    square = cat.crop((left, 0, left + cat.height, cat.height)).resize((480, 480), Image.Resampling.LANCZOS)
    return vitrail.similar("photo", square, FOLDER / "cat_and_cup.jpg", "decompx").picture()


def versions(photo: Image.Image) -> dict[str, Image.Image]:
    """A photograph darkened, reddened, bleached and covered with squares in every colour."""
    pixels = np.asarray(photo, dtype=np.float32)
    grey = pixels.mean(2, keepdims=True)
    random = np.random.default_rng(0).integers(0, 256, (photo.height // 16 + 1, photo.width // 16 + 1, 3))
    squares = random.repeat(16, 0).repeat(16, 1)[: photo.height, : photo.width]
    arrays = {
        "dark": 0.25 * pixels,
        "red": grey * np.array([0.5, 0.2, 0.2]) + np.array([110, 5, 15]),
        "white": 0.3 * pixels + 178,
        "busy": 0.5 * pixels + 0.5 * squares,
    }
    return {name: Image.fromarray(array.clip(0, 255).astype(np.uint8)) for name, array in arrays.items()}


def draw(rows: list[tuple[list[Image.Image], str]], captions: list[str]) -> Image.Image:
    """A table of pictures, with a caption above each column and one below the first picture of each row."""
    page = Image.new("RGB", (GAP + (CELL + GAP) * len(captions), HEADER + (CELL + FOOTER + GAP) * len(rows)), PAPER)
    pen = ImageDraw.Draw(page)
    for place, caption in enumerate(captions):
        text = fit_text(caption, CELL + GAP - 2, 13, smallest=10, lines=2)
        text.draw(pen, GAP // 2 + place * (CELL + GAP), HEADER - text.height - 4, INK, centred_in=CELL + GAP)
    for number, (cells, caption) in enumerate(rows):
        top = HEADER + number * (CELL + FOOTER + GAP)
        for place, cell in enumerate(cells):
            page.paste(cell, (GAP + place * (CELL + GAP), top))
        title = fit_text(caption, CELL + GAP - 2, 12, smallest=9, lines=1)
        title.draw(pen, GAP // 2, top + CELL + 3, GREY, centred_in=CELL + GAP)
    return page


def cropped(ex: vitrail.Explanation, picture: Image.Image) -> Image.Image:
    """The model's crop of a picture, resized to a cell."""
    factor = picture.width / ex.image.width
    box = tuple(round(edge * factor) for edge in ex.box)
    return picture.convert("RGB").crop(box).resize((CELL, CELL), Image.Resampling.LANCZOS)


if __name__ == "__main__":
    main()
