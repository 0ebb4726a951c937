"""The tables of a report: Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitrail.report.statistics import Cell, Floats
from vitrail.report.summary import ABSENT, Agreement, Summary, number
from vitrail.version import __version__

MARKDOWN_COLUMNS = 8  # of several settings side by side
LATEX_COLUMNS = 5
ERRORS_TOLD = 20
AGREEMENT = (
    "Spearman’s rank correlation over methods, each metric turned so that more is better: 1 = the same order, −1 = the "
    "opposite. Above the diagonal of the methods’ means, below it the mean of each image’s own correlation."
)

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "−": r"$-$",
    "–": "--", "’": "'", "“": "``", "”": "''", "×": r"$\times$", "≈": r"$\approx$", "≥": r"$\geq$", "∞": r"$\infty$",
    "·": r"$\cdot$", "…": r"\ldots{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Metrics that share a table, each with all settings side by side; times only in the last."""

    metrics: list[int]
    last: bool


def blocks(summary: Summary, most: int | None) -> list[Block]:
    """Metrics in tables of at most so many columns."""
    metrics = summary.columns
    step = max(1, len(metrics) if most is None else most // len(summary.results.settings))
    parts = [metrics[start : start + step] for start in range(0, len(metrics), step)] or [[]]
    return [Block(part, place == len(parts) - 1) for place, part in enumerate(parts)]


def markdown(summary: Summary, figures: Sequence[str] = ()) -> str:
    """The whole report as text; ``figures`` are pictures to show, by path."""
    results = summary.results
    lines = [f"# {_plain(results.title)}", ""]
    lines += [f"- {_plain(one)}" for one in about_settings(summary)]
    most = MARKDOWN_COLUMNS if len(results.settings) > 1 else None
    for block in blocks(summary, most):
        lines += ["", *_markdown_table(_headers(summary, block, "<br>"), _markdown_rows(summary, block))]
    lines += ["", f"**Bold**: best. {_ins('Underlined')}: second best. {_plain(' '.join(summary.legend()))}"]
    for path in figures:
        lines += ["", f"![{_plain(path)}]({path})"]
    lines += _markdown_agreement(summary) + _markdown_errors(summary)
    return "\n".join([*lines, "", f"Made by vitrail {__version__}.", ""])


def about_settings(summary: Summary) -> list[str]:
    """What was measured: model, data, class explained, number of images."""
    told = []
    for one in summary.results.settings:
        name = f"{one.label}: " if one.label else ""
        told.append(
            f"{name}{len(one.images)} images of {one.data_name}, model {one.model}, the "
            f"{'true' if one.explained == 'label' else one.explained} class explained (run {one.run})"
        )
    return told


def latex(summary: Summary) -> str:
    """The tables as LaTeX, for the package booktabs."""
    lines = [r"% needs \usepackage{booktabs}"]
    for place, block in enumerate(blocks(summary, LATEX_COLUMNS)):
        lines += ["", *_latex_table(summary, block, place)]
    for place, (setting, found) in enumerate(zip(summary.results.settings, summary.agreement, strict=True)):
        if found is not None:
            title = f"{setting.label}: {AGREEMENT}" if setting.label else AGREEMENT
            lines += ["", *_latex_agreement(summary, found, title, place)]
    return "\n".join([*lines, ""])


def wide_csv(summary: Summary) -> str:
    """One line per method, as the other tables have it; numbers to six digits."""
    results = summary.results
    header = ["method"]
    for column in results.metrics:
        for setting in results.settings:
            name = " · ".join(filter(None, [column.title, setting.label]))
            header += [name, *(f"{name} {what}" for what in ("low", "high", "n", "p"))]
    header += [" · ".join(filter(None, ["seconds per image", setting.label])) for setting in results.settings]
    lines = [header]
    for m, method in enumerate(results.methods):
        line = [method]
        for k in range(len(results.metrics)):
            for s in range(len(results.settings)):
                cell = summary.cells[s][m][k]
                line += [_digits(cell.mean), _digits(cell.low), _digits(cell.high), str(cell.n), _digits(cell.p)]
        lines.append([*line, *(_digits(setting.seconds[m]) for setting in results.settings)])
    return _csv(lines)


def long_csv(summary: Summary) -> str:
    """One line per setting, method and metric."""
    results = summary.results
    header = "run data model model_hash explained method metric better mean low high n p rank seconds".split()
    lines = [header]
    better = {1: "higher", -1: "lower", 0: ""}
    for s, setting in enumerate(results.settings):
        about = [setting.run, setting.data, setting.model, setting.model_hash, setting.explained]
        for m, method in enumerate(results.methods):
            for k, column in enumerate(results.metrics):
                cell = summary.cells[s][m][k]
                numbers = [_digits(value) for value in (cell.mean, cell.low, cell.high)]
                tail = [str(cell.n), _digits(cell.p), str(cell.rank or ""), _digits(setting.seconds[m])]
                lines.append([*about, method, column.call, better[column.better], *numbers, *tail])
    return _csv(lines)


def agreement_csv(summary: Summary) -> str:
    """Both correlations of every pair of metrics, one line per setting and pair."""
    lines = [["run", "data", "model", "explained", "metric", "other", "of_means", "by_image"]]
    for setting, found in zip(summary.results.settings, summary.agreement, strict=True):
        if found is None:
            continue
        about = [setting.run, setting.data, setting.model, setting.explained]
        calls = list(enumerate(summary.results.metrics[k].call for k in found.metrics))
        for a, one in calls:
            for b, other in calls:
                lines.append([*about, one, other, _digits(found.of_means[a, b]), _digits(found.by_image[a, b])])
    return _csv(lines)


def errors_csv(summary: Summary) -> str:
    lines = [["run", "model", "method", "metric", "count", "example", "error"]]
    for one in summary.results.failures:
        lines.append([one.run, one.model, one.method, one.metric, str(one.count), one.example, one.reason])
    return _csv(lines)


def error_lines(summary: Summary) -> Iterator[str]:
    """What went wrong, one line each."""
    for one in summary.results.failures:
        what = f"{one.method}, {one.metric}" if one.method else "the image could not be read"
        yield f"{one.count} × {what} ({one.model}; first {one.example}): {one.reason}"


def error_count(summary: Summary) -> int:
    return sum(one.count for one in summary.results.failures)


def _headers(summary: Summary, block: Block, line_break: str) -> list[str]:
    results = summary.results
    labels = [line_break + _plain(one.label) if one.label else "" for one in results.settings]
    times = [f"s / image{label}" for label in labels] if block.last else []
    titles = [_plain(results.metrics[k].title) + labels[s] for k in block.metrics for s in summary.present(k)]
    return ["method", *titles, *times]


def _markdown_rows(summary: Summary, block: Block) -> Iterator[list[str]]:
    results = summary.results
    for m, method in enumerate(results.methods):
        cells = [_markdown_cell(summary, s, m, k) for k in block.metrics for s in summary.present(k)]
        times = [_plain(seconds(one.seconds[m])) for one in results.settings] if block.last else []
        yield [_code(method), *cells, *times]


def _markdown_cell(summary: Summary, setting: int, method: int, metric: int) -> str:
    cell = summary.cells[setting][method][metric]
    mean = summary.text(cell.mean, metric)
    mean = f"**{mean}**" if cell.best else _ins(mean) if cell.second else mean
    partial = summary.partial(cell, setting)
    told = [mean, summary.interval(cell, metric), f"({partial})" if partial else "", "≈" if cell.tied else ""]
    return " ".join(filter(None, told))


def _markdown_table(header: Sequence[str], rows: Iterator[list[str]]) -> list[str]:
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _markdown_agreement(summary: Summary) -> list[str]:
    lines: list[str] = []
    for setting, found in zip(summary.results.settings, summary.agreement, strict=True):
        if found is None:
            continue
        name = f": {_plain(setting.label)}" if setting.label else ""
        lines += ["", f"## Do the metrics agree{name}?", "", AGREEMENT]
        merged = merged_agreement(found)
        header = ["", *(_plain(summary.results.metrics[k].call) for k in found.metrics)]
        rows = ([header[a + 1], *(number(r, 2) for r in row)] for a, row in enumerate(merged))
        lines += ["", *_markdown_table(header, rows)]
    return lines


def merged_agreement(found: Agreement) -> Floats:
    """One matrix of two symmetric ones; its diagonal says nothing."""
    whole = np.triu(found.of_means, 1) + np.tril(found.by_image, -1)
    np.fill_diagonal(whole, math.nan)
    return whole


def _markdown_errors(summary: Summary) -> list[str]:
    told = list(error_lines(summary))
    if not told:
        return []
    lines = ["", f"## Errors: {error_count(summary)}", "", *(f"- {_plain(line)}" for line in told[:ERRORS_TOLD])]
    return lines + ([f"- … and {len(told) - ERRORS_TOLD} more kinds"] if len(told) > ERRORS_TOLD else [])


def _latex_table(summary: Summary, block: Block, place: int) -> list[str]:
    results = summary.results
    count = sum(len(summary.present(k)) for k in block.metrics) + block.last * len(results.settings)
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \small",
        r"  \begin{tabular}{l" + "r" * count + "}",
        r"    \toprule",
    ]
    lines += [f"    {line}" for line in _latex_header(summary, block)] + [r"    \midrule"]
    for m, method in enumerate(results.methods):
        cells = [_latex_cell(summary, s, m, k) for k in block.metrics for s in summary.present(k)]
        times = [tex(seconds(one.seconds[m])) for one in results.settings] if block.last else []
        lines.append("    " + " & ".join([_latex_code(method), *cells, *times]) + r" \\")
    caption = (
        "; ".join(about_settings(summary)) + ". Bold: best; underlined: second best. " + " ".join(summary.legend())
    )
    return lines + [
        r"    \bottomrule", r"  \end{tabular}", rf"  \caption{{{tex(caption)}}}",
        rf"  \label{{tab:vitrail-{place + 1}}}", r"\end{table}",
    ]  # fmt: skip


