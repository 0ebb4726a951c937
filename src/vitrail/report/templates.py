"""Standalone HTML pages: templates whose values are escaped, files inlined, and a policy against requests."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vitrail.version import __version__

REPORT = "vitrail.report"


@lru_cache
def environment(package: str = REPORT) -> Environment:
    """The templates of a package. Values are escaped, and never parsed as templates themselves."""
    environment = Environment(
        loader=PackageLoader(package, "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters["breakable"] = breakable
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def printable(text: str) -> str:
    """Text without control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def breakable(text: str) -> Markup:
    """A name that may break after punctuation, isolated from the direction of the surrounding text."""
    parts = re.split(r"(?<=[_.(,/])(?=\S)", text)
    return Markup("<bdi>{}</bdi>").format(Markup("<wbr>").join(escape(printable(part)) for part in parts))


def render_page(
    name: str,
    scripts: Sequence[str],
    images: str = "data:",
    package: str = REPORT,
    styles: Sequence[str] = (),
    **values: Any,
) -> str:
    """The page of a template of a package, with its styles and scripts inlined, by default the style of its name.

    The scripts become one function: they share their names with each other and with nothing else. ``images`` are the
    sources that the page may load from.
    """
    script = '(() => {\n"use strict";\n' + "".join(page_file(file, package) for file in scripts) + "})();"
    style = "".join(page_file(file, package) for file in styles or (f"{name}.css",))
    template = environment(package).get_template(f"{name}.html")
    about = {"style": Markup(style), "script": Markup(script), "version": __version__}  # nosec B704 # the package's files
    return template.render(values, policy=policy(script, style, images), **about)


def page_file(name: str, package: str = REPORT) -> str:
    """The text of a file of the pages of a package, or of the reports, which any page may use."""
    path = files(package) / "page" / name
    return (path if path.is_file() else files(REPORT) / "page" / name).read_text(encoding="utf-8")


def policy(script: str, style: str, images: str) -> str:
    """Allows this script and style and these images only, and no other requests."""
    script_hash, style_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src {images}; "
        "base-uri 'none'; form-action 'none'"
    )
