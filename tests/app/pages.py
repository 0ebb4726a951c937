"""A browser on the page of a real server; any error in the page fails the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import vitrail
from vitrail.models.view import View

DESKTOP, PHONE = (1280, 800), (360, 740)
READY = "#glass:not([aria-busy]) ~ #progress[hidden]"
# Checked together: the address changes before the explanation has arrived. An error on the page ends the wait.
EXPLAINED = """([ready, parts]) => {
  const alert = document.querySelector("#alert");
  if (!alert.hidden) throw new Error(`the page says: ${alert.innerText}`);
  return document.querySelector(ready) && !document.querySelector("#legend").hidden
    && parts.every((part) => location.hash.includes(part));
}"""
Visit = Callable[..., Any]
USUAL_STEPS, FEW_STEPS = (b'name="steps"\r\n\r\n%d\r\n' % steps for steps in (32, 4))


@dataclass
class Heard:
    """Console messages of the page, and requests to other hosts."""

    messages: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # parts of messages that belong to the test

    def note(self, text: str) -> None:
        if not any(part in text for part in self.expected):
            self.messages.append(text)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def visit(browser: Any, served: Any, heard: Heard) -> Iterator[Visit]:
    """Opens the page, with a fragment such as ``#sample=cat``."""
    with visiting(browser, served.url, heard) as open_page:
        yield open_page


@pytest.fixture
def visit_reading(browser: Any, reading: Any, heard: Heard) -> Iterator[Visit]:
    """The same with a model of images and texts."""
    with visiting(browser, reading.url, heard) as open_page:
        yield open_page


@pytest.fixture
def visit_placing(browser: Any, placing: Any, heard: Heard) -> Iterator[Visit]:
    """The same with a detector, a segmenter and a backbone without a head."""
    with visiting(browser, placing.url, heard) as open_page:
        yield open_page


@contextmanager
def visiting(browser: Any, url: str, heard: Heard) -> Iterator[Visit]:
    contexts = []
    allowed = (url, "blob:", "data:")

    def open_page(fragment: str = "", size: tuple[int, int] = DESKTOP, **options: Any) -> Any:
        options = {"reduced_motion": "reduce", **options}  # less to draw, and nothing is halfway
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, accept_downloads=True, **options)
        contexts.append(context)
        context.route("**/api/compare", shorten_curves)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: heard.note(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: heard.note(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(allowed) or heard.note(f"requested {request.url}"))
        page.goto(f"{url}/{fragment}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert heard.messages == []


@cache
def photo_model() -> View:
    return vitrail.load("photo")


def shorten_curves(route: Any) -> None:
    """The scores of a comparison have few steps: their values are not the point."""
    body = route.request.post_data_buffer
    assert USUAL_STEPS in body
    route.continue_(post_data=body.replace(USUAL_STEPS, FEW_STEPS))


def explained(page: Any, *parts: str) -> Any:
    """Waits for an explanation; ``parts`` are what its link must hold, such as ``method=rollout``."""
    page.wait_for_function(EXPLAINED, arg=[READY, ["method=", *parts]])
    return page


def upload(page: Any, path: Path) -> Any:
    page.wait_for_selector("#start:not([hidden])")
    page.set_input_files("#file", path)
    return explained(page)


def shown_probability(page: Any) -> float:
    """The displayed probability, once the latest answer has arrived."""
    page.wait_for_selector("#meter:not([aria-busy])")
    return float(page.inner_text("#now").replace("<", "").replace("%", "")) / 100


def on_patch(page: Any, patch: int, grid: tuple[int, int] = (16, 16)) -> tuple[float, float]:
    """Screen coordinates of the centre of a patch."""
    box, (width, height) = page_state(page, "[state.prediction.box, state.prediction.size]")
    frame = page.locator("#panes").bounding_box()
    row, column = divmod(patch, grid[1])
    x = box[0] + (column + 0.5) / grid[1] * (box[2] - box[0])
    y = box[1] + (row + 0.5) / grid[0] * (box[3] - box[1])
    return frame["x"] + x / width * frame["width"], frame["y"] + y / height * frame["height"]


def compare(page: Any, methods: list[str]) -> None:
    """Starts a comparison of these methods."""
    page.click("#tab-compare")
    page.click("#choices summary")
    for name in methods:
        page.fill("#filter", name)
        page.locator("#checks label:visible", has_text=name).locator(f"input[value='{name}']").check()
    page.click("#choices summary")
    page.click("#run-compare")


def hold(page: Any, path: str) -> list[Any]:
    """Collects requests without answering them."""
    held: list[Any] = []

    def keep(route: Any) -> None:
        held.append(route)

    page.route(path, keep)
    return held


def page_state(page: Any, expression: str) -> Any:
    """Evaluates an expression on the state of the page."""
    return page.evaluate(f"import('/static/state.js').then(({{ state, order }}) => {expression})")
