"""The images of a report: their selection, and a compact encoding for the browser."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vitrail.bench.store import Store
from vitrail.calls import split_call
from vitrail.errors import VitrailError
from vitrail.metrics.statistics import Floats
from vitrail.report.results import STALE, Results, Setting, normal_call
from vitrail.report.summary import rounded, thinned
from vitrail.show.colours import Scale

if TYPE_CHECKING:
    import pandas as pd

IMAGES = 60  # in all settings together
FEWEST = 8  # per setting
MAX_CHARACTERS = 6_000_000  # of all pictures, maps and curves
CURVE_POINTS = 41
SHADES = 256


def galleries(results: Results) -> list[dict[str, Any]]:
    """The images of each setting; without stored pictures only numbers and curves."""
    count = len(results.settings)
    most, budget = max(FEWEST, IMAGES // count), MAX_CHARACTERS // count
    return [_gallery(results, setting, most, budget) for setting in results.settings]


def worst_first(values: Floats, better: Sequence[int], among: Sequence[int], most: int) -> list[int]:
    """At most ``most`` images, the worst by each metric in turn (by the mean of all methods)."""
    orders = []
    for k, direction in enumerate(better):
        column = values[:, :, k]
        known = ~np.isnan(column)
        counts = known.sum(1)
        means = np.where(known, column, 0).sum(1) / np.where(counts, counts, 1) * direction
        if direction and counts.any():
            orders.append(sorted((i for i in among if counts[i]), key=lambda i: means[i]))
    in_turn = [image for images in zip_longest(*orders) for image in images if image is not None]
    return list(dict.fromkeys([*in_turn, *among]))[:most]


def colour_tables() -> dict[str, str]:
    """The colours of both scales of `vitrail.show`: 256 × RGB each."""
    positions = np.linspace(0, 1, SHADES, dtype=np.float32)
    scales = {"signed": Scale(-1.0, 1.0, True), "unsigned": Scale(0.0, 1.0, False)}
    return {name: encoded(scale.colours(positions).round()) for name, scale in scales.items()}


def encoded(values: Any) -> str:
    """Numbers 0…255 as base64."""
    return base64.b64encode(np.asarray(values, dtype=np.uint8).tobytes()).decode()


def _gallery(results: Results, setting: Setting, most: int, budget: int) -> dict[str, Any]:
    pictures = _pictures(setting)
    place = {image: i for i, image in enumerate(setting.images)}
    with_picture = [place[image] for image in pictures.index if image in place] if len(pictures) else []
    better = [column.better for column in results.metrics]
    selected = worst_first(setting.values, better, sorted(with_picture) or range(len(place)), most)
    maps = _maps(results, setting, [setting.images[i] for i in selected])
    ranges = {k: _range(setting, k, selected) for k in sorted({k for _, k in setting.curves})}
    entries: list[dict[str, Any]] = []
    for i in selected:
        entry = _entry(setting, i, maps, ranges, pictures)
        budget -= _characters(entry)
        if entries and budget < 0:
            break
        entries.append(entry)
    axes = {str(k): _curve_axis(results, setting, k, ends) for k, ends in ranges.items()}
    return {
        "total": len(setting.images),
        "pictures": len(with_picture),
        "maps": bool(maps),
        "axes": axes,
        "images": entries,
    }


def _pictures(setting: Setting) -> pd.DataFrame:
    pictures = Store(setting.folder).pictures()
    return pictures[pictures["model"] == setting.model].set_index("image")


def _entry(
    setting: Setting, i: int, maps: dict[tuple[str, int], list[Any]], ranges: dict[int, tuple[float, float]],
    pictures: pd.DataFrame,
) -> dict[str, Any]:  # fmt: skip
    image, methods = setting.images[i], range(setting.values.shape[1])
    entry: dict[str, Any] = {
        "id": image,
        "class": setting.classes[i],
        "values": [[rounded(value) for value in row] for row in setting.values[i]],
        "maps": [maps.get((image, m)) for m in methods],
        "curves": {str(k): [_curve(setting, i, m, k, ends) for m in methods] for k, ends in ranges.items()},
    }
    if image in pictures.index:
        about = pictures.loc[image]
        entry["jpeg"] = base64.b64encode(about["jpeg"]).decode()
        entry["label"], entry["predicted"] = str(about["label"]), str(about["predicted"])
        entry["probability"] = rounded(float(about["probability"]))
    return entry


def _maps(results: Results, setting: Setting, images: Sequence[str]) -> dict[tuple[str, int], list[Any]]:
    """(image, method) → [rows, columns, signed, positions on the colour scale]."""
    calls = [call.removesuffix(STALE) for call in results.methods]
    place = {call: calls.index(call) for call in calls}
    signed = [is_signed(call) for call in calls]
    encoded_maps: dict[tuple[str, int], list[Any]] = {}
    for maps in Store(setting.folder).map_parts():
        for name, image, call in _named(list(maps), setting, set(images)):
            m = place.get(normal_call(call))
            if m is not None:
                encoded_maps[image, m] = encoded_map(maps[name], signed[m])
    return encoded_maps


def _named(names: Sequence[str], setting: Setting, images: set[str]) -> Iterator[tuple[str, str, str]]:
    """Name, image and method of the maps of some images; an image's name may itself contain a bar."""
    start, end = f"{setting.model}|", f"|{setting.explained}"
    for name in names:
        if not (name.startswith(start) and name.endswith(end)):
            continue
        rest = name[len(start) : -len(end)]
        for bar in (at for at, letter in enumerate(rest) if letter == "|"):
            if rest[:bar] in images:
                yield name, rest[:bar], rest[bar + 1 :]


