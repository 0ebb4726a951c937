"""The leaderboard: one table of methods over several pairs of model and data, and the page that shows it."""

from __future__ import annotations

import gzip
import hashlib
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from vitrail.bench.costs import measure_cost
from vitrail.bench.store import Store
from vitrail.bench.suite import Pair
from vitrail.calls import call_name
from vitrail.data.crops import Crops
from vitrail.errors import VitrailError
from vitrail.files import reading, save_atomically
from vitrail.methods.base import MethodInfo
from vitrail.models.loading import load
from vitrail.report.results import read_results
from vitrail.report.standings import (
    CONTRARY,
    CONTROL,
    DIRECTIONS,
    HEADLINE,
    NUMBERS,
    SAME,
    Scores,
    Standings,
    standings,
)
from vitrail.report.statistics import Gap, compare, gaps
from vitrail.report.summary import ABSENT, decimals_for, format_number
from vitrail.report.templates import environment, joined_scripts, page_file, policy
from vitrail.version import __version__

if TYPE_CHECKING:
    import pandas as pd

REFERENCE = "decompx.skipplus"
COLUMNS = ("pair", "method", "metric", *NUMBERS, "better")
KEY = ["pair", "method", "metric"]
DIGITS = 5  # significant, of a table
CHEAP = 5.0  # forward passes
LISTED = 5  # pairs of contrary metrics in a sentence
WORDS = {1: "higher", -1: "lower"}
SCRIPTS = ("dom.js", "leaderboard.js")


def write_leaderboard(folder: Path, pairs: Sequence[Pair], highlighted: Collection[str] = ()) -> Path:
    """Writes ``leaderboard.html`` and ``leaderboard.csv`` of the runs in a folder, one per pair.

    Rows that come with vitrail stand beside those measured here.
    """
    import pandas as pd

    measured = [
        summarise_pair(Store(folder / pair.name), pair.name) for pair in pairs if (folder / pair.name / "rows").is_dir()
    ]
    table = merge_tables(shipped_table(), pd.concat(measured) if measured else shipped_table().head(0))
    costs = pd.concat([shipped_costs(), _own_costs(highlighted)])
    write_table(table, folder / "leaderboard.csv")
    path = folder / "leaderboard.html"
    content = page(table, pairs, costs, highlighted)
    save_atomically(path, lambda file: file.write(content.encode()))
    return path


def shipped_table() -> pd.DataFrame:
    """The rows that come with vitrail, measured by ``vitrail bench leaderboard``; none if this version has none."""
    import pandas as pd

    path = Path(str(files("vitrail.report") / "leaderboard.csv.gz"))
    return read_table(path) if path.exists() else pd.DataFrame(columns=list(COLUMNS))


def shipped_costs() -> pd.DataFrame:
    """The costs that come with vitrail, measured by ``tools/costs.py``."""
    import pandas as pd

    return pd.read_csv(str(files("vitrail.report") / "costs.csv"))


def _own_costs(methods: Collection[str]) -> pd.DataFrame:
    """The costs of methods that do not come with vitrail, measured here; none of a method that fails."""
    import pandas as pd

    rows = []
    view = load() if methods else None
    for method in methods:
        assert view is not None
        try:
            cost = measure_cost(method, view, view.preprocess(Crops(1)[0].image)[None])
        except Exception as error:  # a user's method may raise anything
            warnings.warn(f"the cost of {method} is unknown: {error}", stacklevel=2)
        else:
            rows.append((method, cost.forwards, cost.images_per_second))
    return pd.DataFrame(rows, columns=["method", "forwards", "images_per_second"])


