"""A report of runs: tables, figures and one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vitrail.errors import VitrailError
from vitrail.files import write_together
from vitrail.report import figures, html, tables
from vitrail.report.rows import read_results
from vitrail.report.summary import Summary, summarise_results

FORMATS = ("html", "md", "tex", "csv", *figures.FORMATS)


def report(folders: Sequence[Path], out: Path | None = None, formats: Sequence[str] = ()) -> tuple[Summary, list[Path]]:
    """Reads runs and writes their report into ``out``; all files or none.

    Args:
        folders: run folders; settings of several stand side by side.
        out: None = `report` in the folder of the first run.
        formats: some of ``FORMATS``; none = all.
    """
    wanted = _checked(formats)
    summary = summarise_results(read_results(folders), with_classes="html" in wanted)
    place = out or Path(folders[0]) / "report"
    found = _contents(summary, wanted)
    write_together({place / name: content for name, content in found.items()})
    return summary, [place / name for name in found]


def _contents(summary: Summary, formats: Sequence[str]) -> dict[str, bytes]:
    texts: dict[str, str] = {}
    drawn = figures.draw_all(summary, [one for one in figures.FORMATS if one in formats])
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
    wanted = [own.strip().lower().lstrip(".") for one in formats for own in one.split(",") if own.strip()]
    unknown = [one for one in wanted if one not in FORMATS]
    if unknown:
        raise VitrailError(f"there is no format {', '.join(unknown)}: expected some of {', '.join(FORMATS)}.")
    return wanted or list(FORMATS)
