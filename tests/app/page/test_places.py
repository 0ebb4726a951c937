"""The page in a real browser: boxes of a detector, segments of a segmentation, and a model without classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.app.pages import Visit, explained, page_state
from tests.app.serving import SAMPLES

import vitrail
from vitrail.targets import Box, Region

pytestmark = pytest.mark.full
STAR = SAMPLES / "star-and-heart.png"


def choose(page: Any, kind: str) -> None:
    page.locator(f"#ask label:has([value={kind}])").click()


def named(page: Any, part: str) -> Any:
    """Chooses a model by a part of its name."""
    page.wait_for_selector("#model option", state="attached")
    page.select_option("#model", next(i for i in page_state(page, "state.models.map(({ id }) => id)") if part in i))
    return page


def click_picture(page: Any, x: float, y: float) -> None:
    """At a place in pixels of the picture."""
    width, height = page_state(page, "state.prediction.size")
    frame = page.locator("#panes").bounding_box()
    page.mouse.click(frame["x"] + x / width * frame["width"], frame["y"] + y / height * frame["height"])


def test_a_box_is_clicked(visit_placing: Visit) -> None:
    page = explained(visit_placing("#sample=star-and-heart"))
    kinds = page.locator("#ask label:not([hidden]) input").evaluate_all("inputs => inputs.map(({ value }) => value)")
    assert kinds == ["class", "group", "box", "similarity"]
    choose(page, "box")
    explained(page, "box=")
    boxes = page_state(page, "state.prediction.boxes")
    assert page_state(page, "state.ask.query") == boxes[0]["query"]  # the surest
    assert page.locator("#places button").count() == len(boxes)
    page.locator("#places button").nth(1).click()
    explained(page, f"box={boxes[1]['query']}")
    assert page.locator("#places [aria-pressed=true]").count() == 1
    view = vitrail.load(page_state(page, "state.model.id"))
    expected = vitrail.explain(view, str(STAR), target=Box(boxes[1]["query"]))
    np.testing.assert_allclose(page_state(page, "state.explanation.values"), expected.map, rtol=1e-3, atol=1e-4)
    assert page.inner_text("#question").startswith(f"Why {expected.label} (")
    assert f"in box {boxes[1]['query']}?" in page.inner_text("#question")
    page.locator("#classes .versus:not([disabled])").first.click()
    explained(page, "against=", f"box={boxes[1]['query']}")
    assert "rather than" in page.inner_text("#question")
    page.reload()
    explained(page, f"box={boxes[1]['query']}", "against=")
    assert page.is_checked("input[value=box]")
    smallest = min(boxes, key=lambda row: (row["box"][2] - row["box"][0]) * (row["box"][3] - row["box"][1]))
    left, top, right, bottom = smallest["box"]
    size = page_state(page, "state.prediction.size")
    click_picture(page, (max(left, 0) + min(right, size[0])) / 2, (max(top, 0) + min(bottom, size[1])) / 2)
    explained(page, f"box={smallest['query']}")
    assert page_state(page, "state.removed.size") == 0


def test_a_segment_is_clicked(visit_placing: Visit) -> None:
    page = named(visit_placing("#sample=star-and-heart"), "eomt")
    explained(page, "eomt")
    choose(page, "region")
    explained(page, "region=")
    segments, (rows, columns) = page_state(page, "[state.prediction.segments, state.prediction.cells]")
    page.wait_for_selector("#places [aria-pressed=true]")
    cell = segments[1]["cells"][0]
    left, top, right, bottom = page_state(page, "state.prediction.box")
    x, y = (cell % columns + 0.5) / columns, (cell // columns + 0.5) / rows
    click_picture(page, left + x * (right - left), top + y * (bottom - top))
    explained(page, f"region={cell}")
    view = vitrail.load(page_state(page, "state.model.id"))
    mask = np.zeros(rows * columns, bool)
    mask[segments[1]["cells"]] = True
    mask = mask.reshape(rows, columns).repeat(32 // rows, 0).repeat(32 // columns, 1)
    expected = vitrail.explain(view, str(STAR), target=Region(mask))
    np.testing.assert_allclose(page_state(page, "state.explanation.values"), expected.map, rtol=1e-3, atol=1e-4)
    assert page.inner_text("#question").startswith(f"Why {expected.label} (")
    assert "in this segment?" in page.inner_text("#question")
    page.click("#delete-top")
    page.wait_for_selector("#meter:not([aria-busy])")
    choose(page, "class")
    page.wait_for_function("() => !location.hash.includes('region=')")


def test_a_model_without_classes_waits_for_a_second_picture(visit_placing: Visit) -> None:
    page = named(visit_placing(""), "dinov2")
    page.wait_for_selector("#samples button, #start button")
    page.evaluate("location.hash = ''")
    page = visit_placing(f"#sample=star-and-heart&model={page_state(page, 'state.model.id')}")
    page.wait_for_selector("#second-samples button")
    assert page.is_checked("input[value=similarity]")
    assert page.locator("#ask label:not([hidden])").count() == 1
    assert page.locator("#alert").is_hidden()
    page.click("#second-samples button[title='Ring and hourglass']")
    explained(page, "other_sample=ring-and-hourglass")
    assert page.inner_text("#question").startswith("Why is it similar to Ring and hourglass (cosine ")