def _latex_header(summary: Summary, block: Block) -> list[str]:
    results = summary.results
    titles = [tex(results.metrics[k].title) for k in block.metrics] + (["s / image"] if block.last else [])
    if len(results.settings) == 1:
        return [" & ".join(["method", *titles]) + r" \\"]
    places = [summary.present(k) for k in block.metrics] + ([[*range(len(results.settings))]] if block.last else [])
    groups, rules, end = [], [], 1
    for title, own in zip(titles, places, strict=True):
        groups.append(rf"\multicolumn{{{len(own)}}}{{c}}{{{title}}}")
        rules.append(rf"\cmidrule(lr){{{end + 1}-{end + len(own)}}}")
        end += len(own)
    labels = [tex(results.settings[s].label) for own in places for s in own]
    return [" & ".join(["", *groups]) + r" \\", " ".join(rules), " & ".join(["method", *labels]) + r" \\"]


def _latex_cell(summary: Summary, setting: int, method: int, metric: int) -> str:
    cell: Cell = summary.cells[setting][method][metric]
    mean = tex(summary.text(cell.mean, metric))
    mean = rf"\textbf{{{mean}}}" if cell.best else rf"\underline{{{mean}}}" if cell.second else mean
    mean += r"$^{\approx}$" if cell.tied else ""
    small = ", ".join(filter(None, [summary.interval(cell, metric), summary.partial(cell, setting)]))
    return f"{mean} {{\\scriptsize {tex(small)}}}" if small else mean


