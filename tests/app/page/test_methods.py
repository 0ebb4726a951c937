"""The page in a real browser: classes with long names, unsupported methods, parameters, and long work."""

from __future__ import annotations

import re
from typing import Any

from tests.app.pages import DESKTOP, Visit, explained, hold, page_state, shown_probability

TABBY, EGYPTIAN, PEPPER, LEMON = 30, 32, 184, 183
LONG = "black and gold garden spider, Argiope aurantia, and its web"
FIXED = "it has no fixed tokens (hierarchical)"

# Whatever reaches beyond its card, or lies on something else in its row.
OVERFLOWING = """() => [...document.querySelectorAll("#explain .card *")]
  .filter((element) => element.getClientRects().length && !element.closest("svg"))
  .filter((element) =>
    element.getBoundingClientRect().right > element.closest(".card").getBoundingClientRect().right + 0.5)
  .map((element) => element.id || element.className || element.tagName)"""


def reopened(page: Any, path: str, change: Any, fragment: str) -> Any:
    """The page with a modified answer of the server to one request."""
    page.route(path, lambda route: route.fulfill(json=change(route.fetch().json())))
    page.goto(f"{page.url.split('#')[0]}#{fragment}")
    page.reload()
    return explained(page)


def renamed(models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Long names, and one name for two classes."""
    for model in models:
        model["labels"] = [f"{name}, {LONG}" for name in model["labels"]]
        if model["id"] == "photo":
            model["labels"][PEPPER] = model["labels"][LEMON] = "twofold"
    return models


def test_long_names_stay_in_their_cards(visit: Visit) -> None:
    page = visit()
    reopened(page, "**/api/models", renamed, f"sample=cat&target={TABBY}&against={EGYPTIAN}")
    assert LONG in page.inner_text("#question")
    for width in (DESKTOP[0], 1100, 375):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(OVERFLOWING) == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
        heights = [page.locator(part).first.bounding_box()["height"] for part in ("#now", "#classes .share")]
        assert heights[0] < 45  # one line each
        assert heights[1] < 30
    page.click("#delete-top")
    shown_probability(page)
    for width in (375, 1100, DESKTOP[0]):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(OVERFLOWING) == []


def test_a_name_of_two_classes_has_its_number(visit: Visit) -> None:
    page = visit()
    reopened(page, "**/api/models", renamed, "sample=cat")
    names = page.locator("#classes .name").all_inner_texts()
    assert {f"twofold ({PEPPER})", f"twofold ({LEMON})"} & set(names)
    page.fill("#other", "twofold")
    assert page.locator("#labels option").evaluate_all("all => all.map((option) => option.value)")[:2] == [
        f"twofold ({LEMON})",
        f"twofold ({PEPPER})",
    ]
    page.press("#other", "Enter")
    assert "or the number" in page.inner_text("#alert p")
    page.fill("#other", str(PEPPER))
    page.press("#other", "Enter")
    explained(page, f"target={PEPPER}")
    page.fill("#other", f"twofold ({LEMON})")
    page.press("#other", "Enter")
    explained(page, f"target={LEMON}")
    assert page.inner_text("#classes li.target .name") == f"twofold ({LEMON})"


def test_a_pressed_rival_is_readable_under_the_pointer(visit: Visit) -> None:
    page = explained(visit(f"#sample=cat&against={EGYPTIAN}"))
    rival = page.locator(".versus[aria-pressed=true]")
    look = "button => [getComputedStyle(button).color, getComputedStyle(button).backgroundColor]"
    away = rival.evaluate(look)
    rival.hover()
    assert rival.evaluate("button => button.matches(':hover')")
    assert rival.evaluate(look) == away


def unfitting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "supported": FIXED} if row["name"] in ("rollout", "tis") else row for row in rows]


def test_why_a_method_does_not_fit_is_told(visit: Visit) -> None:
    page = visit()
    reopened(page, "**/api/methods*", unfitting, "sample=star-and-heart&method=tis")
    used = page.input_value("#method")
    note = page.inner_text("#instead")
    assert note == f"tis does not support this model: {FIXED}. {used} is shown instead."
    count = len(page_state(page, "[...state.methods, ...state.unsupported]"))
    assert page.inner_text("#unsupported summary") == f"2 of {count} methods do not support this model"
    page.click("#unsupported summary")
    assert page.inner_text("#reasons dt") == FIXED
    assert set(page.inner_text("#reasons dd").split(", ")) == {"rollout", "tis"}
    page.select_option("#method", "grad_cam")
    explained(page, "method=grad_cam")
    assert page.locator("#instead").is_hidden()


def test_defaults_take_back_what_was_not_applied(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart&method=integrated_gradients&p.steps=2"))
    page.click("#parameters summary")
    page.fill("#p-steps", "3")
    page.click("#form >> text=Defaults")
    page.wait_for_function("() => !location.hash.includes('p.steps')")
    default = page.input_value("#p-steps")
    assert default not in ("2", "3")
    page.fill("#p-steps", "4")
    page.click("#form >> text=Defaults")
    assert page.input_value("#p-steps") == default


def test_a_cancelled_first_explanation_can_be_asked_for(visit: Visit) -> None:
    page = visit()
    page.wait_for_selector("#samples img")
    hold(page, "**/api/explain")
    page.click("#samples button")
    page.wait_for_selector("#progress:not([hidden])")
    assert page.locator("#run").is_hidden()
    page.click("#progress button")
    page.unroute("**/api/explain")
    page.click("#run")
    explained(page)
    assert page.locator("#run").is_hidden()


def test_a_picture_that_waits_is_told(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    held = hold(page, "**/api/picture")
    page.click("[data-save=png]")
    page.wait_for_function("() => document.querySelector('#note').textContent.startsWith('Rendering the PNG')")
    page.click("[data-save=png]")  # once is enough
    with page.expect_download():
        held[0].continue_()
    page.wait_for_function("() => document.querySelector('#note').textContent.startsWith('Saved as')")
    assert len(held) == 1


def test_long_work_says_how_long_it_may_take(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    texts = page.evaluate(
        """async () => {
          const { Progress } = await import("/static/progress.js");
          const box = document.querySelector("#compare-progress"), progress = new Progress(box);
          progress.start("work", () => {});
          const at = (done, now) => {
            progress.update("progress", { what: "masks", done, total: 100 }, now);
            return box.querySelector("p").textContent;
          };
          const all = [at(0, 100), at(1, 101), at(10, 110), at(20, 120), at(95, 195), at(2, 200), at(12, 300)];
          progress.stop();
          return all;
        }"""
    )
    estimates = [re.sub(r"masks · \d+ of 100", "", text) for text in texts]
    assert estimates == ["", "", " · about 2 min left", " · about 80 s left", "", "", " · about 15 min left"]
