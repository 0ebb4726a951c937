"""Puts measured rows into the table that comes with vitrail.

`python tools/leaderboard.py RUN…` shows what runs of `vitrail bench leaderboard` hold; with `--write` it replaces the
rows of src/vitrail/report/leaderboard.csv.gz that they measured on as many images. Runs may hold different methods,
metrics and images of one pair, and may be unfinished: a metric counts on the images on which all its methods were
measured, without the methods that have fewer than `--least` of the images of the others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from vitrail.bench.store import Store, schema
from vitrail.bench.suite import open_suite
from vitrail.report.leaderboard import KEY, merge_tables, shipped_table, summarise_pair, write_table

TABLE = Path(__file__).parents[1] / "src" / "vitrail" / "report" / "leaderboard.csv.gz"
METHOD = ["method", "params"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of vitrail bench leaderboard --out")
    parser.add_argument("--write", action="store_true", help="write the merged table")
    parser.add_argument("--least", type=float, default=0.75, help="share of the images that a method needs (0.75)")
    options = parser.parse_args()
    measured = []
    for pair in open_suite("leaderboard").pairs:
        stores = [Store(run / pair.name) for run in options.runs]
        rows_of_runs = {store: measured_rows(store) for store in stores if store.has_rows}
        if any(map(len, rows_of_runs.values())):
            measured.append(summarised(pair.name, rows_of_runs, options.least))
    if not measured:
        sys.exit("the runs hold no rows of any pair of the leaderboard")
    shipped, rows = shipped_table(), pd.concat(measured)
    before = rows.merge(shipped[[*KEY, "n"]], "left", on=KEY, suffixes=("", "_shipped"))
    fewer = (before["n"] < before["n_shipped"]).to_numpy()
    print(
        f"{len(rows)} rows, {int(before['n_shipped'].isna().sum())} of them new; {fewer.sum()} of fewer images stay out"
    )
    if options.write:
        write_table(merge_tables(shipped, rows[~fewer]), TABLE)


def measured_rows(store: Store) -> pd.DataFrame:
    """The rows that have a value, or to which their metric does not apply: not those of what failed."""
    rows = store.rows()
    return rows[rows["error"].isna()]


def summarised(pair: str, rows_of_runs: Mapping[Store, pd.DataFrame], least: float) -> pd.DataFrame:
    """The lines of the table for one pair, from the rows of all its runs together."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Store(Path(folder) / pair)
        rows = pd.concat(rows_of_runs.values()).drop_duplicates("key", keep="last")
        parts = list(comparable(pair, rows, least))
        whole.begin(next(iter(rows_of_runs)).plan(), {})
        known = pd.concat(parts)[schema().names].astype(object)
        whole.add_rows(known.where(known.notna(), None).to_dict("records"))
        return summarise_pair(whole, pair, covering=True)


def comparable(pair: str, rows: pd.DataFrame, least: float) -> Iterator[pd.DataFrame]:
    """The rows of each metric on the images that all methods have, but for methods that have few."""
    for metric, of_metric in rows.groupby("metric", sort=False):
        counts = of_metric.groupby(METHOD)["image"].nunique()
        few = counts[counts < least * counts.max()].sort_values()
        kept = of_metric[~of_metric.set_index(METHOD).index.isin(few.index)]
        methods = counts.size - few.size
        # Versions of a method have rows of their own, with other keys.
        common = kept.drop_duplicates(["image", *METHOD]).groupby("image").size() == methods
        left_out = f"; left out: {few.size} with at most {few.iloc[-1]}" if few.size else ""
        print(f"{pair} {metric}: {methods} methods, {common.sum()} images{left_out}")
        yield kept[kept["image"].isin(common[common].index)]


if __name__ == "__main__":
    main()
