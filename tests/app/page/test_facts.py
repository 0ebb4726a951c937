"""The page in a real browser: trust, the split of the score and storage patches below the picture."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from tests.app.pages import PHONE, Heard, Visit, compare, explained, hold, on_patch, page_state, photo_model

import vitrail

CAT = files("vitrail.data") / "samples" / "cat.jpg"
TABBY, EGYPTIAN, LAST = 30, 32, 199
STORAGE = [17, 40]

# As an answer of a model that uses patches as registers.
USE_STORAGE = """async (storage) => {
  const { state, emit } = await import("/static/state.js");
  Object.assign(state.explanation, { storage, storage_line: "2 patches are used as storage" });
  emit("explanation");
}"""
# The colour in the middle of a patch, and the darkest of a line from there to the right.
SHADES = """async ([id, patch]) => {
  const { state } = await import("/static/state.js"), canvas = document.getElementById(id);
  const [left, top, right, bottom] = state.prediction.box, [rows, columns] = state.prediction.grid;
  const scale = canvas.width / state.prediction.size[0], width = (scale * (right - left)) / columns;
  const x = scale * left + ((patch % columns) + 0.5) * width;
  const y = scale * top + ((Math.floor(patch / columns) + 0.5) * scale * (bottom - top)) / rows;
  const { data } = canvas.getContext("2d").getImageData(Math.floor(x), Math.floor(y), Math.ceil(width / 2), 1);
  return Array.from({ length: data.length / 4 }, (_, at) => [...data.slice(4 * at, 4 * at + 4)]);
}"""


def trusted(page: Any) -> str:
    """The trust line, once it is there."""
    page.wait_for_function("() => /^trust: [01]\\.\\d\\d /.test(document.querySelector('#trust').textContent)")
    return page.inner_text("#trust")


@pytest.mark.usefixtures("as_served")
def test_the_page_says_what_the_library_says(visit: Visit) -> None:
    page = explained(visit("#sample=cat"))
    local = vitrail.explain(photo_model(), str(CAT))
    local.trust()
    assert trusted(page) == local.trust_line
    assert page.inner_text("#split") == local.score_line
    assert page.inner_text("#storage") == ""
    assert page.locator("#storage-switch").is_hidden()


def explained_without_trust(page: Any) -> list[Any]:
    """The explanation of the cat; the requests for its trust are held."""
    page.wait_for_selector("#samples img")
    held = hold(page, "**/api/trust")
    page.click("#samples button")
    explained(page)
    page.wait_for_function("() => document.querySelector('#trust').textContent === 'trust: asking the model…'")
    while not held:  # it is asked for a moment later
        page.wait_for_timeout(20)
    return held


def test_the_picture_does_not_wait_for_trust(visit: Visit) -> None:
    page = visit()
    held, save = explained_without_trust(page), page.locator("[data-save=png]")
    place = save.bounding_box()
    held[0].continue_()
    trusted(page)
    assert save.bounding_box() == place, "nothing moves when it arrives"


def test_another_question_goes_first_and_trust_follows_it(visit: Visit) -> None:
    page = visit()
    held = explained_without_trust(page)
    with page.expect_request_finished(lambda request: request.url.endswith("/api/explain")):
        page.click(f".class[data-index='{EGYPTIAN}']")
    page.unroute("**/api/trust")
    assert held[0].request.failure is not None, "the page gave it up"
    explained(page, f"target={EGYPTIAN}")
    page.click(f".class[data-index='{TABBY}']")
    explained(page, f"target={TABBY}")
    assert "takes tabby from" in trusted(page)


def test_a_cancelled_question_leaves_the_trust_of_the_map_on_the_page(visit: Visit) -> None:
    page = visit()
    explained_without_trust(page)
    hold(page, "**/api/explain")
    page.click(f".class[data-index='{EGYPTIAN}']")
    page.unroute("**/api/trust")
    page.click("#progress button")
    assert "takes tabby from" in trusted(page)


def test_a_failure_is_told_where_the_trust_would_be(visit: Visit, heard: Heard) -> None:
    heard.expected.append("status of 422")
    page = visit()
    page.wait_for_selector("#samples img")
    page.route("**/api/trust", lambda route: route.fulfill(status=422, json={"error": "there is one patch."}))
    page.click("#samples button")
    explained(page)
    page.wait_for_function("() => document.querySelector('#trust').textContent.includes('there is one patch')")
    assert page.locator("#alert").is_hidden()


def test_a_contrast_has_both_probabilities(visit: Visit) -> None:
    page = explained(visit(f"#sample=cat&target={TABBY}&against={LAST}"))
    local = vitrail.explain(photo_model(), str(CAT), target=TABBY, against=LAST)
    question = page.inner_text("#question")
    assert re.match(rf"Why tabby \([\d.]+ %\) rather than {local.against_label} \((< )?[\d.]+ %\)\?", question)
    assert page.inner_text(f".class[data-index='{LAST}'] .share") in question
    assert f"takes tabby against {local.against_label} from" in trusted(page)
    assert page.inner_text("#split").startswith("logit difference ")
    colours = page.evaluate(
        "() => ['low', 'high'].map((end) => getComputedStyle(document.querySelector(`#legend .${end}`)).color)"
    )
    assert colours == page.evaluate(
        """() => ["against", "for"].map((side) =>
          getComputedStyle(document.querySelector(`#question strong.${side}`)).color)"""
    )


def test_the_score_of_a_patch_is_its_share(visit: Visit) -> None:
    page = explained(visit("#sample=cat"))
    local = vitrail.explain(photo_model(), str(CAT))
    best = int(local.map.argmax())
    page.mouse.move(*on_patch(page, best))
    score = float(page.inner_text("#readout .place").rpartition("score +")[2])
    assert score == pytest.approx(float(local.shares.max()), rel=1e-2)
    assert score != pytest.approx(float(local.map.max()), rel=1e-1)


@pytest.mark.parametrize(
    "method",
    ["decompx.skipplus", *(pytest.param(name, marks=pytest.mark.full) for name in ("rollout", "epsilon_lrp"))],
)
def test_storage_patches_are_marked_and_can_be_hidden(visit: Visit, heard: Heard, method: str) -> None:
    heard.expected.append("willReadFrequently")
    page = explained(visit(f"#sample=star-and-heart&drawing=blocks&method={method}"))
    trusted(page)
    assert all(shade[3] == 0 for shade in page.evaluate(SHADES, ["panes", STORAGE[0]]))
    page.evaluate(USE_STORAGE, STORAGE)
    assert page.inner_text("#storage") == "2 patches are used as storage"
    for patch in STORAGE:
        shades = np.array(page.evaluate(SHADES, ["panes", patch]))
        assert shades[0, 3] == 0, "clear in the middle"
        assert (shades[:, 3] == 255).any()
        assert shades[shades[:, 3] == 255][:, :3].min() < 60, "dark on white"
    page.mouse.move(*on_patch(page, STORAGE[0], grid=(8, 8)))
    assert "used as storage" in page.inner_text("#readout .place")
    page.check("#hide-storage")
    page.wait_for_function("() => location.hash.includes('storage=hide')")
    for patch in STORAGE:
        assert page.evaluate(SHADES, ["map", patch])[0][3] < 4, "no evidence"
    # Waits for the file: a picture that is given up takes the worker of the server along.
    with page.expect_request("**/api/picture") as request, page.expect_download():
        page.click("[data-save=png]")
    assert 'name="storage"\r\n\r\nhide' in request.value.post_data
    page.reload()
    explained(page, "storage=hide")
    assert page_state(page, "state.hideStorage") is True
    assert page.is_checked("#hide-storage")


def test_a_tile_has_its_trust_and_takes_it_along(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    trusted(page)
    compare(page, ["rollout"])
    page.wait_for_selector("#run-compare:not([disabled])")
    shown = page.inner_text("[data-call=rollout] [data-of=trust]")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.click("[data-call=rollout] button")
    explained(page, "method=rollout")
    assert trusted(page).startswith(f"trust: {shown} ")
    assert not [url for url in asked if "/api/trust" in url]


def test_the_usual_comparison_is_the_recommended_one(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    page.click("#tab-compare")
    page.click("#run-compare")
    page.get_by_role("button", name="Compare again").wait_for()
    calls = page.locator("#tiles .tile").evaluate_all("all => all.map((tile) => tile.dataset.call)")
    assert sorted(calls) == sorted(vitrail.methods.registry.RECOMMENDED)
    call = "att_cat(rule=frozen)"
    page.click(f"[data-call='{call}'] button")
    explained(page, "method=att_ixg.plus", "p.rule=frozen")  # its name; att_cat is an alias
    assert page.get_attribute(f"[data-call='{call}'] button", "aria-pressed") == "true"
    assert page.inner_text("#changed") == "· 1 changed"


def test_the_lines_fit_on_a_phone(visit: Visit) -> None:
    page = explained(
        visit(f"#sample=cat&target={TABBY}&against={EGYPTIAN}", size=PHONE, is_mobile=True, has_touch=True)
    )
    trusted(page)
    page.evaluate(USE_STORAGE, STORAGE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
