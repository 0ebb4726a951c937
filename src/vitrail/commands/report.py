"""``vitrail report``: tables, figures and one HTML file of runs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from vitrail.bench.report import report
from vitrail.bench.tables import error_count


def run(folders: list[Path], out: Path | None, formats: list[str]) -> list[Path]:
    """Writes the report of some runs and says where it is."""
    told = Console(highlight=False)
    summary, paths = report(folders, out, formats)
    results = summary.results
    for one in results.settings:
        name = f"{one.label}: " if one.label else ""
        told.print(
            escape(f"{name}{len(one.images)} images, {len(results.methods)} methods, {len(results.metrics)} metrics")
        )
    if error_count(summary):
        told.print(f"[yellow]{error_count(summary)} errors[/], listed in the report")
    for path in sorted(paths, key=lambda one: one.suffix != ".html"):
        told.print(f"→ [bold]{escape(str(path))}[/]", soft_wrap=True)
    return paths
