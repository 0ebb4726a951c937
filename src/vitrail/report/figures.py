"""The figures of a report: bars, radar, mean curves, agreement of metrics. Equal results give equal bytes."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.metrics.statistics import Floats
from vitrail.report.statistics import FEWEST_PAIRS, Cell
from vitrail.report.summary import Summary, format_number, mean_curve
from vitrail.report.templates import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "png", "svg")
LINES = 8  # methods in a radar or a panel of curves: more are indistinguishable
FEWEST_AXES = 3
TITLE = 19  # characters above a panel of bars

# Okabe and Ito's palette for colour blindness, without the yellow that is lost in print; dashes and markers distinguish
# the lines in greyscale too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7a5195")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
MARKERS = "osD^vP*X"
BEST, TIED, WORSE, UNTESTED = "#0b4f7a", "#5aa0cc", "#c3d3de", "#d9d9de"
INK, GREY = "#1c1c1e", "#636366"
DIVERGING = "RdBu_r"

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # part of matplotlib
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "text.parse_math": False,  # a "$" in a name is a character
    "pdf.fonttype": 42,
    "svg.hashsalt": "vitrail",
    "svg.fonttype": "path",
    "legend.frameon": False,
}

_SHADES = {
    BEST: "best",
    TIED: "not significantly worse (p ≥ 0.05)",
    WORSE: "significantly worse",
    UNTESTED: "not compared",
}

Drawing = Callable[[Summary, "Figure"], bool]


def draw_all(summary: Summary, formats: Sequence[str], only: Sequence[str] = ()) -> dict[str, bytes]:
    """File name → content of every figure (or ``only`` these) that the results have data for."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawings: Mapping[str, Drawing] = {"bars": bars, "radar": radar, "curves": curves, "agreement": agreement}
    files: dict[str, bytes] = {}
    with matplotlib.rc_context(_STYLE):
        for name, drawing in drawings.items():
            if only and name not in only:
                continue
            figure = Figure(dpi=200, layout="constrained")
            FigureCanvasAgg(figure)
            if drawing(summary, figure):
                files |= {f"{name}.{kind}": _saved(figure, kind) for kind in formats}
    return files


def bars(summary: Summary, figure: Figure) -> bool:
    """One panel per metric: a bar with its interval per method, settings side by side."""
    results, metrics = summary.results, summary.columns
    if not metrics:
        return False
    titles = [_wrapped(results.metrics[k].title) for k in metrics]
    height = 0.45 + len(results.methods) * (0.17 * len(results.settings) + 0.06)
    height += 0.14 * max(title.count("\n") for title in titles)
    panels = _panels(figure, len(metrics), 4, (1.75, height + 0.35), (1.6, 0.5))
    for place, (axes, k) in enumerate(zip(panels, metrics, strict=True)):
        _panel_of_bars(summary, axes, k)
        axes.set_title(titles[place])
        if place % 4:
            axes.set_yticklabels([])
    if len(results.settings) > 1:
        handles = [_patch(COLOURS[s % len(COLOURS)], setting.label) for s, setting in enumerate(results.settings)]
    else:
        shades = {_shade(cell) for row in summary.cells[0] for cell in row if cell.n}
        handles = [_patch(shade, name) for shade, name in _SHADES.items() if shade in shades]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return True


def radar(summary: Summary, figure: Figure) -> bool:
    """One panel per setting: the rim is the best method of each metric, the inner ring the worst."""
    results = summary.results
    metrics_of = {s: _axes_of(summary, s) for s in range(len(results.settings))}
    metrics_of = {s: metrics for s, metrics in metrics_of.items() if len(metrics) >= FEWEST_AXES}
    if not metrics_of:
        return False
    drawn: dict[int, Any] = {}
    panels = _panels(figure, len(metrics_of), 2, (5.6, 5.4), (0, 0.4), projection="polar")
    for axes, (s, metrics) in zip(panels, metrics_of.items(), strict=True):
        _panel_of_radar(summary, axes, s, metrics, drawn)
        axes.set_title(results.settings[s].label, pad=30)
    _legend_of_methods(summary, figure, drawn, "rim: the best method of each metric, inner ring: the worst")
    return True


def curves(summary: Summary, figure: Figure) -> bool:
    """One panel per metric with curves and setting: means with 95 % bands."""
    results = summary.results
    places = sorted({(k, s) for s, setting in enumerate(results.settings) for _, k in setting.curves})
    if not places:
        return False
    settings = len(results.settings)
    columns, height = (min(3, settings), 2.85) if settings > 1 else (3, 2.7)
    drawn: dict[int, Any] = {}
    panels = _panels(figure, len(places), columns, (3.4, height), (0, 0.5))
    for axes, (k, s) in zip(panels, places, strict=True):
        _panel_of_curves(summary, axes, s, k, drawn)
        axes.set_title(_two_lines(results.metrics[k].title, results.settings[s].label))
    _legend_of_methods(summary, figure, drawn)
    return True


