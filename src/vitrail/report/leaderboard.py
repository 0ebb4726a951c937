"""The leaderboard: one table of methods over several pairs of model and data, and the page that shows it."""

from __future__ import annotations

import gzip
import hashlib
import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitrail.bench.costs import measure_cost
from vitrail.bench.store import Store
from vitrail.bench.suite import Pair
from vitrail.calls import call_name
from vitrail.data.crops import Crops
from vitrail.errors import VitrailError
from vitrail.files import reading, save_atomically
from vitrail.models.loading import load
from vitrail.report.results import read_results
from vitrail.report.standings import (
    CONTRARY,
    CONTROL,
    DIRECTIONS,
    HEADLINE,
    NUMBERS,
    SAME,
    Standings,
    method_info,
    standings,
)
from vitrail.report.statistics import Gap, compare, gaps
from vitrail.report.summary import ABSENT, decimals_for, format_interval, format_number, rounded
from vitrail.report.templates import render_page

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
        summarise_pair(Store(folder / pair.name), pair.name, covering=True)
        for pair in pairs
        if (folder / pair.name / "rows").is_dir()
    ]
    table = merge_tables(shipped_table(), pd.concat(measured) if measured else shipped_table().head(0))
    costs = pd.concat([shipped_costs(), _own_costs(highlighted)])
    write_table(table, folder / "leaderboard.csv")
    path = folder / "leaderboard.html"
    content = page(table, pairs, costs, highlighted)
    save_atomically(path, lambda file: file.write(content.encode()))
    return path


def shipped_table() -> pd.DataFrame:
    """The rows that come with vitrail, measured by ``vitrail bench leaderboard``."""
    return read_table(str(files("vitrail.report") / "leaderboard.csv.gz"))


def shipped_costs() -> pd.DataFrame:
    """The costs that come with vitrail, measured by ``tools/costs.py``."""
    import pandas as pd

    return pd.read_csv(str(files("vitrail.report") / "costs.csv"))


def _own_costs(methods: Collection[str]) -> pd.DataFrame:
    """The costs of methods that do not come with vitrail, measured here; none of a method that fails."""
    import pandas as pd

    rows, view = [], load() if methods else None
    for method in methods:
        assert view is not None
        try:
            cost = measure_cost(method, view, view.preprocess(Crops(1)[0].image)[None])
        except Exception as error:  # a user's method may raise anything
            warnings.warn(f"the cost of {method} is unknown: {error}", stacklevel=2)
        else:
            rows.append((method, cost.forwards, cost.images_per_second))
    return pd.DataFrame(rows, columns=["method", "forwards", "images_per_second"])


def summarise_pair(store: Store, pair: str, covering: bool = False) -> pd.DataFrame:
    """The rows of one run: a mean per method and metric, and its gap to ``REFERENCE``.

    As in a report, what the plan of the run does not have is left out, unless ``covering`` adds it to the plan. Metrics
    that are not registered in this process are left out, too: whether more is better is unknown.
    """
    import pandas as pd

    results = read_results([store.folder], covering=covering)
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
    numbers = standings(table, [pair.name for pair in pairs])
    if not numbers.pairs:
        raise VitrailError("the leaderboard has no rows of the pairs it should show.")
    board = _Board(numbers, costs, highlighted)
    known = {pair.name: pair for pair in pairs}
    columns = [known[name] for name in numbers.pairs]
    metric = next((k for k in numbers.headlines if k is not None), 0)
    decimals = [decimals_for(numbers.mean[:, :, k].ravel().tolist()) for k in range(len(numbers.metrics))]
    return render_page(
        "leaderboard",
        SCRIPTS,
        "'self' file: data:" if gallery else "data:",
        whole=whole,
        board=board,
        numbers=numbers,
        scores=numbers.scores,
        agreement=numbers.agreement(),
        pairs=columns,
        metric=metric,
        decimals=decimals[metric],
        gallery=gallery or {},
        data=_data(board, columns, metric, decimals),
        reference=REFERENCE,
        headline=HEADLINE,
        control=CONTROL,
        cheap_cost=CHEAP,
        same=SAME,
        contrary=CONTRARY,
        most_listed=LISTED,
        number=format_number,
        interval=format_interval,
        spelled=_spelled,
    )