def summarise_pair(store: Store, pair: str) -> pd.DataFrame:
    """The rows of one run: a mean per method and metric, and its gap to ``REFERENCE``.

    As in a report, what the plan of the run does not have is left out. Metrics that are not registered in this process
    are left out, too: whether more is better is unknown.
    """
    import pandas as pd

    results = read_results([store.folder])
    if len(results.settings) > 1:
        labels = "; ".join(setting.label for setting in results.settings)
        raise VitrailError(
            f"the run {results.title} holds several settings ({labels}): a pair is one model on one data set, "
            "explained for one kind of class."
        )
    (setting,) = results.settings
    lines = []
    for k, column in enumerate(results.metrics):
        if not column.better:
            continue
        sample = setting.sample(k, column)
        cells = compare(sample, column.better)
        differences = [Gap()] * len(cells)
        if REFERENCE in results.methods:
            differences = gaps(sample, results.methods.index(REFERENCE))
        for method, cell, gap in zip(results.methods, cells, differences, strict=True):
            if cell.n:
                numbers = (cell.mean, cell.low, cell.high, cell.n, gap.mean, gap.low, gap.high)
                lines.append((pair, method, column.call, *numbers, WORDS[column.better]))
    return pd.DataFrame(lines, columns=list(COLUMNS))


def read_table(path: str | Path) -> pd.DataFrame:
    """Reads a table that ``write_table`` wrote."""
    import pandas as pd

    numbers = {name: [""] for name in NUMBERS}
    with reading():
        try:
            table = pd.read_csv(path, keep_default_na=False, na_values=numbers)
        except (ValueError, EOFError, gzip.BadGzipFile) as error:
            raise VitrailError(f"cannot read the leaderboard '{path}': {error}.") from None
    missing = [name for name in COLUMNS if name not in table]
    if missing:
        raise VitrailError(f"'{path}' is no leaderboard: it has no column {', '.join(missing)}.")
    unknown = sorted({str(word) for word in table["better"]} - set(DIRECTIONS))
    if unknown:
        raise VitrailError(f"'{path}': better must be {' or '.join(DIRECTIONS)}, but got {', '.join(unknown)}.")
    return table[list(COLUMNS)]


def write_table(table: pd.DataFrame, path: str | Path) -> None:
    """Writes a table as CSV, compressed if the name ends in .gz; equal tables become equal bytes."""
    text = table[list(COLUMNS)].to_csv(index=False, float_format=f"%.{DIGITS}g", lineterminator="\n")
    content = text.encode()
    if Path(path).suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    save_atomically(path, lambda file: file.write(content))


def merge_tables(shipped: pd.DataFrame, measured: pd.DataFrame) -> pd.DataFrame:
    """Both tables; where they have the same pair, method and metric, the measured row."""
    import pandas as pd

    # Concatenating an empty frame changes the types of the other.
    tables = [table for table in (shipped, measured) if len(table)]
    if len(tables) < 2:
        return (tables or [shipped])[0].reset_index(drop=True)
    return pd.concat(tables).drop_duplicates(KEY, keep="last").reset_index(drop=True)


def strip_name(method: str) -> str:
    """The file name of a method's picture in a gallery: letters that are safe in URLs, distinct for distinct calls."""
    safe = re.sub(r"[^a-z0-9_.]+", "-", method.lower()).strip("-.")
    digest = hashlib.sha256(method.encode()).hexdigest()[:6]
    return f"{safe}.webp" if safe == method else f"{safe}-{digest}.webp"


def page(
    table: pd.DataFrame,
    pairs: Sequence[Pair],
    costs: pd.DataFrame,
    highlighted: Collection[str] = (),
    gallery: Mapping[str, str] | None = None,
    whole: bool = True,
) -> str:
    """The leaderboard as one HTML file, which needs no network.

    Args:
        table: as of ``summarise_pair``, for all pairs.
        pairs: the columns, in order.
        costs: ``method, forwards, images_per_second``: forward passes of the same model that take as long, measured
            on a CPU; not necessarily of all methods.
        highlighted: methods to be marked as the reader's.
        gallery: relative URLs of the methods' pictures; None omits the section.
        whole: False = only one element, for another page, whose styles apply to nothing else.
    """
    return _rendered(_content(table, pairs, costs, highlighted, gallery), whole)