def agreement(summary: Summary, figure: Figure) -> bool:
    """Rank correlations of the metrics: of the methods' means, and the mean of per-image correlations."""
    panels = summary.agreement
    if not panels:
        return False
    heights = [0.38 * len(panel.metrics) + 2.0 for panel in panels]
    figure.set_size_inches(0.76 * max(len(panel.metrics) for panel in panels) + 3.4, sum(heights))
    grid = figure.add_gridspec(len(panels), 2, height_ratios=heights)
    image: Any = None
    for row, panel in enumerate(panels):
        halves = ((panel.of_means, "of means"), (panel.by_image, "by image, averaged"))
        for half, (matrix, title) in enumerate(halves):
            axes = figure.add_subplot(grid[row, half])
            image = _matrix(axes, matrix, panel.metrics, named=not half)
            axes.set_title(_two_lines(title, panel.setting.label))
    bar = figure.colorbar(image, ax=figure.axes, location="bottom", shrink=0.6, aspect=40, pad=0.02)
    bar.set_label("Spearman’s correlation over methods, each metric oriented so that higher is better")
    return True


def _panels(
    figure: Figure, count: int, most: int, size: tuple[float, float], margin: tuple[float, float], **options: Any
) -> list[Any]:
    """Axes in rows of at most ``most``; the size of each and the margin of the figure are in inches."""
    columns = min(most, count)
    rows = math.ceil(count / columns)
    figure.set_size_inches(margin[0] + size[0] * columns, size[1] * rows + margin[1])
    return [figure.add_subplot(rows, columns, place + 1, **options) for place in range(count)]


def _panel_of_bars(summary: Summary, axes: Any, metric: int) -> None:
    results = summary.results
    count, many = len(results.methods), len(results.settings)
    thickness = 0.8 / many
    for s in range(many):
        cells = [summary.cells[s][m][metric] for m in range(count)]
        for m, cell in enumerate(cells):
            if not math.isfinite(cell.mean):
                continue
            place = m - 0.4 + thickness * (s + 0.5)
            axes.barh(place, cell.mean, thickness * 0.92, color=COLOURS[s % len(COLOURS)] if many > 1 else _shade(cell))
            if math.isfinite(cell.low):
                for colour, width in (("white", 2.4), (INK, 1.0)):  # visible on dark bars too
                    axes.plot([cell.low, cell.high], [place, place], color=colour, linewidth=width, zorder=3)
    axes.set(ylim=(count - 0.4, -0.6), yticks=range(count))
    axes.set_yticklabels([_short(method, 34) for method in results.methods])
    axes.axvline(0, color=GREY, linewidth=0.6)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=4)
    axes.grid(axis="x", color="#e3e3e8", linewidth=0.5)
    axes.set_axisbelow(True)


def _shade(cell: Cell) -> str:
    if cell.best:
        return BEST if cell.leads else TIED if cell.n >= FEWEST_PAIRS else UNTESTED
    return TIED if cell.tied else UNTESTED if math.isnan(cell.p) else WORSE


def _axes_of(summary: Summary, setting: int) -> list[int]:
    """Metrics with a direction, by which at least two methods differ."""
    metrics = []
    for k, column in enumerate(summary.results.metrics):
        means = [row[k].mean for row in summary.cells[setting] if math.isfinite(row[k].mean)]
        if column.better and len(means) > 1 and max(means) > min(means):
            metrics.append(k)
    return metrics


def _panel_of_radar(summary: Summary, axes: Any, setting: int, metrics: list[int], drawn: dict[int, Any]) -> None:
    results, inner = summary.results, 0.15
    angles = np.linspace(0, 2 * math.pi, len(metrics), endpoint=False)
    means = np.array([[row[k].mean for k in metrics] for row in summary.cells[setting]])
    means[~np.isfinite(means)] = np.nan
    oriented = means * [results.metrics[k].better for k in metrics]
    worst, best = np.nanmin(oriented, axis=0), np.nanmax(oriented, axis=0)
    heights = inner + (1 - inner) * (oriented - worst) / (best - worst)
    for m in summary.drawn_methods(setting, LINES):
        around = np.append(heights[m], heights[m][0])
        style = _style(m)
        (line,) = axes.plot(np.append(angles, 2 * math.pi), around, linewidth=1.4, markersize=4, **style)
        drawn.setdefault(m, line)
    axes.set_theta_offset(math.pi / 2)
    axes.set_theta_direction(-1)
    axes.set(ylim=(0, 1.02), yticks=[inner, 0.5 + inner / 2, 1], yticklabels=[])
    axes.grid(color="#d8d8de", linewidth=0.6)
    axes.spines["polar"].set_visible(False)
    axes.set_xticks(angles)
    axes.set_xticklabels([_axis_name(summary, k, w, b) for k, w, b in zip(metrics, worst, best, strict=True)])
    axes.tick_params(axis="x", pad=5, labelsize=7, colors=INK)
    for name, angle in zip(axes.get_xticklabels(), angles, strict=True):  # labels grow away from the circle
        side = math.sin(angle)
        name.set_ha("center" if abs(side) < 0.1 else "left" if side > 0 else "right")


