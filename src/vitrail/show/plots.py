"""Plots of insertion and deletion curves."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from PIL import Image

COLOURS = {"insertion": "#0b7a75", "deletion": "#b5432a"}


def curve_picture(
    curves: Mapping[str, Sequence[float]], values: Mapping[str, float], title: str, scaled: str | None = None
) -> Image.Image:
    """Plots the probability of the class over the fraction of changed pixels, one line per curve with its area.

    ``scaled``: how it is scaled, where it is a score in place of a probability.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves.items():
        share = [100 * i / (len(points) - 1) for i in range(len(points))]
        colour = COLOURS.get(name)
        axes.plot(share, points, label=f"{name} {values[name]:.3f}", color=colour, linewidth=1.8)
        axes.fill_between(share, points, color=colour, alpha=0.08)
    axes.set(xlim=(0, 100), xlabel="pixels inserted or deleted (%), most important first")
    if scaled is None:
        axes.set(ylim=(0, 1.02), ylabel="probability")
    else:
        axes.set_ylabel(f"score, {scaled}")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    buffer.seek(0)
    return Image.open(buffer).convert("RGB")
