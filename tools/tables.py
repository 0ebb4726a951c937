"""Writes the documentation tables that are generated from code and from measurements.

`python tools/tables.py` writes them all; with `--check` it only lists the pages that are out of date. A table stands
between `<!-- table: NAME -->` and `<!-- end -->`, where NAME is a function of this file.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm

import vitrail
from vitrail.bench.suite import open_suite
from vitrail.calls import split_call
from vitrail.cli.codes import EXIT_CODES
from vitrail.cli.reproduce import list_targets
from vitrail.methods.base import MethodInfo
from vitrail.methods.registry import ALIASES, get_method
from vitrail.models.names import kind_of_view, reason, source
from vitrail.papers.catalogue import PaperTarget, find_target
from vitrail.report.leaderboard import page as leaderboard_page
from vitrail.report.leaderboard import shipped_costs, shipped_table
from vitrail.report.standings import Standings, standings
from vitrail.report.summary import ABSENT

DOCS = Path(__file__).parents[1] / "docs"
METHODS = DOCS / "methods"
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
SHORT = {"att_ixg.plus": "att_cat", "att_ixg.plus(rule=frozen)": "att_cat(rule=frozen)"}  # the well-known name
README_METHODS = (
    "posterior", "tis", "lime", "decompx.skipplus", "full_grad_plus.skipplus(rule=frozen)", "gen_att", "vtranm",
    "vit_cx", "rollout", "rise(masks=2000)", "grad_cam", "integrated_gradients", "random",
)  # fmt: skip
CHOICES = (
    *README_METHODS,
    "posterior(masks=1024)", "shapley", "kernel_shap", "pami", "hsic", "occlusion", "attn_lrp.skipplus", "lrp",
    "gen_att(rule=frozen)", "att_ixg.plus", "att_ixg.plus(rule=frozen)", "trans_att", "decompx", "alti", "tam",
    "legrad", "raw_attention", "smooth_grad", "expected_gradients",
)  # fmt: skip
TRANSFORMERS = re.compile(r"vit|deit|beit|eva|swin|cait|xcit|max|hiera")  # in names of timm
TOP = 20  # methods of the leaderboard's short table


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


# The papers' claims, from docs/results/claims.json, which tools/claims.py measures

MARKS = {True: "✓", False: "✗", None: "?"}


def claims_measured() -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Stand-in → what was measured, and target → why nothing stands in for it."""
    content = json.loads((DOCS / "results" / "claims.json").read_text(encoding="utf-8"))
    return content["measured"], content["left_out"]


def claims_summary() -> str:
    """How many claims of each paper held."""
    measured, _ = claims_measured()
    counts: dict[str, Counter[str]] = {}
    for stand_in in measured.values():
        count = counts.setdefault(find_target(stand_in["target"]).paper, Counter())
        count.update(MARKS[claim["holds"]] for claim in stand_in["claims"])
        others = [other for other in measured.values() if other["target"] == stand_in["target"]]
        tested = {claim["text"] for other in others for claim in other["claims"]}
        count["untested"] += len(set(stand_in["untested"]) - tested)
    total = sum(counts.values(), Counter())
    words = (*MARKS.values(), "untested")
    rows = [(paper, *(str(count[word]) for word in words)) for paper, count in [*counts.items(), ("**all**", total)]]
    return table(["paper", "✓ held", "✗ failed", "? undecided", "about other models"], rows)


def claims() -> str:
    """A table per paper: each claim, what it was tested on, the numbers and the verdict."""
    measured, _ = claims_measured()
    rows: dict[str, list[Sequence[str]]] = {}
    for stand_in in measured.values():
        target = find_target(stand_in["target"])
        counts = sorted(set(stand_in["images"].values()))
        images = f"{counts[0]}–{counts[-1]}" if len(counts) > 1 else str(counts[0])
        where = f"`{target.name}`<br>{stand_in['model']} for {stand_in['instead_of']}, {images} images"
        for claim in stand_in["claims"]:
            lines = [claim_line(claim, column, target, stand_in) for column in claim["tests"]]
            rows.setdefault(target.paper, []).append((claim["text"], where, "<br>".join(lines), MARKS[claim["holds"]]))
    header = ["claim", "target and stand-in", "measured", "verdict"]
    return "\n".join(f"### {paper}\n\n{table(header, lines)}" for paper, lines in rows.items())