@dataclass(frozen=True)
class _Board:
    """All that the page says of the methods; the lists follow the order of ``numbers.methods``."""

    numbers: Standings
    infos: list[MethodInfo | None]  # None for methods that are not registered here
    forwards: list[float]
    speeds: list[float]

    @property
    def scores(self) -> Scores:
        return self.numbers.scores

    def ignores_class(self, method: int) -> bool:
        info = self.infos[method]
        return info is not None and not info.class_specific

    def explains(self, method: int) -> bool:
        """Whether the map depends on the class, and explains it: a control or a ceiling does not."""
        info = self.infos[method]
        return info is None or (info.class_specific and info.family != "control")

    def best(self, most: float = math.inf) -> int | None:
        """The method with the highest score that explains a class and costs at most so many forward passes.

        Only methods measured on the most pairs compete: the others may have had the easier ones.
        """
        scores = self.scores
        rivals = [m for m in range(len(self.infos)) if self.explains(m) and scores.pairs[m]]
        complete = [m for m in rivals if scores.pairs[m] == max(scores.pairs[r] for r in rivals)]
        affordable = [m for m in complete if math.isinf(most) or self.forwards[m] <= most]
        return max(affordable, key=lambda m: scores.mean[m], default=None)


def _content(
    table: pd.DataFrame,
    pairs: Sequence[Pair],
    costs: pd.DataFrame,
    highlighted: Collection[str],
    gallery: Mapping[str, str] | None,
) -> dict[str, Any]:
    """The values of the template."""
    numbers = standings(table, [pair.name for pair in pairs])
    if not numbers.pairs:
        raise VitrailError("the leaderboard has no rows of the pairs it should show.")
    board = _board(numbers, costs)
    known = {pair.name: pair for pair in pairs}
    columns = [known[name] for name in numbers.pairs]
    metric = next((k for k in numbers.headlines if k is not None), 0)
    decimals = [decimals_for(numbers.mean[:, :, k].ravel().tolist()) for k in range(len(numbers.metrics))]
    order = np.argsort(-np.nan_to_num(numbers.scores.mean, nan=-np.inf), kind="stable")
    agreement = numbers.agreement()
    return {
        "reference": REFERENCE,
        "cheap": f"{CHEAP:g}",
        "pairs": columns,
        "cards": _cards(board),
        "advice": _advice(board),
        "metrics": numbers.metrics,
        "metric": metric,
        "better": numbers.better,
        "rows": [_row(board, int(m), metric, decimals[metric], highlighted) for m in order],
        "agreement": agreement,
        "verdict": _verdict(agreement.groups, agreement.contrary()),
        "format_number": format_number,
        "gallery": [(int(m), numbers.methods[m], gallery[numbers.methods[m]])
                    for m in order if numbers.methods[m] in gallery] if gallery else [],
        "images": [_images(numbers, p) for p in range(len(numbers.pairs))],
        "data": _data(board, columns, metric, decimals, highlighted),
        "version": __version__,
    }  # fmt: skip


def _rendered(content: Mapping[str, Any], whole: bool) -> str:
    """The template with its content, style and script; ``whole`` makes it a file of its own."""
    script, style = joined_scripts(SCRIPTS), page_file("leaderboard.css")
    allowed = policy(script, style, "'self' file: data:" if content["gallery"] else "data:")
    template = environment().get_template("leaderboard.html")
    return template.render(content, whole=whole, policy=allowed, style=Markup(style), script=Markup(script))


def _board(numbers: Standings, costs: pd.DataFrame) -> _Board:
    def measured(column: str) -> list[float]:
        values = dict(zip(costs["method"], costs[column], strict=True))
        return [float(values.get(method, math.nan)) for method in numbers.methods]

    infos = [_info(method) for method in numbers.methods]
    return _Board(numbers, infos, measured("forwards"), measured("images_per_second"))


def _info(method: str) -> MethodInfo | None:
    from vitrail.methods.registry import get_method

    try:
        return get_method(call_name(method)).info
    except VitrailError:
        return None


def _cards(board: _Board) -> list[dict[str, str]]:
    """The recommended methods with their numbers."""
    cheap, best = board.best(CHEAP), board.best()
    titles: dict[int, str] = {}
    if cheap is not None:
        titles[cheap] = f"Best within {CHEAP:g} forward passes"
    if best is not None:
        titles[best] = "Best at any cost" if best != cheap else f"Best within {CHEAP:g} forward passes, and at any cost"
    scores = board.scores
    return [
        {
            "title": title,
            "method": board.numbers.methods[m],
            "score": format_number(float(scores.mean[m]), 2),
            "interval": _interval(float(scores.low[m]), float(scores.high[m]), 2),
            "cost": _passes(board.forwards[m]),
            "leads": f"{board.numbers.leads(m)} of {scores.pairs[m]}",
        }
        for m, title in titles.items()
    ]


