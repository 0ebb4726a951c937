"""Writes the tables of `docs/methods/index.md` from the registry: `python docs/tables.py` (`--check`: only compare)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import vitrail
from vitrail.methods.base import MethodInfo
from vitrail.methods.registry import ALIASES

PAGE = Path(__file__).parent / "methods" / "index.md"
PAGES = {"gradient": "gradients", "cam": "cams", "mask": "masks"}  # families whose page has another name
ORDER = ("decomposition", "gradient", "relevance", "transformation", "markov", "cam", "attention", "control")
SIGNED = {True: "yes", False: "no", None: "if any value is below 0"}


def main() -> None:
    old = PAGE.read_text(encoding="utf-8")
    new = old
    for name, table in (("methods", methods()), ("parameters", parameters()), ("aliases", aliases())):
        block = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        new = block.sub(lambda found, table=table: found[1] + "\n" + table + "\n" + found[2], new)
    if "--check" in sys.argv:
        sys.exit(f"{PAGE.name} is out of date: run python docs/tables.py" if new != old else 0)
    PAGE.write_text(new, encoding="utf-8")


def bare() -> dict[str, MethodInfo]:
    """The methods without the compositions, by family."""
    found = {name: info for name, info in vitrail.list_methods().items() if "." not in name}
    rank = {family: place for place, family in enumerate(ORDER)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[1].family, len(rank)), item[0])))


def methods() -> str:
    rows = []
    for name, info in bare().items():
        page = PAGE.with_name(PAGES.get(info.family, info.family) + ".md")
        sums = [other.partition(".")[2] for other in vitrail.list_methods(f"{name}.*")]
        rows.append(
            (
                f"`{name}`",
                f"[{info.family}]({page.name})" if page.exists() else info.family,
                "yes" if info.class_specific else "no",
                info.level,
                SIGNED[info.signed],
                f"{info.cost[0]:g} + {info.cost[1]:g}",
                " ".join(f"`.{own}`" for own in sorted(sums, key=("plus", "skipplus", "rollout").index)) or "–",
                info.summary.replace("``", "`"),
            )
        )
    return table("id|family|for a class|map|signed|F + B|sums over layers|what it is".split("|"), rows)


def parameters() -> str:
    rows = []
    for name, info in bare().items():
        known = [f"`{key}={value!r}`".replace("'", '"') for key, value in info.params.items() if key != "protocol"]
        protocols = [f"`{one}`" for one in info.protocols if one != "default"]
        rows.append((f"`{name}`", ", ".join(known) or "–", ", ".join(protocols) or "–", info.paper))
    return table(["id", "parameters and their defaults", "other protocols", "paper"], rows)


def aliases() -> str:
    return table(["alias", "is"], [(f"`{alias}`", f"`{name}`") for alias, name in sorted(ALIASES.items())])


def table(header: list[str], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    main()