def claim_line(claim: Mapping[str, Any], column: str, target: PaperTarget, stand_in: Mapping[str, Any]) -> str:
    """The numbers of a claim in a column, headed by the column without the model that was replaced."""
    digits = next((item.digits for item in target.columns if item.label == column), None)
    numbers = [quantity(item, digits) for item in claim["quantities"].get(column, [])]
    numbers = numbers or [claim["undecided"][column]]
    arrow = {1: " ↑", -1: " ↓"}.get(stand_in["directions"].get(column), "")
    label = column.removeprefix(stand_in["instead_of"]).strip() + arrow
    mark = f"{MARKS[claim['tests'][column]]} " if len(claim["tests"]) > 1 else ""
    return mark + (f"{label.strip()}: " if label else "") + "; ".join(numbers)


def quantity(item: Mapping[str, Any], digits: int | None) -> str:
    """A − B +0.04 [+0.01, +0.06]; three significant digits where a claim is about several columns."""
    places = ".3g" if digits is None else f".{digits}f"
    form = {"value": places, "difference": f"+{places}", "rank": ".0f", "correlation": "+.2f"}[item["kind"]]
    texts = [format(item[name], form).replace("-", "−") for name in ("value", "low", "high") if item[name] is not None]
    interval = f" [{texts[1]}, {texts[2]}]" if len(texts) > 1 else ""
    subject, rank, others = item["text"].partition(", rank of ")
    return f"{subject}{', rank' if rank else ''} {texts[0]}{interval}{f' of {others}' if rank else ''}"


def claims_left_out() -> str:
    _, left_out = claims_measured()
    return table(["target", "why not"], [(f"`{name}`", why) for name, why in left_out.items()])


# Measurements, from src/vitrail/report/leaderboard.csv.gz and costs.csv


def number(value: float) -> str:
    return ABSENT if math.isnan(value) else f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")


def cost_of(method: str, forwards: Mapping[str, float]) -> str:
    value = forwards.get(method)
    return ABSENT if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def board() -> Standings:
    return standings(shipped_table(), [pair.name for pair in open_suite("leaderboard").pairs])


def advice() -> str:
    """The answer of the interactive page, as text."""
    html = leaderboard_page(shipped_table(), open_suite("leaderboard").pairs, shipped_costs(), whole=False)
    (answer, *_) = re.findall(r'<p class="vlb-text">(.*?)</p>', html, re.DOTALL)
    return " ".join(re.sub(r"</?code>", "`", answer).split()) + "\n"


def ranked(wanted: Sequence[str], more: Mapping[str, Callable[[Standings, int], str]] | None = None) -> str:
    """Score, share of the attainable, cost, ``more`` columns and the headline metric on each pair, best score first."""
    numbers = board()
    titles = {pair.name: pair.title for pair in open_suite("leaderboard").pairs}
    rates, scores = shipped_costs(), numbers.scores
    forwards = dict(zip(rates["method"], rates["forwards"], strict=True))
    rows = []
    for m in (-scores.mean).argsort(kind="stable"):
        method = numbers.methods[m]
        if method not in wanted:
            continue
        cells = []
        for p, k in enumerate(numbers.headlines):
            assert k is not None
            text = number(numbers.mean[p, m, k])
            cells.append(f"**{text}**" if numbers.marks[p, m, k] else text)
        half = (scores.high[m] - scores.low[m]) / 2
        score = f"{number(scores.mean[m])}\u00a0±\u00a0{number(half)}"  # no line break inside
        others = [column(numbers, m) for column in (more or {}).values()]
        attained = number(numbers.attainable[m])
        rows.append((f"`{SHORT.get(method, method)}`", score, attained, cost_of(method, forwards), *others, *cells))
    header = ["method", "score", "of the attainable", "cost", *(more or {}), *(titles[name] for name in numbers.pairs)]
    return table(header, rows)


def class_specific(numbers: Standings, m: int) -> str:
    return "yes" if get_method(split_call(numbers.methods[m])[0]).info.class_specific else "no"


def mean_of(metric: str) -> Callable[[Standings, int], str]:
    """The mean of a metric over the pairs that have it."""

    def column(numbers: Standings, m: int) -> str:
        values = numbers.mean[:, m, numbers.metrics.index(metric)]
        return number(float(values[~np.isnan(values)].mean()))

    return column


