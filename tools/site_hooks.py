"""What mkdocs does besides.

Formulas become MathML, which browsers draw themselves, without scripts or fonts; a picture leads to itself, large.
"""

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
    """mkdocs calls this with the HTML of each page."""
    content = PICTURE.sub(r'<p><a class="picture" href="\2">\1</a></p>', content)
    return FORMULA.sub(lambda found: drawn(found[1], html.unescape(found[2]), page.file.src_path), content)


def on_post_page(output: str, **_: Any) -> str:
    """The theme gives its search box no name, which a screen reader would need."""
    box = 'data-md-component="search" role="dialog"'
    return output.replace(box, f'{box} aria-label="Search"')


def drawn(tag: str, formula: str, where: str) -> str:
    """A formula as MathML; one that cannot be read is a warning, which ends a strict build."""
    try:
        made = convert(formula, display="block" if tag == "div" else "inline")
    except Exception as error:  # the converter has no family of errors of its own
        log.warning("%s: cannot read the formula %r: %s", where, formula, error)
        return html.escape(formula)
    if "\\" in made:
        log.warning("%s: the formula %r has a command that is not known", where, formula)
    return f'<{tag} class="formula">{made}</{tag}>'
