"""``vitrail report``: tables, figures and an HTML page from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vitrail.cli.options import Json, comma_separated
from vitrail.cli.outputs import plural, print_json


def report(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN", help="Runs of vitrail bench: folders, or addresses as s3://BUCKET/RUN."),
    ],
    out: Annotated[Path | None, typer.Option(help="Output folder; default: report in the first run folder.")] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMATS",
            help="html, md, tex, csv, pdf, png, svg, comma-separated or repeated; default: all.",
        ),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Include methods, metrics and versions that are not in the plan, marked.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write tables, figures and an HTML page from benchmark runs."""
    from vitrail.report.report import report as write_report
    from vitrail.report.tables import error_count, long_rows

    console = Console(stderr=as_json, highlight=False)
    summary, paths = write_report(runs, out, comma_separated(formats), stale)
    results = summary.results
    for index, setting in enumerate(results.settings):
        name = f"{setting.label}: " if setting.label else ""
        methods = sum(any(cell.n for cell in row) for row in summary.cells[index])
        metrics = sum(index in summary.present(column) for column in summary.columns)
        counts = [plural(len(setting.images), "image"), plural(methods, "method"), plural(metrics, "metric")]
        console.print(escape(name + ", ".join(counts)))
    unmeasured = [metric.call for column, metric in enumerate(results.metrics) if column not in summary.columns]
    if unmeasured:
        console.print(f"[yellow]No image could be measured by {escape(', '.join(unmeasured))}[/]")
    if results.stale:
        console.print(f"{results.stale} rows that are not in the plan are left out; --stale shows them")
    if error_count(summary):
        console.print(f"[yellow]{plural(error_count(summary), 'error')}[/], listed in the report")
    for path in sorted(paths, key=lambda path: path.suffix != ".html"):
        console.print(f"→ [bold]{escape(str(path))}[/]", soft_wrap=True)
    if as_json:
        print_json({
            "files": paths,
            "results": list(long_rows(summary)),
            "unmeasured": unmeasured,
            "stale": results.stale,
            "errors": error_count(summary),
        })  # fmt: skip
