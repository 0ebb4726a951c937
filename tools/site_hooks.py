"""mkdocs hooks: formulas become MathML, which browsers render without scripts or fonts; a picture links to its file;
the leaderboard stands where its page has the mark.
"""

from __future__ import annotations

import html
import logging
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

from vitrail.bench.suite import open_suite
from vitrail.report.leaderboard import page as leaderboard_page
from vitrail.report.leaderboard import shipped_costs, shipped_table, strip_name

log = logging.getLogger("mkdocs.vitrail")

PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>')
LEADERBOARD = "<!-- leaderboard -->"
STRIPS = "pictures/leaderboard"  # in the folder of the pages
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    content = PICTURE.sub(r'<p><a class="picture" href="\2">\1</a></p>', content)
    if LEADERBOARD in content:
        content = content.replace(LEADERBOARD, leaderboard(Path(config["docs_dir"]), page.url))
    return FORMULA.sub(lambda match: rendered(match[1], html.unescape(match[2]), page.file.src_path), content)


def leaderboard(docs: Path, url: str) -> str:
    """The interactive leaderboard, with the pictures that exist."""
    table = shipped_table()
    names = {method: strip_name(method) for method in dict.fromkeys(table["method"])}
    up = "../" * url.count("/")
    gallery = {method: f"{up}{STRIPS}/{name}" for method, name in names.items() if (docs / STRIPS / name).exists()}
    return leaderboard_page(table, open_suite("leaderboard").pairs, shipped_costs(), gallery=gallery, whole=False)


def on_post_page(output: str, **_: Any) -> str:
    """Labels the theme's search box for screen readers."""
    box = 'data-md-component="search" role="dialog"'
    return output.replace(box, f'{box} aria-label="Search"')


def rendered(tag: str, formula: str, where: str) -> str:
    """A formula as MathML; one that cannot be parsed is a warning, which fails a strict build."""
    try:
        mathml = convert(formula, display="block" if tag == "div" else "inline")
    except Exception as error:  # the converter has no common exception class
        log.warning("%s: cannot parse the formula %r: %s", where, formula, error)
        return html.escape(formula)
    if "\\" in mathml:
        log.warning("%s: the formula %r has an unknown command", where, formula)
    return f'<{tag} class="formula">{mathml}</{tag}>'
