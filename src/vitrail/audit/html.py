"""The report of an audit as one HTML file: no server, no network; what matters is readable without a script."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from vitrail.audit.clusters import OUTLIER
from vitrail.audit.records import Records, region_name
from vitrail.audit.removal import widened
from vitrail.audit.summary import Summary, Suspicion, best_matches, percent
from vitrail.geometry import Box
from vitrail.report.gallery import colour_tables, encoded_map, is_signed
from vitrail.report.templates import render_page
from vitrail.show.colours import Scale

if TYPE_CHECKING:
    import pandas as pd

EXAMPLES = 8  # of a suspicion
SAMPLES = 5  # of a cluster
THUMBNAIL = 112  # pixels
MAX_CHARACTERS = 12_000_000  # of the pictures of the gallery
MATRIX = 20  # most classes of a confusion matrix
LISTED = 12  # confusions and clusters that are shown at once


def page(summary: Summary, pairs: pd.DataFrame | None, regions: Sequence[Box], about: Mapping[str, Any]) -> str:
    """The content of the file."""
    names = [name for name in summary.classes["class"] if name in summary.maps]
    return render_page(
        "audit",
        ("dom.js", "lens.js", "audit.js"),
        package="vitrail.audit",
        styles=("report.css", "audit.css"),
        data=_data(summary, str(about["method"])),
        about=about,
        totals=summary.totals,
        headline=summary.headline(),
        alarms=[_card(summary, suspicion) for suspicion in summary.confirmed],
        harmless=[suspicion for suspicion in summary.suspicions if not suspicion.is_confirmed],
        bins=summary.bins,
        confusions=summary.confusions.head(LISTED).to_dict("records"),
        more_confusions=max(0, len(summary.confusions) - LISTED),
        matrix=_matrix(summary.frame),
        classes=summary.classes.to_dict("records"),
        class_maps={name: _map_png(summary.maps[name]) for name in names},
        whole_map=_map_png(summary.maps[""]),
        clusters=_clusters(summary),
        regions=_regions(summary.frame, regions),
        pairs=None if pairs is None else _pairs(pairs),
        percent=percent,
        number=_number,
    )


def _data(summary: Summary, method: str) -> dict[str, Any]:
    frame, budget = summary.frame, MAX_CHARACTERS
    signed = is_signed(method)
    wrong = (frame["label"] >= 0) & (frame["true"] != frame["predicted"])
    order = np.lexsort((-frame["outlier"].fillna(0), -wrong.astype(int), -frame["suspicion"]))
    entries: list[dict[str, Any]] = []
    for i in order:
        entry = _entry(frame.iloc[i], bool(wrong.iloc[i]))
        jpeg = _jpeg(_opened(summary.records, i), THUMBNAIL)
        if budget > 0:
            entry |= {"jpeg": jpeg, "map": encoded_map(summary.records.maps[i].numpy(), signed)}
            budget -= len(jpeg) + len(entry["map"][3])
        entries.append(entry)
    return {"images": entries, "colours": colour_tables(), "outlier": OUTLIER}


def _entry(row: pd.Series, wrong: bool) -> dict[str, Any]:
    return {
        "id": row["image"],
        "true": row["true"] if row["label"] >= 0 else None,
        "predicted": row["predicted"],
        "wrong": wrong,
        "cluster": int(row["cluster"]),
        "words": row["evidence"],
        **{name: _rounded(row[name]) for name in ("probability", "margin", "trust", "suspicion", "outlier")},
    }


def _card(summary: Summary, suspicion: Suspicion) -> dict[str, Any]:
    """A suspicion with its pictures: the detail, and images with the place of it."""
    matches = best_matches(suspicion, EXAMPLES)
    first = _opened(summary.records, matches[0].image)
    x0, y0, x1, y1 = widened(matches[0].box)
    (width, height) = first.size
    detail = first.crop((round(x0 * width), round(y0 * height), round(x1 * width), round(y1 * height)))
    detail = detail.resize((160, round(160 * detail.height / detail.width)), Image.Resampling.BICUBIC)
    return {
        "name": suspicion.name,
        "words": suspicion.words(),
        "detail": _jpeg(detail, 160),
        "examples": [
            {
                "picture": _jpeg(_marked(_opened(summary.records, match.image), widened(match.box)), 160),
                "image": summary.frame["image"].iloc[match.image],
                "share": match.share,
            }
            for match in matches
        ],
    }


def _clusters(summary: Summary) -> list[dict[str, Any]]:
    """The clusters of classes that have several, the most suspicious first, with their mean map and some images."""
    frame, table = summary.frame, summary.clusters
    several = set(table["class"][table["class"].duplicated()])
    cards = []
    for line in table[table["class"].isin(several)].head(2 * LISTED).to_dict("records"):
        inside = np.flatnonzero((frame["predicted"] == line["class"]) & (frame["cluster"] == line["cluster"]))
        samples = inside[np.argsort(-frame["suspicion"].to_numpy()[inside], kind="stable")][:SAMPLES]
        cards.append(
            line
            | {
                "map": _map_png(summary.evidence[inside.tolist()].mean(0)),
                "samples": [_jpeg(_opened(summary.records, i), 96) for i in samples],
            }
        )
    return cards


def _matrix(frame: pd.DataFrame) -> dict[str, Any] | None:
    """True classes by predicted ones, as counts; None without true classes or with too many."""
    known = frame[frame["label"] >= 0]
    names = sorted({*known["true"], *known["predicted"]})
    if not names or len(names) > MATRIX:
        return None
    counts = known.groupby(["true", "predicted"]).size().to_dict()
    totals = known.groupby("true").size().to_dict()
    rows = [[int(counts.get((true, predicted), 0)) for predicted in names] for true in names]
    shades = [
        [math.ceil(4 * n / max(1, totals.get(true, 0))) for n in row] for true, row in zip(names, rows, strict=True)
    ]
    return {
        "names": names,
        "rows": [list(zip(row, shade, strict=True)) for row, shade in zip(rows, shades, strict=True)],
    }


def _regions(frame: pd.DataFrame, regions: Sequence[Box]) -> list[dict[str, Any]]:
    """What regions hold and do, over all images and by class."""
    results = []
    for name in map(region_name, regions):
        rows = frame[frame[f"predicted without {name}"].notna()]
        changed = rows[f"predicted without {name}"] != rows["predicted"]
        fall = rows["probability"] - rows[f"probability without {name}"]
        by_class = [
            {
                "class": label,
                "images": len(inside),
                "evidence": float(inside[f"evidence in {name}"].mean()),
                "fall": float(fall[inside.index].mean()),
                "changed": float(changed[inside.index].mean()),
            }
            for label, inside in rows.groupby("predicted")
        ]
        results.append(
            {
                "name": name,
                "evidence": float(rows[f"evidence in {name}"].mean()),
                "fall": float(fall.mean()),
                "changed": int(changed.sum()),
                "images": len(rows),
                "classes": sorted(by_class, key=lambda line: -line["fall"]),
            }
        )
    return results


def _pairs(pairs: pd.DataFrame) -> dict[str, Any]:
    changed = pairs[pairs["changed"]]
    return {
        "images": len(pairs),
        "changed": len(changed),
        "area": float(pairs["changed_area"].mean()),
        "evidence": float(pairs["evidence_on_change"].mean()),
        "similarity": float(pairs["similarity"].mean()),
        "lines": pairs.sort_values(["changed", "evidence_on_change"], ascending=False).head(LISTED).to_dict("records"),
    }


def _opened(records: Records, image: int) -> Image.Image:
    with Image.open(io.BytesIO(records.jpegs[image])) as picture:
        return picture.convert("RGB")


def _marked(picture: Image.Image, box: Box) -> Image.Image:
    """A picture with a box around a region, given in shares."""
    width, height = picture.size
    corners = (box[0] * width, box[1] * height, box[2] * width - 1, box[3] * height - 1)
    marked = picture.copy()
    drawing = ImageDraw.Draw(marked)
    drawing.rectangle(corners, outline=(255, 255, 255), width=4)
    drawing.rectangle(corners, outline=(214, 39, 40), width=2)
    return marked


def _jpeg(picture: Image.Image, side: int) -> str:
    """A picture of at most this side, as base64."""
    small = picture.copy()
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()


def _map_png(values: Tensor) -> str:
    """A map of evidence without an image, as base64."""
    scale = Scale(0.0, max(float(values.max()), 1e-12), False)
    colours = scale.colours(scale.positions(values.float().numpy())).round().astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).resize((112, 112), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(float(value), 4)