def _axis_name(summary: Summary, metric: int, worst: float, best: float) -> str:
    column = summary.results.metrics[metric]
    ends = [summary.text(value * column.better, metric) for value in (worst, best)]
    return f"{_short(column.title, 28)}\n{ends[0]} → {ends[1]}"


def _panel_of_curves(summary: Summary, axes: Any, setting: int, metric: int, drawn: dict[int, Any]) -> None:
    column = summary.results.metrics[metric]
    for m in summary.drawn_methods(setting, LINES):
        curve = mean_curve(summary, setting, m, metric)
        if curve is None:
            continue
        style = {name: value for name, value in _style(m).items() if name != "marker"}
        (line,) = axes.plot(100 * curve.shares, curve.mean, linewidth=1.4, **style)
        axes.fill_between(100 * curve.shares, curve.low, curve.high, color=style["color"], alpha=0.12, linewidth=0)
        drawn.setdefault(m, line)
    axes.set(xlim=(0, 100), ylabel=column.curve_axis, xlabel=curve_axis(column.call, column.removes))
    axes.grid(color="#e3e3e8", linewidth=0.5)
    axes.set_axisbelow(True)


def curve_axis(call: str, removes: bool) -> str:
    """The label of the horizontal axis of a metric's curves."""
    unit = "pixels"
    if call.startswith("token_"):
        unit = "squares of patches" if "cells=" in call else "patches"
    first = "least" if call.startswith("negative_auc") else "most"
    return f"{unit} {'removed' if removes else 'inserted'} (%), {first} important first"


def _matrix(axes: Any, matrix: Floats, names: Sequence[str], named: bool) -> Any:
    off_diagonal = np.where(np.eye(len(names), dtype=bool), np.nan, matrix)
    image = axes.imshow(off_diagonal, cmap=DIVERGING, vmin=-1, vmax=1)
    for (a, b), value in np.ndenumerate(matrix):
        if a == b:
            continue
        colour = "white" if abs(value) > 0.65 else INK
        axes.text(b, a, format_number(float(value), 2), ha="center", va="center", fontsize=6.5, color=colour)
    axes.set(xticks=range(len(names)), yticks=range(len(names)))
    axes.set_xticklabels([_short(name, 30) for name in names], rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticklabels([_short(name, 30) for name in names] if named else [])
    axes.tick_params(length=0, colors=INK)
    axes.spines[:].set_visible(False)
    return image


def _style(method: int) -> dict[str, Any]:
    """Colour, dash and marker of a method, the same in every figure."""
    cycle = method // len(COLOURS)
    return {
        "color": COLOURS[method % len(COLOURS)],
        "linestyle": DASHES[(method + cycle) % len(DASHES)],
        "marker": MARKERS[(method + cycle) % len(MARKERS)],
    }


def _legend_of_methods(summary: Summary, figure: Figure, drawn: Mapping[int, Any], note: str = "") -> None:
    names = [_short(summary.results.methods[m], 44) for m in sorted(drawn)]
    total = sum(any(cell.n for rows in summary.cells for cell in rows[m]) for m in range(len(summary.results.methods)))
    selection = f"{len(drawn)} of {total} methods, those with the best mean rank" if len(drawn) < total else ""
    title = "\n".join(filter(None, [note, selection])) or None
    columns = max(1, min(4, int(figure.get_size_inches()[0] // 2.6)))
    figure.legend([drawn[m] for m in sorted(drawn)], names, loc="outside lower center", ncols=columns, title=title,
                  handlelength=3.2)  # fmt: skip


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _short(text: str, most: int) -> str:
    """A name of at most ``most`` characters, with its middle elided if necessary."""
    text = printable(text)
    return text if len(text) <= most else text[: most // 2] + "…" + text[-(most - most // 2 - 1) :]


def _wrapped(title: str) -> str:
    """The title of a narrow panel, wrapped within words; the arrow stays with the last."""
    lines = [""]
    for piece in re.split(r"(?<=[_,])|(?=\()", _short(title, 3 * TITLE)):
        if lines[-1] and len(lines[-1]) + len(piece) > TITLE:
            lines.append("")
        lines[-1] += _short(piece, TITLE)
    return "\n".join(lines)


def _two_lines(title: str, label: str) -> str:
    return "\n".join(_short(line, 46) for line in (title, label) if line)


def _saved(figure: Figure, kind: str) -> bytes:
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[kind]
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, metadata=undated)
    return buffer.getvalue()
