"""Writes the documentation tables that are generated from code and from measurements.

`python tools/tables.py` writes them all; with `--check` it only lists the pages that are out of date. A table stands
between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is a function of this file.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import vitrail
from vitrail.bench.suite import open_suite
from vitrail.calls import join_call, split_call
from vitrail.cli.reproduce import list_targets
from vitrail.methods.base import MethodInfo
from vitrail.methods.registry import ALIASES, get_method
from vitrail.report.leaderboard import shipped_costs, shipped_table
from vitrail.report.standings import Standings, standings

DOCS = Path(__file__).parents[1] / "docs"
METHODS = DOCS / "methods"
COSTS = DOCS.parent / "src" / "vitrail" / "report" / "costs.csv"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
PAGES = {"gradient": "gradients", "cam": "cams", "mask": "masks"}  # families whose page has a different name
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
DATA = ("scenes", "photo", "pets", "imagenette")  # result tables
SHORT = {"att_ixg.plus": "att_cat"}  # the well-known name
EFFORT = ("masks", "steps")
QUALITY, POINTING, DISCRIMINATING = "insertion_minus_deletion", "pointing_game", "discriminativity"
README_METHODS = ("tis", "lime", "decompx.skipplus", "full_grad_plus.skipplus(rule=frozen)", "gen_att", "vtranm",
                  "vit_cx", "rollout", "rise(masks=2000)", "grad_cam", "integrated_gradients", "random")  # fmt: skip
TOP = 20  # methods of the leaderboard's short table

MEAN = "mean"  # in place of a data set: the mean over all of them

Numbers = dict[tuple[str, str, str], float]  # method, data set, metric → mean


def main() -> None:
    stale = []
    for page in pages():
        old = page.read_text(encoding="utf-8")
        new = BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", old)
        if new != old and "--check" not in sys.argv:
            page.write_text(new, encoding="utf-8")
        elif new != old:
            stale.append(page.name)
    if stale:
        sys.exit(f"{', '.join(stale)} out of date: run python tools/tables.py")


def pages() -> list[Path]:
    """Every page with a generated table."""
    candidates = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in candidates if BLOCK.search(page.read_text(encoding="utf-8"))]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


# Methods, from the registry


def bare() -> dict[str, MethodInfo]:
    """The methods without the compositions, by family."""
    infos = {name: info for name, info in vitrail.list_methods().items() if "." not in name}
    rank = {family: place for place, family in enumerate(TITLES)}
    return dict(sorted(infos.items(), key=lambda item: (rank[item[1].family], item[0])))


def page_of(family: str) -> str | None:
    name = PAGES.get(family, family) + ".md"
    return name if (METHODS / name).exists() else None


def methods() -> str:
    rows = []
    for name, info in bare().items():
        page = page_of(info.family)
        suffixes = [composed.partition(".")[2] for composed in vitrail.list_methods(f"{name}.*")]
        rows.append(
            (
                f"`{name}`",
                f"[{info.family}]({page})" if page else info.family,
                "yes" if info.class_specific else "no",
                info.level,
                SIGNED[info.signed],
                passes(info),
                " ".join(f"`.{suffix}`" for suffix in sorted(suffixes, key=("plus", "skipplus", "rollout").index))
                or "–",
                info.summary.replace("``", "`"),
            )
        )
    return table("id|family|class-specific|map|signed|F\u00a0+\u00a0B|aggregations|summary".split("|"), rows)


def passes(info: MethodInfo) -> str:
    return f"{info.cost[0]:g}\u00a0+\u00a0{info.cost[1]:g}"  # no line break inside


def parameters() -> str:
    rows = []
    for name, info in bare().items():
        known = [f"`{key}={value!r}`".replace("'", '"') for key, value in info.params.items() if key != "protocol"]
        protocols = [f"`{protocol}`" for protocol in info.protocols if protocol != "default"]
        rows.append((f"`{name}`", ", ".join(known) or "–", ", ".join(protocols) or "–", info.paper))
    return table(["id", "parameters and their defaults", "other protocols", "paper"], rows)


def aliases() -> str:
    return table(["alias", "is"], [(f"`{alias}`", f"`{name}`") for alias, name in sorted(ALIASES.items())])


def families() -> str:
    """For the README: the methods of each family."""
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
        classes_of_family = [get_method(name) for name, info in bare().items() if info.family == family]
        paths = "\n\n".join(f"::: {cls.__module__}.{cls.__qualname__}" for cls in classes_of_family)
        parts.append(f"## {title}\n\n{paths}\n")
    return "\n".join(parts)


# The papers' tables


def papers() -> str:
    rows = [(f"`{row['target']}`", row["what"], row["models"], row["data"]) for row in list_targets()]
    return table(["target", "what", "models", "data"], rows)


# Measurements, from docs/results/*.csv and src/vitrail/report/costs.csv


def known(call: str) -> str:
    """A method or metric under its well-known name, without its number of masks or steps, which the page states."""
    name, params = split_call(call)
    return join_call(SHORT.get(name, name), {key: value for key, value in params.items() if key not in EFFORT})


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def results() -> Numbers:
    numbers: Numbers = {}
    for data in DATA:
        path = DOCS / "results" / f"{data}.csv"
        for row in read(path) if path.exists() else ():
            if row["mean"]:
                numbers[known(row["method"]), data, known(row["metric"])] = float(row["mean"])
    return numbers


def costs() -> dict[str, float]:
    """Method → cost in forward passes; with the default number of masks where both were measured."""
    rows = sorted(read(COSTS), key=lambda row: "masks=" not in row["method"])
    return {known(row["method"]): float(row["forwards"]) for row in rows}


def cells_of(numbers: Numbers, method: str, columns: Sequence[tuple[str, str]]) -> list[str]:
    """The cells of a row; the best value of each column is bold."""
    cells = []
    for data, metric in columns:
        best = max(value for (_, *column), value in numbers.items() if column == [data, metric])
        number = numbers.get((method, data, metric))
        text = "–" if number is None else f"{number:.2f}".replace("-0.00", "0.00")
        cells.append(f"**{text}**" if text == f"{best:.2f}" else text)
    return cells


def cost_of(method: str, forwards: Mapping[str, float]) -> str:
    value = forwards.get(method)
    return "–" if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def by_quality(numbers: Numbers) -> list[str]:
    """The methods, best first by the mean over the data sets; those not measured on all of them come last."""
    names = dict.fromkeys(name for name, _, metric in numbers if metric == QUALITY)
    values = {
        name: [numbers[name, data, QUALITY] for data in DATA if (name, data, QUALITY) in numbers] for name in names
    }
    return sorted(names, key=lambda name: (len(values[name]), sum(values[name])), reverse=True)


def quality_columns(numbers: Numbers) -> list[tuple[str, str]]:
    return [(data, QUALITY) for data in DATA if any(column == [data, QUALITY] for _, *column in numbers)]


def with_means(numbers: Numbers) -> Numbers:
    """With the mean pointing-game score over the data sets added."""
    means: Numbers = {}
    for method in by_quality(numbers):
        values = [value for (name, _, metric), value in numbers.items() if (name, metric) == (method, POINTING)]
        if values:
            means[method, MEAN, POINTING] = sum(values) / len(values)
    return {**numbers, **means}


def choosing() -> str:
    """Cost and quality of every measured method, best first."""
    numbers, forwards = with_means(results()), costs()
    columns = [*quality_columns(numbers), (MEAN, POINTING), ("scenes", DISCRIMINATING)]
    heads = [f"curves, {data}" for data, metric in columns if metric == QUALITY]
    rows = []
    for method in by_quality(numbers):
        info = get_method(split_call(method)[0]).info
        about = [cost_of(method, forwards), "yes" if info.class_specific else "no"]
        rows.append((f"`{method}`", *about, *cells_of(numbers, method, columns)))
    return table(["method", "cost", "class-specific", *heads, "pointing", "right object"], rows)


# The leaderboard, from src/vitrail/report/leaderboard.csv.gz


def board() -> Standings:
    return standings(shipped_table(), [pair.name for pair in open_suite("leaderboard").pairs])


def ranked(numbers: Standings, wanted: Sequence[str] = ()) -> str:
    """Score, cost and the headline metric of methods, best score first; of all if none are named."""
    titles = {pair.name: pair.title for pair in open_suite("leaderboard").pairs}
    rates, scores = shipped_costs(), numbers.scores
    forwards = dict(zip(rates["method"], rates["forwards"], strict=True))
    rows = []
    for m in (-scores.mean).argsort(kind="stable"):
        method = numbers.methods[m]
        if wanted and method not in wanted:
            continue
        cells = []
        for p, k in enumerate(numbers.headlines):
            assert k is not None
            text = f"{numbers.mean[p, m, k]:.2f}".replace("-0.00", "0.00")
            cells.append(f"**{text}**" if numbers.marks[p, m, k] else text)
        score = f"{scores.mean[m]:.2f} [{scores.low[m]:.2f}, {scores.high[m]:.2f}]".replace("-", "−")
        rows.append((f"`{method}`", score, *cells, cost_of(method, forwards)))
    return table(["method", "score", *(titles[name] for name in numbers.pairs), "cost"], rows)


def measured() -> str:
    """For the README: a few methods."""
    return ranked(board(), README_METHODS)


def leaderboard() -> str:
    """The first methods of the leaderboard, and the control."""
    numbers = board()
    first = [numbers.methods[m] for m in (-numbers.scores.mean).argsort(kind="stable")[:TOP]]
    return ranked(numbers, [*first, "random"])


def pairs() -> str:
    """The pairs of the leaderboard with measurements, and the number of images."""
    numbers = board()
    about = {pair.name: pair for pair in open_suite("leaderboard").pairs}
    images = [f"{int(numbers.n[p, :, k].max()) if k is not None else 0}" for p, k in enumerate(numbers.headlines)]
    rows = [(about[name].title, about[name].about, count) for name, count in zip(numbers.pairs, images, strict=True)]
    return table(["pair", "model and images", "images"], rows)


TABLES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (methods, parameters, aliases, families, classes, papers, choosing, measured, leaderboard, pairs)
}

if __name__ == "__main__":
    main()
