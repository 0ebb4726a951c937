"""The report as one HTML file that needs nothing else: no server, no network, no script for the table."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from html import escape
from importlib.resources import files
from typing import Any

from vitrail.report.figures import curve_axis
from vitrail.report.gallery import colour_tables, galleries
from vitrail.report.rows import Column, Results
from vitrail.report.statistics import Cell
from vitrail.report.summary import Agreement, Cells, Summary, mean_curve, number
from vitrail.report.tables import AGREEMENT, about_settings, error_count, error_lines, merged_agreement, seconds
from vitrail.version import __version__

SCRIPTS = ("tools.js", "filters.js", "table.js", "curves.js", "gallery.js", "start.js")
ERRORS_TOLD = 200

_DIRECTIONS = {1: "more is better", -1: "less is better", 0: ""}


def page(summary: Summary) -> str:
    """The whole file."""
    script = '(() => {\n"use strict";\n' + "".join(_file(name) for name in SCRIPTS) + "})();"
    style = _file("report.css")
    places = {
        "policy": escape(_policy(script, style)),
        "style": style,
        "script": script,
        "data": embedded_json(_data(summary)),
        "title": _text(f"{summary.results.title} – vitrail report"),
        "name": _text(summary.results.title),
        "about": _items(about_settings(summary)),
        "table": "".join(_table(summary)),
        "legend": _text(" ".join(summary.legend())),
        "agreement": "".join(_agreement(summary)),
        "errors": _errors(summary),
        "footer": _footer(summary.results),
    }
    # In one pass: what is put in is never searched for places again.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: places[found[1]], _file("report.html"))


def embedded_json(value: Any) -> str:
    """JSON that is safe within a script element: no letter of it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _policy(script: str, style: str) -> str:
    """Only this very script and style run; nothing is fetched."""
    own = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{own[0]}'; style-src 'sha256-{own[1]}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _file(name: str) -> str:
    return (files("vitrail.report") / "page" / name).read_text(encoding="utf-8")


def _text(value: str) -> str:
    """Text that means itself in HTML; letters that cannot be seen become spaces."""
    return escape("".join(letter if letter.isprintable() else " " for letter in value))


def _name(value: str) -> str:
    """A name that may break after its punctuation, kept from turning the direction of the text around it."""
    parts = re.split(r"(?<=[_.(,/])(?=\S)", value)
    return f"<bdi>{'<wbr>'.join(map(_text, parts))}</bdi>"


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{_name(line)}</li>" for line in lines)


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
        "settings": [one.label or one.model for one in results.settings],
        "slices": ["", *summary.classes],
        "cells": [_cell_data(summary, cells, place == 0) for place, cells in enumerate(slices)],
        "classes": sorted(counts.items()),
        "curves": _curves(summary),
        "galleries": galleries(results),
        "colours": colour_tables(),
    }


def _cell_data(summary: Summary, cells: Cells, whole: bool) -> Any:
    """Setting, method, metric → [value, mean, interval, count, marks], as text that needs no formatting."""
    return [
        [[_cell_texts(summary, cell, s, k, whole) for k, cell in enumerate(row)] for row in own]
        for s, own in enumerate(cells)
    ]


def _cell_texts(summary: Summary, cell: Cell, setting: int, metric: int, whole: bool) -> list[Any]:
    value = float(f"{cell.mean:.6g}") if math.isfinite(cell.mean) else None
    count = summary.partial(cell, setting) if whole else f"n = {cell.n}" if cell.n else ""
    return [value, summary.text(cell.mean, metric), summary.interval(cell, metric), count, _marks(cell)]


def _marks(cell: Cell) -> str:
    return ("best" if cell.best else "second" if cell.second else "") + (" tied" if cell.tied else "")


def _curves(summary: Summary) -> list[dict[str, Any]]:
    """Per setting: metric → shares of the image and, per method, [mean, low, high]."""
    found: list[dict[str, Any]] = []
    for s, setting in enumerate(summary.results.settings):
        own: dict[str, Any] = {}
        for m, k in sorted(setting.curves):
            curve = mean_curve(summary, s, m, k)
            if curve is None:
                continue
            place = own.setdefault(str(k), {"shares": [round(float(x), 4) for x in curve.shares], "methods": {}})
            bands = (curve.mean, curve.low, curve.high)
            place["methods"][str(m)] = [[float(f"{y:.4g}") for y in line] for line in bands]
        found.append(own)
    return found


