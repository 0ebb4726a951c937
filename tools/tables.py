"""Writes the tables of the pages that are made from code and from measurements.

`python tools/tables.py` writes them all; with `--check` it only says which pages are out of date. A table stands
between `<!-- table: NAME -->` and `<!-- end -->`, and NAME is a function of this file.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import vitrail
from vitrail.calls import join_call, split_call
from vitrail.cli.reproduce import list_targets
from vitrail.methods.base import MethodInfo
from vitrail.methods.registry import ALIASES, get_method

DOCS = Path(__file__).parents[1] / "docs"
METHODS = DOCS / "methods"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = {"gradient": "gradients", "cam": "cams", "mask": "masks"}  # families whose page has another name
TITLES = {  # of the families, in the order of the tables
    "decomposition": "Decomposition",
    "gradient": "Gradients",
    "relevance": "Relevance",
    "transformation": "Vector transformation",
    "markov": "Markov chains",
    "cam": "Class activation maps",
    "attention": "Attention",
    "mask": "Masks",
    "control": "Control",
}
SIGNED = {True: "yes", False: "no", None: "if any value is below 0"}
DATA = ("scenes", "photo", "pets", "imagenette")  # tables of results
SHORT = {"att_ixg.plus": "att_cat"}  # the name that people know
EFFORT = ("masks", "steps")
QUALITY, POINTING, TELLING = "insertion_minus_deletion", "pointing_game", "discriminativity"
README_METHODS = ("decompx.skipplus", "full_grad_plus.skipplus(rule=frozen)", "tis", "att_cat(rule=frozen)", "gen_att",
                  "vtranm", "att_cat", "vit_cx", "rollout", "rise", "random")  # fmt: skip

MEAN = "mean"  # over the data sets, in the place of one

Numbers = dict[tuple[str, str, str], float]  # method, data set, metric → mean


def main() -> None:
    stale = []
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n{found[3]}", old)
        if new != old and "--check" not in sys.argv:
            page.write_text(new, encoding="utf-8")
        elif new != old:
            stale.append(page.name)
    if stale:
        sys.exit(f"{', '.join(stale)} out of date: run python tools/tables.py")


def pages() -> list[Path]:
    """Every page that holds a table of this file."""
    every = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in every if BLOCK.search(page.read_text(encoding="utf-8"))]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# Methods, from the registry


def bare() -> dict[str, MethodInfo]:
    """The methods without the compositions, by family."""
    found = {name: info for name, info in vitrail.list_methods().items() if "." not in name}
    rank = {family: place for place, family in enumerate(TITLES)}
    return dict(sorted(found.items(), key=lambda item: (rank[item[1].family], item[0])))


def page_of(family: str) -> str | None:
    name = PAGES.get(family, family) + ".md"
    return name if (METHODS / name).exists() else None


def methods() -> str:
    rows = []
    for name, info in bare().items():
        page = page_of(info.family)
        sums = [other.partition(".")[2] for other in vitrail.list_methods(f"{name}.*")]
        rows.append(
            (
                f"`{name}`",
                f"[{info.family}]({page})" if page else info.family,
                "yes" if info.class_specific else "no",
                info.level,
                SIGNED[info.signed],
                passes(info),
                " ".join(f"`.{own}`" for own in sorted(sums, key=("plus", "skipplus", "rollout").index)) or "–",
                info.summary.replace("``", "`"),
            )
        )
    return table("id|family|for a class|map|signed|F\u00a0+\u00a0B|sums over layers|what it is".split("|"), rows)


def passes(info: MethodInfo) -> str:
    return f"{info.cost[0]:g}\u00a0+\u00a0{info.cost[1]:g}"  # never broken over two lines


def parameters() -> str:
    rows = []
    for name, info in bare().items():
        known = [f"`{key}={value!r}`".replace("'", '"') for key, value in info.params.items() if key != "protocol"]
        protocols = [f"`{one}`" for one in info.protocols if one != "default"]
        rows.append((f"`{name}`", ", ".join(known) or "–", ", ".join(protocols) or "–", info.paper))
    return table(["id", "parameters and their defaults", "other protocols", "paper"], rows)


def aliases() -> str:
    return table(["alias", "is"], [(f"`{alias}`", f"`{name}`") for alias, name in sorted(ALIASES.items())])


def families() -> str:
    """For the README: which methods there are."""
    rows = []
    for family, title in TITLES.items():
        names = [f"`{name}`" for name, info in bare().items() if info.family == family]
        page = page_of(family)
        rows.append((f"[{title}](docs/methods/{page})" if page else title, " ".join(names)))
    return table(["family", "methods"], rows)


def classes() -> str:
    """For the reference: the class of every method, by family."""
    parts = []
    for family, title in TITLES.items():
        own = [get_method(name) for name, info in bare().items() if info.family == family]
        paths = "\n\n".join(f"::: {cls.__module__}.{cls.__qualname__}" for cls in own)
        parts.append(f"## {title}\n\n{paths}\n")
    return "\n".join(parts)


# The papers' tables


def papers() -> str:
    rows = [(f"`{one['target']}`", one["what"], one["models"], one["data"]) for one in list_targets()]
    return table(["target", "what", "models", "data"], rows)


# Measurements, from docs/results/*.csv and docs/costs.csv


def known(call: str) -> str:
    """A method or metric as people call it; how many masks or steps it used is told beside the table."""
    name, params = split_call(call)
    return join_call(SHORT.get(name, name), {key: value for key, value in params.items() if key not in EFFORT})


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def results() -> Numbers:
    found: Numbers = {}
    for data in DATA:
        path = DOCS / "results" / f"{data}.csv"
        for row in read(path) if path.exists() else ():
            if row["mean"]:
                found[known(row["method"]), data, known(row["metric"])] = float(row["mean"])
    return found


def costs() -> dict[str, float]:
    """Method → how many forward passes its time would do for; without masks= where both are known."""
    rows = sorted(read(DOCS / "costs.csv"), key=lambda row: "masks=" not in row["method"])
    return {known(row["method"]): float(row["forwards"]) for row in rows}


def told(numbers: Numbers, method: str, columns: Sequence[tuple[str, str]]) -> list[str]:
    """The cells of a line; the best of each column is bold."""
    cells = []
    for data, metric in columns:
        best = max(own for (_, *where), own in numbers.items() if where == [data, metric])
        value = numbers.get((method, data, metric))
        shown = "–" if value is None else f"{value:.2f}".replace("-0.00", "0.00")
        cells.append(f"**{shown}**" if shown == f"{best:.2f}" else shown)
    return cells


def told_cost(method: str, spent: Mapping[str, float]) -> str:
    value = spent.get(method)
    return "–" if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def by_quality(numbers: Numbers) -> list[str]:
    """The methods, best first by the mean over the data sets; those that were not measured on all of them go last."""
    names = dict.fromkeys(name for name, _, metric in numbers if metric == QUALITY)
    values = {
        name: [numbers[name, data, QUALITY] for data in DATA if (name, data, QUALITY) in numbers] for name in names
    }
    return sorted(names, key=lambda name: (len(values[name]), sum(values[name])), reverse=True)


def quality_columns(numbers: Numbers) -> list[tuple[str, str]]:
    return [(data, QUALITY) for data in DATA if any((own, of) == (data, QUALITY) for _, own, of in numbers)]


def with_means(numbers: Numbers) -> Numbers:
    """Also the mean of pointing over the data sets."""
    means: Numbers = {}
    for method in by_quality(numbers):
        values = [value for (name, _, metric), value in numbers.items() if (name, metric) == (method, POINTING)]
        if values:
            means[method, MEAN, POINTING] = sum(values) / len(values)
    return {**numbers, **means}


def choosing() -> str:
    """Cost and quality of every method that was measured, best first."""
    numbers, spent = with_means(results()), costs()
    columns = [*quality_columns(numbers), (MEAN, POINTING), ("scenes", TELLING)]
    heads = [f"curves, {data}" for data, metric in columns if metric == QUALITY]
    rows = []
    for method in by_quality(numbers):
        info = get_method(split_call(method)[0]).info
        about = [told_cost(method, spent), "yes" if info.class_specific else "no"]
        rows.append((f"`{method}`", *about, *told(numbers, method, columns)))
    return table(["method", "time", "for a class", *heads, "pointing", "right object"], rows)


def measured() -> str:
    """For the README: a few methods, one metric."""
    numbers, spent = results(), costs()
    columns = quality_columns(numbers)
    wanted = [method for method in by_quality(numbers) if method in README_METHODS]
    rows = [(f"`{method}`", *told(numbers, method, columns), told_cost(method, spent)) for method in wanted]
    return table(["method", *(data for data, _ in columns), "time"], rows)


TABLES: dict[str, Callable[[], str]] = {
    one.__name__: one for one in (methods, parameters, aliases, families, classes, papers, choosing, measured)
}

if __name__ == "__main__":
    main()
