"""Lists the licences of what vitrail needs at run time: `python tools/licences.py` writes `docs/licences.md`.

Names come from `pyproject.toml`, licences and further requirements from the metadata of the installed packages, so run
it where vitrail is installed with all of its run-time extras.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "licences.md"
DEVELOPERS = ("docs", "dev", "peers", "audit")  # extras that users do not install
LONGEST = 60  # characters of a licence's name; some packages write the whole text there
PREFIX = "License :: OSI Approved :: "
TEXT = """# Licences

vitrail is under Apache-2.0; its embedded weights have a note of their own, `src/vitrail/weights/LICENSE.md`. Nothing of
the packages below is part of its wheel: they are installed beside it. The licences are those that the packages
themselves declare (`python tools/licences.py` writes this page).

## What vitrail requires

{declared}

## What these require in turn

In the environment that this page was made in; yours may differ by platform and version.

{further}
"""


def main() -> None:
    direct = declared()
    reached = closure(direct.values())
    rows = [(name, extra, licence(name)) for extra, name in direct]
    further = [(name, licence(name)) for name in sorted(reached - {requirement_name(r) for r in direct.values()})]
    text = TEXT.format(
        declared=table(("package", "extra", "licence"), rows), further=table(("package", "licence"), further)
    )
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.name}: {len(rows)} packages, and {len(further)} that they require")


def declared() -> dict[tuple[str, str], Requirement]:
    """The run-time requirements of pyproject.toml by extra ("" = always installed) and name, sorted by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        (extra, requirement_name(requirement)): requirement
        for extra, texts in lists.items()
        if extra not in DEVELOPERS
        for requirement in sorted(map(Requirement, texts), key=requirement_name)
    }


def requirement_name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """The names of all packages that these require, directly or through others, in this environment."""
    seen: set[tuple[str, str]] = set()
    waiting = [pair for requirement in requirements for pair in with_extras(requirement)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += with_extras(requirement)
    return {name for name, _ in seen}


def with_extras(requirement: Requirement) -> Iterator[tuple[str, str]]:
    return ((requirement_name(requirement), extra) for extra in ("", *requirement.extras))


def licence(name: str) -> str:
    """The licence that an installed package declares: an SPDX expression, classifiers, or a free text."""
    about = metadata.metadata(name)
    expression, text = about.get("License-Expression"), (about.get("License") or "").strip()
    classifiers = about.get_all("Classifier") or []
    names = [line.removeprefix(PREFIX) for line in classifiers if line.startswith(PREFIX)]
    short = text if text not in ("", "UNKNOWN") and len(text) <= LONGEST and "\n" not in text else ""
    return expression or short or ", ".join(names) or "see its files"


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [tuple(titles), *rows]
    body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([body[0], "|" + "---|" * len(tuple(lines[0])), *body[1:]])


if __name__ == "__main__":
    main()
