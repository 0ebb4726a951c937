"""A report of runs: tables, figures and one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.bench.folders import Place, is_remote
from vitrail.errors import VitrailError
from vitrail.files import write_together
from vitrail.report import figures, html, tables
from vitrail.report.results import read_results
from vitrail.report.summary import Summary, summarise_results

FORMATS = ("html", "md", "tex", "csv", *figures.FORMATS)


def report(
    folders: Sequence[Place], out: Path | None = None, formats: Sequence[str] = (), stale: bool = False
) -> tuple[Summary, list[Path]]:
    """Writes the report of one or more runs, all files or none.

    Args:
        folders: run folders, or addresses of runs in object stores; their settings are shown side by side.
        out: output folder; None = `report` in the folder of the first run, which must not be an address.
        formats: some of ``FORMATS``; empty = all.
        stale: include methods, metrics and versions that are not in the plan, marked as such.
    """
    formats = _checked(formats)
    if out is None and folders and is_remote(folders[0]):
        raise VitrailError(f"a report is written to a folder, not to {folders[0]}: choose one with --out.")
    summary = summarise_results(read_results(folders, stale), with_classes="html" in formats)
    folder = out or Path(folders[0]) / "report"
    contents = _contents(summary, formats)
    write_together({folder / name: content for name, content in contents.items()})
    return summary, [folder / name for name in contents]


def _contents(summary: Summary, formats: Sequence[str]) -> dict[str, bytes]:
    texts: dict[str, str] = {}
    drawn = figures.draw_all(summary, [kind for kind in figures.FORMATS if kind in formats])
    if "html" in formats:
        texts["report.html"] = html.page(summary)
    if "md" in formats:
        texts["report.md"] = tables.markdown(summary, [f"figures/{name}" for name in drawn if name.endswith(".png")])
    if "tex" in formats:
        texts["table.tex"] = tables.latex(summary)
    if "csv" in formats:
        texts |= {"table.csv": tables.wide_csv(summary), "results.csv": tables.long_csv(summary)}
        texts |= {"agreement.csv": tables.agreement_csv(summary), "errors.csv": tables.errors_csv(summary)}
    files = {name: text.encode("utf-8", errors="replace") for name, text in texts.items()}
    return files | {f"figures/{name}": content for name, content in drawn.items()}


def _checked(formats: Sequence[str]) -> list[str]:
    words = [word.strip().lower().lstrip(".") for text in formats for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in FORMATS]
    if unknown:
        raise VitrailError(f"there is no format {', '.join(unknown)}: expected some of {', '.join(FORMATS)}.")
    return words or list(FORMATS)
