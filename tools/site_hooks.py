"""mkdocs hooks: formulas become MathML, which browsers render without scripts or fonts; a picture links to its file."""

from __future__ import annotations

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.vitrail")

PICTURE = re.compile(r'<p>(<img [^>]*src="([^"]+)"[^>]*>)</p>')
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    content = PICTURE.sub(r'<p><a class="picture" href="\2">\1</a></p>', content)
    return FORMULA.sub(lambda match: rendered(match[1], html.unescape(match[2]), page.file.src_path), content)


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