def encoded_map(values: np.ndarray[Any, Any], signed: bool | None) -> list[Any]:
    """[rows, columns, signed, positions on the colour scale] of a map."""
    numbers = torch.from_numpy(values.astype(np.float32))
    scale = Scale.of(numbers, signed)
    neutral = 0.0 if scale.signed else scale.low
    places = scale.positions(numbers.nan_to_num(neutral, scale.high, scale.low).numpy())
    return [*values.shape, int(scale.signed), encoded((places * (SHADES - 1)).round())]


@lru_cache(maxsize=256)
def is_signed(call: str) -> bool | None:
    """Whether a method's maps are signed; None = decided by the values."""
    from vitrail.methods.registry import get_method

    try:
        return get_method(split_call(call)[0]).info.signed
    except VitrailError:
        return None


def _range(setting: Setting, metric: int, images: Sequence[int]) -> tuple[float, float]:
    """The range of the curves of some images; (0, 1) if it contains them all."""
    points = [curves[list(images)] for (_, k), curves in setting.curves.items() if k == metric]
    known = np.concatenate([values[np.isfinite(values)] for values in points])
    if not known.size:
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    return (0.0, 1.0) if low >= 0 and high <= 1 else (low, high if high > low else low + 1)


def _curve(setting: Setting, i: int, method: int, metric: int, ends: tuple[float, float]) -> str | None:
    points = setting.curves.get((method, metric))
    if points is None or not np.isfinite(points[i]).all():
        return None
    low, high = ends
    return encoded(((thinned(points[i][None], CURVE_POINTS)[0] - low) / (high - low) * 255).round())


def _curve_axis(results: Results, setting: Setting, metric: int, ends: tuple[float, float]) -> dict[str, Any]:
    points = max(curves.shape[1] for (_, k), curves in setting.curves.items() if k == metric)
    shares = thinned(results.metrics[metric].shares(points)[None], CURVE_POINTS)[0]
    return {"shares": [round(float(share), 4) for share in shares], "low": ends[0], "high": ends[1]}


def _characters(entry: dict[str, Any]) -> int:
    maps = sum(len(encoded_map[3]) for encoded_map in entry["maps"] if encoded_map)
    curves = sum(len(curve) for curves in entry["curves"].values() for curve in curves if curve)
    return len(entry.get("jpeg", "")) + maps + curves + 8 * sum(map(len, entry["values"]))
