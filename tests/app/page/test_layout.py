"""The page in a real browser: comparison, errors, keyboard, phone, colours, weight and accessibility."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
from tests.app.pages import DESKTOP, PHONE, Heard, Visit, compare, explained, on_patch, page_state, shown_probability

STATIC = files("vitrail.app") / "page"
MAX_BYTES = 200_000
METHODS = ["decompx.skipplus", "rollout", "grad_cam", "random"]


def tiles(page: Any) -> list[str]:
    return page.locator("#tiles .tile").evaluate_all("all => all.map((tile) => tile.dataset.call)")


def test_methods_are_compared_as_they_come(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    page.evaluate(
        """() => {
          window.counts = [];
          const watch = () => window.counts.push(document.querySelectorAll("#tiles button").length);
          new MutationObserver(watch).observe(document.querySelector("#tiles"), { childList: true });
        }"""
    )
    compare(page, METHODS)
    page.wait_for_selector("#run-compare:not([disabled])")
    counts = page.evaluate("window.counts")
    assert {1, 2, 3, 4} <= set(counts)  # one after another, not all at the end
    assert sorted(tiles(page)) == sorted(METHODS)
    score = "({ insertion, deletion }) => insertion - deletion"
    rows = page.locator("#tiles .tile").evaluate_all(
        f"""all => all.map((tile) => {{
          const read = (name) => Number(tile.querySelector(`[data-of="${{name}}"]`).textContent);
          return ({score})({{ insertion: read("insertion"), deletion: read("deletion") }});
        }})"""
    )
    assert rows == sorted(rows, reverse=True)
    page.select_option("#sort", "name")
    assert tiles(page) == sorted(METHODS)
    page.select_option("#sort", "deletion")
    values = [float(text) for text in page.locator("#tiles [data-of=deletion]").all_inner_texts()]
    assert values == sorted(values)
    page.select_option("#sort", "trust")
    trusts = [float(text) for text in page.locator("#tiles [data-of=trust]").all_inner_texts()]
    assert trusts == sorted(trusts, reverse=True)
    assert all(0 <= trust <= 1 for trust in trusts)
    page.select_option("#sort", "time")
    assert len(tiles(page)) == 4


def test_a_tile_becomes_the_main_explanation(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    compare(page, ["rollout", "integrated_gradients"])
    page.wait_for_selector("#run-compare:not([disabled])")
    page.click(".tile[data-call=rollout] button")
    explained(page, "method=rollout")
    assert page.get_attribute(".tile[data-call=rollout] button", "aria-pressed") == "true"
    page.click(".tile[data-call=integrated_gradients] button")
    explained(page, "method=integrated_gradients")
    assert page_state(page, "state.explanation.shape") == [64, 64]
    page.click("#tab-explain")
    assert page.input_value("#method") == "integrated_gradients"


def test_a_comparison_can_be_cancelled(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    compare(page, ["rollout", "kernel_shap"])
    page.wait_for_selector(".tile[data-call=rollout] button")
    with page.expect_request(lambda request: request.method == "DELETE"):
        page.click("#compare-progress button")
    page.wait_for_selector("#run-compare:not([disabled])")
    assert tiles(page) == ["rollout"]  # what was there stays
    page.click(".tile[data-call=rollout] button")
    explained(page, "method=rollout")


def test_a_file_that_is_no_picture_is_refused_in_words(visit: Visit, heard: Heard) -> None:
    heard.expected.append("status of 4")
    page = visit()
    page.wait_for_selector("#samples img")
    page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no picture"})
    page.wait_for_selector("#alert:not([hidden])")
    assert page.locator("#start").is_visible()
    text = page.inner_text("#alert p")
    assert text[0].isupper()
    assert "picture" in text or "image" in text
    page.click("#alert > button")
    assert page.locator("#alert").is_hidden()


def test_a_busy_server_is_asked_again(visit: Visit, heard: Heard) -> None:
    heard.expected.append("status of 429")
    page = visit()
    page.wait_for_selector("#samples img")
    answers = []

    def busy(route: Any) -> None:
        answers.append(len(answers))
        if len(answers) > 1:
            return route.continue_()
        return route.fulfill(status=429, headers={"Retry-After": "1"}, json={"error": "the queue is full."})

    page.route("**/api/predict", busy)
    page.click("#samples button")
    page.wait_for_function("() => document.querySelector('#note').textContent.includes('trying again in 1 s')")
    explained(page)
    assert len(answers) == 2
    assert page.inner_text("#note") == ""


def test_a_server_that_is_gone_is_told_in_words(visit: Visit, heard: Heard) -> None:
    heard.expected.append("net::ERR")
    page = explained(visit("#sample=coffee"))
    page.route("**/api/**", lambda route: route.abort())
    page.click("#delete-top")
    page.wait_for_selector("#alert:not([hidden])")
    assert "does not answer" in page.inner_text("#alert p")


def test_the_token_is_taken_from_the_link_and_hidden(visit: Visit) -> None:
    page = visit("#token=s3cret&sample=coffee")
    with page.expect_request("**/api/predict") as request:
        explained(page)
    assert request.value.headers["authorization"] == "Bearer s3cret"
    assert "s3cret" not in page.url
    assert page.evaluate("sessionStorage.getItem('vitrail-token')") == "s3cret"


def test_a_missing_token_can_be_given(visit: Visit, heard: Heard) -> None:
    heard.expected.append("status of 401")
    page = visit()
    page.wait_for_selector("#samples img")

    def guard(route: Any) -> None:
        if route.request.headers.get("authorization") == "Bearer right":
            return route.continue_()
        return route.fulfill(status=401, json={"error": "no."})

    page.route("**/api/**", guard)
    page.reload()
    page.wait_for_selector("#token-form:visible")
    page.fill("#token", "right")
    page.press("#token", "Enter")
    page.wait_for_selector("#samples button")
    assert page.locator("#alert").is_hidden()


def press_until(page: Any, key: str, selector: str, most: int = 60) -> None:
    for _ in range(most):
        page.keyboard.press(key)
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"{selector} was not reached with {key}")


def test_everything_works_with_the_keyboard_alone(visit: Visit) -> None:
    page = visit()
    page.wait_for_selector("#samples button")
    press_until(page, "Tab", "#samples li:nth-child(2) button")
    page.keyboard.press("Enter")
    explained(page)
    press_until(page, "Tab", "#panes")
    first = page.inner_text("#readout")
    assert first.startswith("1st of 256")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#readout") != first
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert "deleted" in page.inner_text("#readout")
    assert page_state(page, "state.removed.size") == 1
    page.keyboard.press("Insert")
    assert page_state(page, "state.removed.size") == 0
    press_until(page, "Tab", "#tab-explain")
    press_until(page, "Tab", ".class")
    press_until(page, "Tab", ".versus")
    page.keyboard.press("Enter")
    explained(page, "against=")
    assert page.evaluate("document.activeElement.matches('.versus[aria-pressed=true]')")  # focus is not lost
    press_until(page, "Tab", "#delete-top")
    page.keyboard.press("Enter")
    assert page_state(page, "state.removed.size") == 26
    shown_probability(page)
    press_until(page, "Shift+Tab", "#tab-explain")
    page.keyboard.press("ArrowRight")
    assert page.locator("#compare").is_visible()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
    assert outline == "2px"


def test_a_phone_needs_no_sideways_scrolling(visit: Visit) -> None:
    page = visit(size=PHONE, is_mobile=True, has_touch=True, reduced_motion="reduce")
    page.wait_for_selector("#samples img")
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == PHONE[0]
    assert page.locator("#photograph").is_visible()
    page.tap("#samples button")
    explained(page)
    assert page.evaluate(width) == PHONE[0]
    page.touchscreen.tap(*on_patch(page, page_state(page, "order()[0]")))
    assert page.inner_text("#removed") == "1 of 256 patches deleted."
    assert page.inner_text("#readout").startswith("1st of 256")
    page.tap("#tab-compare")
    page.tap("#choices summary")
    assert page.evaluate(width) == PHONE[0]


def test_colours_follow_the_system_and_the_button(visit: Visit) -> None:
    page = visit(color_scheme="dark")
    page.wait_for_selector("#samples img")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.click("#theme")
    light = page.evaluate(paper)
    assert light != dark
    page.reload()
    page.wait_for_selector("#samples img")
    assert page.evaluate(paper) == light
    page.click("#theme")
    assert page.evaluate(paper) == dark
    assert page.get_attribute("#theme", "aria-pressed") == "true"


@pytest.mark.parametrize(("scheme", "size"), [("light", PHONE), ("dark", DESKTOP)], ids=["phone", "desktop"])
def test_no_serious_barrier_is_found(visit: Visit, scheme: str, size: tuple[int, int]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def check(page: Any) -> None:
        violations = axe.run(page).response["violations"]
        serious = [row for row in violations if row["impact"] in ("serious", "critical")]
        assert [(row["id"], row["nodes"][0]["html"]) for row in serious] == []

    page = visit(size=size, color_scheme=scheme, reduced_motion="reduce")
    page.wait_for_selector("#samples img")
    check(page)
    page.click("#samples button")
    explained(page)
    page.click("#parameters summary")
    page.click(".versus:visible")
    explained(page, "against=")
    page.click("#delete-top")
    shown_probability(page)
    page.fill("#other", "no such class")
    page.press("#other", "Enter")
    check(page)
    page.click("#alert > button")
    compare(page, ["rollout"])
    page.wait_for_selector("#run-compare:not([disabled])")
    check(page)


def test_the_page_is_light_and_plain(visit: Visit) -> None:
    parts = [part for part in STATIC.iterdir() if part.is_file()]
    assert sum(len(part.read_bytes()) for part in parts) < MAX_BYTES
    text = (STATIC / "index.html").read_text(encoding="utf-8")
    assert " style=" not in text
    assert "<style" not in text
    assert text.count("<script") == text.count("<script src=") + text.count('<script type="module" src=')
    page = visit()
    page.wait_for_selector("#samples img")
    weight = page.evaluate(
        "performance.getEntriesByType('resource').filter((entry) => entry.name.includes('/static/'))"
        ".reduce((sum, entry) => sum + entry.decodedBodySize, 0)"
    )
    assert 0 < weight < MAX_BYTES