def _latex_agreement(summary: Summary, found: Agreement, title: str, place: int) -> list[str]:
    matrix = merged_agreement(found)
    names = [_latex_code(summary.results.metrics[k].call) for k in found.metrics]
    numbers = [rf"({i + 1})" for i in range(len(names))]
    lines = [r"\begin{table}", r"  \centering", r"  \small", r"  \begin{tabular}{rl" + "r" * len(names) + "}"]
    lines += [r"    \toprule", "    " + " & ".join(["", "metric", *numbers]) + r" \\", r"    \midrule"]
    for i, name in enumerate(names):
        lines.append("    " + " & ".join([numbers[i], name, *(tex(number(r, 2)) for r in matrix[i])]) + r" \\")
    return lines + [
        r"    \bottomrule", r"  \end{tabular}", rf"  \caption{{{tex(title)}}}",
        rf"  \label{{tab:vitrail-agreement-{place + 1}}}", r"\end{table}",
    ]  # fmt: skip


def tex(text: str) -> str:
    """Text that means itself in LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in _one_line(text))


def _latex_code(text: str) -> str:
    return rf"\texttt{{{tex(text)}}}"


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _plain(text: str) -> str:
    """Text that means itself in Markdown, in a table too."""
    escaped = html.escape(_one_line(text), quote=False)
    return re.sub(r"([\\`*_{}\[\]|!#~$])", r"\\\1", escaped)


def _code(text: str) -> str:
    """Code in a table of Markdown: longer quotes than any inside, and no bar that divides."""
    text = _one_line(text).replace("|", "\\|")
    longest = max((len(own) for own in re.findall(r"`+", text)), default=0)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{'`' * (longest + 1)}{space}{text}{space}{'`' * (longest + 1)}"


def _ins(text: str) -> str:
    return f"<ins>{text}</ins>"  # <u> is not shown everywhere


def seconds(value: float) -> str:
    """A time as the tables show it."""
    if math.isnan(value):
        return ABSENT
    return "<0.001" if value < 0.001 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _digits(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _csv(lines: Sequence[Sequence[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(lines)
    return buffer.getvalue()