def _table(summary: Summary) -> Iterator[str]:
    results = summary.results
    yield '<table id="results"><caption class="unseen">Methods by metrics</caption><thead>'
    yield from _head(summary)
    yield "</thead><tbody>"
    for m, method in enumerate(results.methods):
        yield f'<tr data-m="{m}"><th scope="row">{_name(method)}</th>'
        for k in summary.columns:
            for s in summary.present(k):
                yield _td(_cell_texts(summary, summary.cells[s][m][k], s, k, True), s, k)
        for s, setting in enumerate(results.settings):
            value = float(setting.seconds[m])
            known = f"{value:.6g}" if math.isfinite(value) else ""
            yield f'<td data-s="{s}" data-k="time" data-value="{known}">{_text(seconds(value))}</td>'
        yield "</tr>"
    yield "</tbody></table>"


def _head(summary: Summary) -> Iterator[str]:
    """The heads of the columns; of several settings in two rows, metrics above and settings below."""
    results = summary.results
    many = len(results.settings) > 1
    columns = [(str(k), _metric_head(results.metrics[k]), summary.present(k)) for k in summary.columns]
    columns.append(("time", "s&nbsp;/&nbsp;image", list(range(len(results.settings)))))
    yield f'<tr><th scope="col" data-k="name"{" rowspan=2" if many else ""}>method</th>'
    for k, text, places in columns:
        kind = f'scope="colgroup" colspan="{len(places)}" class="group"' if many else 'scope="col" data-s="0"'
        yield f'<th data-k="{k}" {kind}>{text}</th>'
    yield "</tr>"
    if many:
        yield "<tr>"
        for k, _, places in columns:
            for s in places:
                yield f'<th scope="col" data-k="{k}" data-s="{s}">{_name(results.settings[s].label)}</th>'
        yield "</tr>"


def _metric_head(column: Column) -> str:
    arrow = f'&nbsp;<span title="{_DIRECTIONS[column.better]}">{column.arrow}</span>' if column.arrow else ""
    return _name(column.call) + arrow


def _td(texts: list[Any], setting: int, metric: int) -> str:
    _, mean, interval, count, marks = texts
    parts = [f'<span class="mean">{_text(mean)}</span>']
    parts += [f'<span class="{name}">{_text(text)}</span>' for name, text in (("interval", interval), ("count", count))]
    return f'<td data-s="{setting}" data-k="{metric}" class="{marks}">{"".join(parts)}</td>'


def _agreement(summary: Summary) -> Iterator[str]:
    found = [(s, own) for s, own in enumerate(summary.agreement) if own is not None]
    if not found:
        return
    yield f'<section id="agreement"><h2>Do the metrics agree?</h2><p class="note">{_text(AGREEMENT)}</p>'
    for s, own in found:
        label = summary.results.settings[s].label
        yield f"<h3>{_name(label)}</h3>" if label else ""
        yield from _matrix(summary, own)
    yield "</section>"


def _matrix(summary: Summary, found: Agreement) -> Iterator[str]:
    names = [_name(summary.results.metrics[k].call) for k in found.metrics]
    yield '<div class="scroll" tabindex="0" role="region" aria-label="Rank correlations"><table class="matrix">'
    yield "<tr><td></td>"
    yield "".join(f'<th scope="col">{name}</th>' for name in names) + "</tr>"
    for name, row in zip(names, merged_agreement(found), strict=True):
        yield f'<tr><th scope="row">{name}</th>'
        for r in row:
            shade = "" if math.isnan(r) else f' class="r{round(4 * abs(r))} {"for" if r >= 0 else "against"}"'
            yield f"<td{shade}>{'' if math.isnan(r) else _text(number(float(r), 2))}</td>"
        yield "</tr>"
    yield "</table></div>"


def _errors(summary: Summary) -> str:
    told = list(error_lines(summary))
    if not told:
        return ""
    more = f"<li>… and {len(told) - ERRORS_TOLD} more kinds</li>" if len(told) > ERRORS_TOLD else ""
    return (
        f'<section id="errors"><h2>Errors: {error_count(summary)}</h2><details><summary>{len(told)} kinds</summary>'
        f"<ul>{_items(told[:ERRORS_TOLD])}{more}</ul></details></section>"
    )


def _footer(results: Results) -> str:
    lines = []
    for name, about in results.environments.items():
        versions = about.get("versions") or {}
        told = [
            f"vitrail {about['vitrail']}" if about.get("vitrail") else "",
            about.get("device"),
            about.get("platform"),
        ]
        told += [f"{key} {versions[key]}" for key in ("torch", "timm") if key in versions]
        git = about.get("git")
        told += [f"commit {str(git['commit'])[:12]}{' with changes' if git.get('dirty') else ''}"] if git else []
        told += [f"started {str(about['started'])[:19]}"] if about.get("started") else []
        lines.append(f"{name}: " + ", ".join(str(one) for one in told if one))
    return f"<ul>{_items(lines)}</ul><p>Report made by vitrail {_text(__version__)}.</p>"