def _advice(board: _Board) -> list[Markup]:
    """Sentences on which method to use, and how sure that is."""
    numbers, cheap, best = board.numbers, board.best(CHEAP), board.best()
    names = [_code(method) for method in numbers.methods]
    lines = []
    if best is None:
        lines.append(
            Markup("No method has a score: {} or {} was not measured.").format(_code(HEADLINE), _code(CONTROL))
        )
    elif cheap is None:
        lines.append(
            Markup("Use {}, which has the highest score. No method is known to cost at most {} forward passes.").format(
                names[best], f"{CHEAP:g}"
            )
        )
    elif cheap == best:
        lines.append(
            Markup("Use {}: it costs {}, and no method that explains a class scores higher at any cost.").format(
                names[best], _passes(board.forwards[best])
            )
        )
    else:
        lines.append(_comparison(board, cheap, best))
    ignoring = [call_name(method) for m, method in enumerate(numbers.methods) if board.ignores_class(m)]
    bases = dict.fromkeys(name.partition(".")[0] for name in ignoring if name != CONTROL)
    if bases:
        note = Markup("Some methods, and their aggregations, ignore the class; do not explain a class with them: {}.")
        lines.append(note.format(_listed([_code(base) for base in bases])))
    if best is not None:
        lines.append(_certainty(numbers))
    return lines


def _comparison(board: _Board, cheap: int, best: int) -> Markup:
    """The best cheap method against the best of all."""
    numbers = board.numbers
    gap = numbers.difference(best, cheap)
    interval = _interval(gap.low, gap.high, 2)
    settled = "so the images leave open which is better" if gap.low <= 0 else "more than the choice of images explains"
    return Markup(
        "Use {} unless time does not matter: it costs {}. {} scores {} higher ({}), {}, and costs {}."
    ).format(
        _code(numbers.methods[cheap]), _passes(board.forwards[cheap]), _code(numbers.methods[best]),
        format_number(gap.mean, 2), f"95 % interval {interval}" if interval else "interval unknown", settled,
        _passes(board.forwards[best]),
    )  # fmt: skip


def _certainty(numbers: Standings) -> Markup:
    """What the score is, and on how much it rests."""
    scored = [p for p, span in enumerate(numbers.spans) if math.isfinite(span)]
    counts = [int(np.nanmax(numbers.n[p, :, k])) for p in scored if (k := numbers.headlines[p]) is not None]
    return Markup(
        "The score is {}; on each pair of model and images, {} counts as 0 and the best method as 1, and the score is "
        "the mean over pairs. It rests on {} images in {} {}; on another model or other images the order may differ."
    ).format(
        _code(HEADLINE), _code(CONTROL), f"{sum(counts):,}", len(counts), "pair" if len(counts) == 1 else "pairs"
    )  # fmt: skip


def _verdict(groups: Sequence[Sequence[str]], contrary: Sequence[tuple[str, str, float]]) -> list[Markup]:
    """Sentences on which metrics measure the same, and which contradict each other."""
    lines = []
    if groups:
        listed = Markup("; ").join(_listed([_code(metric) for metric in group]) for group in groups)
        lines.append(
            Markup("These rank the methods alike (ρ ≥ {} within each group), so one of each suffices: {}.").format(
                SAME, listed
            )
        )
    if contrary:
        examples = Markup("; ").join(
            Markup("{} and {} ({})").format(_code(a), _code(b), format_number(r, 2)) for a, b, r in contrary[:LISTED]
        )
        count = (
            "1 pair of metrics contradicts" if len(contrary) == 1 else f"{len(contrary)} pairs of metrics contradict"
        )
        most = ": " if len(contrary) <= LISTED else ", most of all "
        lines.append(Markup("{} each other (ρ ≤ {:g}){}{}.").format(count, CONTRARY, most, examples))
    return lines