class _Board:
    """All that the page says of the methods; the lists follow the order of ``numbers.methods``."""

    def __init__(self, numbers: Standings, costs: pd.DataFrame, highlighted: Collection[str]) -> None:
        self.numbers = numbers
        self.yours = [method in highlighted for method in numbers.methods]
        self.infos = [method_info(method) for method in numbers.methods]
        known = costs.drop_duplicates("method", keep="last").set_index("method").reindex(numbers.methods)
        self.forwards: list[float] = known["forwards"].tolist()
        self.speeds: list[float] = known["images_per_second"].tolist()

    @property
    def default(self) -> int | None:
        """The method that ``vitrail.explain`` uses by default."""
        return self.numbers.methods.index(REFERENCE) if REFERENCE in self.numbers.methods else None

    @property
    def has_ceiling(self) -> bool:
        """Whether it is known what is attainable."""
        return bool(np.isfinite(self.numbers.attainable).any())

    @property
    def order(self) -> list[int]:
        """The methods by falling score."""
        order = np.argsort(-np.nan_to_num(self.numbers.scores.mean, nan=-np.inf), kind="stable")
        return [int(m) for m in order]

    def family(self, method: int) -> str:
        info = self.infos[method]
        return info.family if info else ""

    def ignores_class(self, method: int) -> bool:
        info = self.infos[method]
        return info is not None and not info.class_specific

    def ignoring(self) -> list[str]:
        """The methods, without their aggregations, whose maps do not depend on the class."""
        names = [call_name(method) for m, method in enumerate(self.numbers.methods) if self.ignores_class(m)]
        return list(dict.fromkeys(name.partition(".")[0] for name in names if name != CONTROL))

    def explains(self, method: int) -> bool:
        """Whether the map depends on the class, and explains it: a control or a ceiling does not."""
        return bool(self.numbers.rivals[method]) and not self.ignores_class(method)

    def best(self, most: float = math.inf) -> int | None:
        """The method with the highest score that explains a class and costs at most so many forward passes.

        Only methods measured on the most pairs compete: the others may have had the easier ones.
        """
        scores = self.numbers.scores
        rivals = [m for m in range(len(self.infos)) if self.explains(m) and scores.pairs[m]]
        complete = [m for m in rivals if scores.pairs[m] == max(scores.pairs[r] for r in rivals)]
        affordable = [m for m in complete if math.isinf(most) or self.forwards[m] <= most]
        return max(affordable, key=lambda m: scores.mean[m], default=None)

    def scored_images(self) -> list[int]:
        """The number of images of each pair that has a score."""
        numbers = self.numbers
        headlines = [(p, k) for p, k in enumerate(numbers.headlines) if k is not None and np.isfinite(numbers.spans[p])]
        return [int(np.nanmax(numbers.n[p, :, k])) for p, k in headlines]

    def images(self, pair: int) -> str:
        """The number of images of a pair; the largest where methods or metrics were measured on different ones."""
        counts = np.unique(self.numbers.n[pair][~np.isnan(self.numbers.n[pair])])
        return f"{'Up to ' if len(counts) > 1 else ''}{int(counts[-1]):,} images"


def _data(board: _Board, pairs: Sequence[Pair], metric: int, decimals: Sequence[int | None]) -> dict[str, Any]:
    """What the script needs."""
    numbers = board.numbers
    return {
        "methods": [
            {
                "name": method,
                "family": board.family(m),
                "ignoresClass": board.ignores_class(m),
                "control": not bool(numbers.rivals[m]),
                "yours": board.yours[m],
                "cost": rounded(board.forwards[m]),
                "speed": rounded(board.speeds[m]),
                "score": rounded(numbers.scores.mean[m]),
                "attainable": rounded(numbers.attainable[m]),
                "shares": [rounded(share) for share in numbers.shares[:, m]],
            }
            for m, method in enumerate(numbers.methods)
        ],
        "metrics": [
            {"name": name, "better": better, "decimals": places}
            for name, better, places in zip(numbers.metrics, numbers.better, decimals, strict=True)
        ],
        "metric": metric,
        "cheap": CHEAP,
        "pairs": [pair.title for pair in pairs],
        "cells": [[_cells(numbers, p, k) for p in range(len(numbers.pairs))] for k in range(len(numbers.metrics))],
    }


def _cells(numbers: Standings, p: int, k: int) -> list[Any] | None:
    """[means, lows, highs, counts, marks] over methods, a mark per letter; None if nothing was measured."""
    if np.isnan(numbers.mean[p, :, k]).all():
        return None
    columns = [[rounded(value) for value in cube[p, :, k]] for cube in (numbers.mean, numbers.low, numbers.high)]
    counts = np.nan_to_num(numbers.n[p, :, k]).astype(int).tolist()
    return [*columns, counts, "".join(str(mark) for mark in numbers.marks[p, :, k])]


def _spelled(value: float) -> str:
    """Two significant digits, without an exponent."""
    if math.isnan(value):
        return ABSENT
    if value >= 10:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{value:.1f}" if value >= 0.1 else f"{float(f'{value:.2g}'):f}".rstrip("0")
