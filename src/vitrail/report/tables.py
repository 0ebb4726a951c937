"""The tables of a report: Markdown, LaTeX (booktabs) and CSV."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from vitrail.report.summary import ABSENT, BOLD, UNDERLINED, MetricAgreement, Summary, format_number
from vitrail.report.templates import printable
from vitrail.version import __version__

MARKDOWN_COLUMNS = 8  # for several settings side by side
LATEX_COLUMNS = 5
LISTED_ERRORS = 20
LONG = "run data model model_hash explained method metric better mean low high n p rank seconds".split()
EXPLAINED = {
    "predicted": "the predicted class",
    "label": "the true class",
    "region": "the class of the annotated object in its region",
    "box": "the detection of the annotated object",
}
AGREEMENT = (
    "Spearman’s rank correlation over methods, each metric oriented so that higher is better: 1 = the same order, −1 = "
    "the opposite. Above the diagonal: of the methods’ means; below it: the mean of per-image correlations."
)

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "−": r"$-$",
    "–": "--", "’": "'", "“": "``", "”": "''", "×": r"$\times$", "≈": r"$\approx$", "≥": r"$\geq$", "∞": r"$\infty$",
    "·": r"$\cdot$", "…": r"\ldots{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """The metrics of one table, each with all settings side by side; times only in the last table."""

    metrics: list[int]
    last: bool

    def rows(
        self, summary: Summary, code: Callable[[str], str], text: Callable[[str], str], cell: Callable[..., str]
    ) -> Iterator[list[str]]:
        """The cells of each method, in the markup of a format."""
        for m, method in enumerate(summary.results.methods):
            cells = [cell(summary, s, m, k) for k in self.metrics for s in summary.present(k)]
            times = [text(seconds(setting.seconds[m])) for setting in summary.results.settings if self.last]
            yield [code(method), *cells, *times]


def blocks(summary: Summary, most: int | None) -> list[Block]:
    """The metrics, split into tables of at most ``most`` columns."""
    metrics = summary.columns
    step = max(1, len(metrics) if most is None else most // len(summary.results.settings))
    parts = [metrics[start : start + step] for start in range(0, len(metrics), step)] or [[]]
    return [Block(part, part is parts[-1]) for part in parts]


def markdown(summary: Summary, figures: Sequence[str] = ()) -> str:
    """The report as Markdown; ``figures`` are paths of images to include."""
    results = summary.results
    lines = [f"# {_plain(results.title)}", ""]
    lines += [f"- {_plain(line)}" for line in about_settings(summary)]
    most = MARKDOWN_COLUMNS if len(results.settings) > 1 else None
    for block in blocks(summary, most):
        rows = block.rows(summary, _code, _plain, _markdown_cell)
        lines += ["", *_markdown_table(_markdown_header(summary, block), rows)]
    lines += ["", f"**Bold**: {BOLD}. {_ins('Underlined')}: {UNDERLINED}. {_plain(' '.join(summary.legend()))}"]
    for path in figures:
        lines += ["", f"![{_plain(path)}]({path})"]
    lines += _markdown_agreement(summary) + _markdown_errors(summary)
    return "\n".join([*lines, "", f"Made by vitrail {__version__}.", ""])


def about_settings(summary: Summary) -> list[str]:
    """Images, data, model and explained class of each setting."""
    lines = []
    for setting in summary.results.settings:
        name = f"{setting.label}: " if setting.label else ""
        lines.append(
            f"{name}{len(setting.images)} images of {setting.data_name}, model {setting.model}, "
            f"{EXPLAINED.get(setting.explained, setting.explained)} explained (run {setting.run})"
        )
    return lines


def latex(summary: Summary) -> str:
    """The tables as LaTeX, for the package booktabs."""
    tables = [_latex_results(summary, block, number) for number, block in enumerate(blocks(summary, LATEX_COLUMNS), 1)]
    tables += [_latex_agreement(agreement, number) for number, agreement in enumerate(summary.agreement, 1)]
    return "\n".join([r"% needs \usepackage{booktabs}", *tables])


def wide_csv(summary: Summary) -> str:
    """One line per method, as in the other tables."""
    results = summary.results
    header = ["method"]
    lines: list[list[Any]] = [[method] for method in results.methods]
    for k, column in enumerate(results.metrics):
        for s, setting in enumerate(results.settings):
            name = " · ".join(filter(None, [column.title, setting.label]))
            header += [name, *(f"{name} {statistic}" for statistic in ("low", "high", "n", "p"))]
            for line, row in zip(lines, summary.cells[s], strict=True):
                line += [row[k].mean, row[k].low, row[k].high, row[k].n, row[k].p]
    for setting in results.settings:
        header.append(" · ".join(filter(None, ["seconds per image", setting.label])))
        for line, time in zip(lines, setting.seconds, strict=True):
            line.append(time)
    return _csv(header, lines)


def long_rows(summary: Summary) -> Iterator[dict[str, Any]]:
    """One row per setting, method and metric."""
    results, better = summary.results, {1: "higher", -1: "lower", 0: ""}
    for s, setting in enumerate(results.settings):
        about = (setting.run, setting.data, setting.model, setting.model_hash, setting.explained)
        for m, method in enumerate(results.methods):
            for column, cell in zip(results.metrics, summary.cells[s][m], strict=True):
                numbers = (cell.mean, cell.low, cell.high, cell.n, cell.p, cell.rank or None, setting.seconds[m])
                values = (*about, method, column.name, better[column.better], *numbers)
                yield dict(zip(LONG, values, strict=True))


def long_csv(summary: Summary) -> str:
    """The same as CSV."""
    lines = [["" if value is None else value for value in row.values()] for row in long_rows(summary)]
    return _csv(LONG, lines)


def agreement_csv(summary: Summary) -> str:
    """Both correlations of every pair of metrics, one line per setting and pair."""
    lines = []
    for agreement in summary.agreement:
        setting = agreement.setting
        for (a, metric), (b, other) in product(enumerate(agreement.metrics), repeat=2):
            correlations = (agreement.of_means[a, b], agreement.by_image[a, b])
            lines.append([setting.run, setting.data, setting.model, setting.explained, metric, other, *correlations])
    return _csv("run data model explained metric other of_means by_image".split(), lines)


def errors_csv(summary: Summary) -> str:
    header = "run model method metric count example reason".split()
    lines = [[getattr(group, name) for name in header] for group in summary.results.errors]
    return _csv([*header[:-1], "error"], lines)


def error_lines(summary: Summary) -> Iterator[str]:
    """One line per kind of error."""
    for group in summary.results.errors:
        source = f"{group.method}, {group.metric}" if group.method else "the image was left out"
        yield f"{group.count} × {source} ({group.model}; first {group.example}): {group.reason}"


def error_count(summary: Summary) -> int:
    return sum(group.count for group in summary.results.errors)


def _markdown_header(summary: Summary, block: Block) -> list[str]:
    results = summary.results
    labels = [f"<br>{_plain(setting.label)}" if setting.label else "" for setting in results.settings]
    times = [f"s / image{label}" for label in labels if block.last]
    titles = [_plain(results.metrics[k].title) + labels[s] for k in block.metrics for s in summary.present(k)]
    return ["method", *titles, *times]


def _markdown_cell(summary: Summary, setting: int, method: int, metric: int) -> str:
    cell = summary.cells[setting][method][metric]
    mean = summary.text(cell.mean, metric)
    mean = f"**{mean}**" if cell.leads else _ins(mean) if cell.second else mean
    partial = summary.partial(cell, setting)
    parts = [mean, summary.interval(cell, metric), f"({partial})" if partial else "", "≈" if cell.tied else ""]
    return " ".join(filter(None, parts))


def _markdown_table(header: Sequence[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [list(header), ["---", *["---:"] * (len(header) - 1)], *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _markdown_agreement(summary: Summary) -> list[str]:
    lines: list[str] = []
    for agreement in summary.agreement:
        label, names = agreement.setting.label, [_plain(metric) for metric in agreement.metrics]
        lines += ["", f"## Do the metrics agree{f': {_plain(label)}' if label else ''}?", "", AGREEMENT]
        correlations = [[format_number(r, 2) for r in row] for row in agreement.merged]
        rows = ([name, *row] for name, row in zip(names, correlations, strict=True))
        lines += ["", *_markdown_table(["", *names], rows)]
    return lines


def _markdown_errors(summary: Summary) -> list[str]:
    errors = list(error_lines(summary))
    if not errors:
        return []
    lines = ["", f"## Errors: {error_count(summary)}", "", *(f"- {_plain(line)}" for line in errors[:LISTED_ERRORS])]
    return lines + ([f"- … and {len(errors) - LISTED_ERRORS} more kinds"] if len(errors) > LISTED_ERRORS else [])


def _latex_results(summary: Summary, block: Block, number: int) -> str:
    rows = list(block.rows(summary, _latex_code, tex, _latex_cell))
    settings, legend = "; ".join(about_settings(summary)), " ".join(summary.legend())
    caption = f"{settings}. Bold: {BOLD}; underlined: {UNDERLINED}. {legend}"
    return _latex_table("l" + "r" * (len(rows[0]) - 1), _latex_header(summary, block), rows, caption, str(number))


def _latex_table(columns: str, header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, label: str) -> str:
    body = [r"\toprule", *header, r"\midrule", *map(_latex_row, rows), r"\bottomrule"]
    lines = [r"\begin{table}", r"  \centering", r"  \small", rf"  \begin{{tabular}}{{{columns}}}"]
    lines += [*(f"    {line}" for line in body), r"  \end{tabular}", rf"  \caption{{{tex(caption)}}}"]
    return "\n".join(["", *lines, rf"  \label{{tab:vitrail-{label}}}", r"\end{table}", ""])


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_header(summary: Summary, block: Block) -> list[str]:
    results = summary.results
    titles = [tex(results.metrics[k].title) for k in block.metrics] + (["s / image"] if block.last else [])
    if len(results.settings) == 1:
        return [_latex_row(["method", *titles])]
    places = [summary.present(k) for k in block.metrics] + ([[*range(len(results.settings))]] if block.last else [])
    groups, rules, end = [], [], 1
    for title, present in zip(titles, places, strict=True):
        groups.append(rf"\multicolumn{{{len(present)}}}{{c}}{{{title}}}")
        rules.append(rf"\cmidrule(lr){{{end + 1}-{end + len(present)}}}")
        end += len(present)
    labels = [tex(results.settings[s].label) for present in places for s in present]
    return [_latex_row(["", *groups]), " ".join(rules), _latex_row(["method", *labels])]


def _latex_cell(summary: Summary, setting: int, method: int, metric: int) -> str:
    cell = summary.cells[setting][method][metric]
    mean = tex(summary.text(cell.mean, metric))
    mean = rf"\textbf{{{mean}}}" if cell.leads else rf"\underline{{{mean}}}" if cell.second else mean
    mean += r"$^{\approx}$" if cell.tied else ""
    small = ", ".join(filter(None, [summary.interval(cell, metric), summary.partial(cell, setting)]))
    return f"{mean} {{\\scriptsize {tex(small)}}}" if small else mean


def _latex_agreement(agreement: MetricAgreement, number: int) -> str:
    names = [_latex_code(metric) for metric in agreement.metrics]
    numbers = [f"({i + 1})" for i in range(len(names))]
    correlations = [[tex(format_number(r, 2)) for r in row] for row in agreement.merged]
    rows = [[*line[:2], *line[2]] for line in zip(numbers, names, correlations, strict=True)]
    header = [_latex_row(["", "metric", *numbers])]
    label = agreement.setting.label
    caption = f"{label}: {AGREEMENT}" if label else AGREEMENT
    return _latex_table("rl" + "r" * len(names), header, rows, caption, f"agreement-{number}")


def tex(text: str) -> str:
    """Text escaped for LaTeX."""
    return "".join(_LATEX.get(letter, letter) for letter in _one_line(text))


def _latex_code(text: str) -> str:
    return rf"\texttt{{{tex(text)}}}"


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())


def _plain(text: str) -> str:
    """Text escaped for Markdown, also within a table."""
    escaped = html.escape(_one_line(text), quote=False)
    return re.sub(r"([\\`*_{}\[\]|!#~$])", r"\\\1", escaped)


def _code(text: str) -> str:
    """Code within a Markdown table: more backticks than any inside, and escaped bars."""
    text = _one_line(text).replace("|", "\\|")
    longest = max(map(len, re.findall(r"`+", text)), default=0)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{'`' * (longest + 1)}{space}{text}{space}{'`' * (longest + 1)}"


def _ins(text: str) -> str:
    return f"<ins>{text}</ins>"  # <u> is not rendered everywhere


def seconds(value: float) -> str:
    """A time as in the tables."""
    if math.isnan(value):
        return ABSENT
    return "<0.001" if value < 0.001 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _csv(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Numbers to six digits, nothing for NaN."""
    import pandas as pd

    return pd.DataFrame(lines, columns=header).to_csv(index=False, float_format="%.6g", lineterminator="\n")
