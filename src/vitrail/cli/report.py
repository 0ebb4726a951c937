"""``vitrail report``: tables, figures and one HTML file of runs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vitrail.report.report import report
from vitrail.report.tables import error_count


def run(folders: list[Path], out: Path | None, formats: list[str]) -> list[Path]:
    """Writes the report of some runs and says where it is."""
    told = Console(highlight=False)
    summary, paths = report(folders, out, formats)
    results = summary.results
    for place, one in enumerate(results.settings):
        name = f"{one.label}: " if one.label else ""
        methods = sum(any(cell.n for cell in row) for row in summary.cells[place])
        metrics = sum(place in summary.present(k) for k in summary.columns)
        told.print(escape(f"{name}{len(one.images)} images, {methods} methods, {metrics} metrics"))
    nowhere = [one.call for k, one in enumerate(results.metrics) if k not in summary.columns]
    if nowhere:
        told.print(f"[yellow]No image could be measured by {escape(', '.join(nowhere))}[/]")
    if error_count(summary):
        told.print(f"[yellow]{error_count(summary)} errors[/], listed in the report")
    for path in sorted(paths, key=lambda one: one.suffix != ".html"):
        told.print(f"→ [bold]{escape(str(path))}[/]", soft_wrap=True)
    return paths
