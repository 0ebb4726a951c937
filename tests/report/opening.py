"""Opens a page from a file, without a network and without a word on the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

DESKTOP, PHONE = (1280, 900), (390, 844)

Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file; whatever the page says to the console or wants from a network fails the test."""
    said: list[str] = []
    contexts = []

    def opened(path: Path, size: tuple[int, int] = DESKTOP, beside: Sequence[str] = (), **options: Any) -> Any:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        page = context.new_page()
        allowed = [path.as_uri(), *(path.with_name(name).as_uri() for name in beside)]

        def watch(route: Any) -> None:
            if route.request.url in allowed:
                route.continue_()
            else:
                said.append(f"wanted {route.request.url[:100]}")
                route.abort()

        page.route(lambda url: not url.startswith("data:"), watch)
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