def _row(board: _Board, m: int, metric: int, decimals: int | None, highlighted: Collection[str]) -> dict[str, Any]:
    """A line of the table, as formatted texts."""
    numbers, scores, info = board.numbers, board.scores, board.infos[m]
    partial = 0 < scores.pairs[m] < np.isfinite(numbers.spans).sum()
    return {
        "number": m,
        "method": numbers.methods[m],
        "family": info.family if info else "",
        "ignores_class": board.ignores_class(m),
        "yours": numbers.methods[m] in highlighted,
        "cost": _rounded(board.forwards[m]),
        "speed": _rounded(board.speeds[m]),
        "score": format_number(float(scores.mean[m]), 2),
        "interval": _interval(float(scores.low[m]), float(scores.high[m]), 2),
        "partial": f"{scores.pairs[m]} of {np.isfinite(numbers.spans).sum()} pairs" if partial else "",
        "cells": [
            (
                format_number(float(numbers.mean[p, m, metric]), decimals),
                _interval(float(numbers.low[p, m, metric]), float(numbers.high[p, m, metric]), decimals),
                ("", "tied", "best")[numbers.marks[p, m, metric]],
            )
            for p in range(len(numbers.pairs))
        ],
    }


def _data(
    board: _Board, pairs: Sequence[Pair], metric: int, decimals: Sequence[int | None], highlighted: Collection[str]
) -> dict[str, Any]:
    """What the script needs."""
    numbers, scores = board.numbers, board.scores
    return {
        "methods": [
            {
                "name": method,
                "family": info.family if info else "",
                "ignoresClass": board.ignores_class(m),
                "yours": method in highlighted,
                "cost": _short(board.forwards[m]),
                "speed": _short(board.speeds[m]),
                "score": _short(float(scores.mean[m])),
                "shares": [_short(float(share)) for share in numbers.shares[:, m]],
            }
            for m, (method, info) in enumerate(zip(numbers.methods, board.infos, strict=True))
        ],
        "metrics": [
            {"name": name, "better": better, "decimals": places}
            for name, better, places in zip(numbers.metrics, numbers.better, decimals, strict=True)
        ],
        "metric": metric,
        "cheap": CHEAP,
        "pairs": [pair.title for pair in pairs],
        "cells": [
            [_cells(numbers, p, k) for p in range(len(numbers.pairs))] for k in range(len(numbers.metrics))
        ],
    }  # fmt: skip


def _cells(numbers: Standings, p: int, k: int) -> list[Any] | None:
    """[means, lows, highs, counts, marks] over methods, a mark per letter; None if nothing was measured."""
    if np.isnan(numbers.mean[p, :, k]).all():
        return None
    columns = [[_short(float(value)) for value in cube[p, :, k]] for cube in (numbers.mean, numbers.low, numbers.high)]
    counts = np.nan_to_num(numbers.n[p, :, k]).astype(int).tolist()
    return [*columns, counts, "".join(str(mark) for mark in numbers.marks[p, :, k])]


def _images(numbers: Standings, p: int) -> str:
    """The number of images of a pair; a range where methods or metrics were measured on different ones."""
    most = int(np.nanmax(numbers.n[p]))
    counts = {int(count) for count in numbers.n[p][~np.isnan(numbers.n[p])]}
    return f"{most:,} images" if len(counts) == 1 else f"up to {most:,} images"


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _rounded(value: float) -> str:
    """Two significant digits, without an exponent."""
    if math.isnan(value):
        return ABSENT
    if value >= 10:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{value:.1f}" if value >= 0.1 else f"{float(f'{value:.2g}'):f}".rstrip("0")


def _passes(forwards: float) -> str:
    return "an unknown amount of time" if math.isnan(forwards) else f"about {_rounded(forwards)} forward passes"


def _interval(low: float, high: float, decimals: int | None) -> str:
    return "" if math.isnan(low) else f"[{format_number(low, decimals)}, {format_number(high, decimals)}]"


def _code(name: str) -> Markup:
    return Markup("<code>{}</code>").format(name)


def _listed(names: Sequence[Markup]) -> Markup:
    return Markup(", ").join(names)
