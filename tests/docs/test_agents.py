"""What agents read first: llms.txt, in the repository and on the site, and AGENTS.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LLMS = (ROOT / "llms.txt").read_text(encoding="utf-8")
AGENTS = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
LINKS = re.findall(r"^- \[[^]]+\]\(([^)]+)\): \S", LLMS, re.MULTILINE)


def test_llms_txt_has_the_form_of_its_convention() -> None:
    title, empty, summary, *_ = LLMS.splitlines()
    assert (title, empty, summary[:2]) == ("# vitrail", "", "> ")
    sections = re.split(r"^## .+$", LLMS, flags=re.MULTILINE)[1:]
    assert len(sections) > 2
    for section in sections:
        assert all(line.startswith("- [") for line in section.splitlines() if line)


def test_links_of_llms_txt_lead_to_every_page() -> None:
    assert [link for link in LINKS if not (ROOT / link).is_file()] == []
    pages = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(LINKS) == sorted(f"docs/{page}" for page in pages if page != "index.md")


def test_llms_txt_of_the_site_is_the_same() -> None:
    site = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    assert site == re.sub(r"\(docs/([\w/]+)\.md\)", r"(\1.html)", LLMS)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`((?:[\w.]+/)+[\w.]*|[\w]+\.(?:md|py))`", AGENTS))))
def test_files_that_agents_md_names_exist(path: str) -> None:
    assert (ROOT / path).exists() or path == "site/"


def test_targets_of_make_that_agents_md_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"`make ([\w-]+)`", AGENTS)
    assert len(targets) >= 4
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_links_of_agents_md_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", AGENTS)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_source_distribution_has_what_the_tests_need() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    included = project.partition("[tool.hatch.build.targets.sdist]")[2].partition("[tool.pytest")[0]
    assert all(f'"{name}"' in included for name in ("/examples", "/tests", "/docs", "/*.md", "/llms.txt"))
