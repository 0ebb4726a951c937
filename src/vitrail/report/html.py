"""The report as one self-contained HTML file: no server, no network, no script required for the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.report.figures import curve_axis
from vitrail.report.gallery import colour_tables, galleries
from vitrail.report.statistics import Cell
from vitrail.report.summary import BOLD, UNDERLINED, Cells, Summary, format_number, mean_curve, rounded
from vitrail.report.tables import AGREEMENT, about_settings, error_count, error_lines, seconds
from vitrail.report.templates import render_page

SCRIPTS = ("dom.js", "lens.js", "tools.js", "filters.js", "table.js", "curves.js", "gallery.js", "start.js")
LISTED_ERRORS = 200
DIRECTIONS = {1: "higher is better", -1: "lower is better"}


def page(summary: Summary) -> str:
    """The content of the file."""
    return render_page(
        "report",
        SCRIPTS,
        summary=summary,
        results=summary.results,
        data=_data(summary),
        about=about_settings(summary),
        directions=DIRECTIONS,
        cell_texts=_cell_texts,
        seconds=seconds,
        bold=BOLD,
        underlined=UNDERLINED,
        agreement_note=AGREEMENT,
        format_number=format_number,
        errors=list(error_lines(summary)),
        error_count=error_count(summary),
        listed_errors=LISTED_ERRORS,
        environments=[_environment_line(name, about) for name, about in summary.results.environments.items()],
    )


def _data(summary: Summary) -> dict[str, Any]:
    results = summary.results
    counts = Counter(name for setting in results.settings for name in setting.classes)
    slices = [summary.cells, *summary.classes.values()]
    return {
        "methods": results.methods,
        "metrics": [
            {
                "name": column.call,
                "title": column.title,
                "better": column.better,
                "height": column.curve_axis,
                "width": curve_axis(column.call, column.removes),
                "decimals": summary.decimals[k],
            }
            for k, column in enumerate(results.metrics)
        ],
        "settings": [setting.label or setting.model for setting in results.settings],
        "slices": ["", *summary.classes],
        "cells": [_cell_data(summary, cells, cells is summary.cells) for cells in slices],
        "classes": sorted(counts.items()),
        "curves": _curves(summary),
        "galleries": galleries(results),
        "colours": colour_tables(),
    }


def _cell_data(summary: Summary, cells: Cells, all_images: bool) -> Any:
    """Setting, method, metric → [value, mean, interval, count, marks], formatted."""
    return [
        [[_cell_texts(summary, cell, s, k, all_images) for k, cell in enumerate(row)] for row in rows]
        for s, rows in enumerate(cells)
    ]


def _cell_texts(summary: Summary, cell: Cell, setting: int, metric: int, all_images: bool = True) -> list[Any]:
    count = summary.partial(cell, setting) if all_images else f"n = {cell.n}" if cell.n else ""
    return [rounded(cell.mean, 6), summary.text(cell.mean, metric), summary.interval(cell, metric), count, _marks(cell)]


def _marks(cell: Cell) -> str:
    return ("best" if cell.leads else "second" if cell.second else "") + (" tied" if cell.tied else "")


def _curves(summary: Summary) -> list[dict[str, Any]]:
    """Per setting: metric → shares of the image and, per method, [mean, low, high]."""
    settings: list[dict[str, Any]] = []
    for s, setting in enumerate(summary.results.settings):
        metrics: dict[str, Any] = {}
        for m, k in sorted(setting.curves):
            curve = mean_curve(summary, s, m, k)
            if curve is None:
                continue
            entry = metrics.setdefault(str(k), {"shares": [round(float(x), 4) for x in curve.shares], "methods": {}})
            bands = (curve.mean, curve.low, curve.high)
            entry["methods"][str(m)] = [[rounded(y) for y in line] for line in bands]
        settings.append(metrics)
    return settings


def _environment_line(run: str, about: Mapping[str, Any]) -> str:
    """Versions, device, plugins and commit of a run."""
    tables = map(about.get, ("versions", "git", "plugins"))
    versions, git, plugins = (value if isinstance(value, Mapping) else {} for value in tables)
    parts = [
        f"vitrail {about['vitrail']}" if about.get("vitrail") else "",
        about.get("device"),
        about.get("platform"),
        *(f"{name} {versions[name]}" for name in ("torch", "timm") if name in versions),
        *(f"{Path(name).name} {version}" for name, version in plugins.items()),
        f"commit {str(git['commit'])[:12]}{' with changes' if git.get('dirty') else ''}" if "commit" in git else "",
        f"started {str(about['started'])[:19]}" if about.get("started") else "",
    ]
    return f"{run}: " + ", ".join(str(part) for part in parts if part)