def choosing() -> str:
    """The methods that one would consider."""
    columns = {
        "pointing": mean_of("pointing_game"),
        "right object": mean_of("discriminativity"),
        "class-specific": class_specific,
    }
    return ranked(CHOICES, columns)


def measured() -> str:
    """For the README: a few methods."""
    return ranked(README_METHODS)


def leaderboard() -> str:
    """The first methods of the leaderboard, and the control."""
    numbers = board()
    complete = (numbers.scores.pairs == numbers.scores.pairs.max()) & numbers.rivals
    order = np.where(complete, -numbers.scores.mean, np.inf).argsort(kind="stable")
    return ranked([*(numbers.methods[m] for m in order[:TOP]), "random"])


def posterior() -> str:
    """How far `posterior` is above `tis` and above the best other method, on each pair."""
    numbers = board()
    place = numbers.methods.index
    titles = {pair.name: pair.title for pair in open_suite("leaderboard").pairs}
    rows = []
    for p, k in enumerate(numbers.headlines):
        means = numbers.mean[p, :, k]
        others = [m for m in np.flatnonzero(numbers.rivals) if not numbers.methods[m].startswith("posterior")]
        best = max(others, key=lambda m: np.nan_to_num(means[m], nan=-np.inf))
        above = [above_other(numbers, p, *pair) for pair in ((place("posterior"), place("tis")),
                                                             (place("posterior(masks=1024)"), best))]  # fmt: skip
        rows.append((titles[numbers.pairs[p]], above[0], above[1], f"`{numbers.methods[best]}`"))
    return table(["model, images", "256 masks − `tis`", "1,024 masks − the best other", "which is"], rows)


def above_other(numbers: Standings, p: int, method: int, other: int) -> str:
    """The difference of two methods on a pair, from their paired gaps to the reference, taken as independent."""
    k = numbers.headlines[p]
    (a, b), (low_a, low_b), (high_a, high_b) = (
        cube[p, [method, other], k] for cube in (numbers.gap, numbers.gap_low, numbers.gap_high)
    )
    value, below, above = a - b, math.hypot(a - low_a, high_b - b), math.hypot(high_a - a, b - low_b)
    texts = [f"{end:+.3f}".replace("-", "−") for end in (value, value - below, value + above)]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def pairs() -> str:
    """The pairs of the leaderboard with measurements, and the number of images."""
    numbers = board()
    about = {pair.name: pair for pair in open_suite("leaderboard").pairs}
    images = [f"{int(np.nanmax(numbers.n[p, :, k])) if k is not None else 0}" for p, k in enumerate(numbers.headlines)]
    rows = [(about[name].title, about[name].about, count) for name, count in zip(numbers.pairs, images, strict=True)]
    return table(["pair", "model and images", "images"], rows)


def models() -> str:
    """timm's transformers by what can be seen of them."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for name in timm.list_models():
        if TRANSFORMERS.search(name):
            level = kind_of_view(name)
            groups.setdefault((source(name), level or "none", reason(name)), []).append(name)
    order = ("tokens", "features only", "logits only", "none")
    rows = sorted(groups.items(), key=lambda item: (order.index(item[0][1]), item[0]))
    return table(
        ["level", "timm module", "why", "names"],
        [
            [level, f"`{module}`", why or "a plain ViT", f"{len(names)}: {', '.join(f'`{name}`' for name in names)}"]
            for (module, level, why), names in rows
        ],
    )


def exit_codes() -> str:
    return table(("code", "meaning"), ((str(code), meaning) for code, meaning in EXIT_CODES.items()))


def mutations() -> str:
    """Changes of the source that tests must notice, see tools/mutations.py."""
    changes = tomllib.loads(Path(__file__).with_name("mutations.toml").read_text("utf-8"))["mutation"]
    return table(("change", "failed"), ((item["change"], f"`{item['test'].partition('[')[0]}`") for item in changes))


TABLES: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        methods,
        parameters,
        aliases,
        families,
        classes,
        papers,
        claims_summary,
        claims,
        claims_left_out,
        choosing,
        advice,
        measured,
        mutations,
        leaderboard,
        posterior,
        pairs,
        models,
        exit_codes,
    )
}

if __name__ == "__main__":
    main()
