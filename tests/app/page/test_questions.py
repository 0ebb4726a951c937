"""The page in a real browser: any of several classes, texts, and the similarity to another picture."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from tests.app.pages import PHONE, Heard, Visit, compare, explained, hold, on_patch, page_state
from tests.app.serving import SAMPLES

import vitrail
from vitrail.targets import Group, Similarity

STAR, RING = (SAMPLES / f"{name}.png" for name in ("star-and-heart", "ring-and-hourglass"))
OTHER = "other_sample=ring-and-hourglass"
SIMILAR = f"#sample=star-and-heart&model=scenes&{OTHER}"
FILE = {"name": "ring.png", "mimeType": "image/png", "buffer": RING.read_bytes()}


@pytest.fixture(scope="module")
def scenes() -> Any:
    return vitrail.load("scenes")


def choose(page: Any, kind: str) -> None:
    """A kind of question."""
    page.locator(f"#ask label:has([value={kind}])").click()


def both_shown(page: Any, *parts: str) -> Any:
    """Waits for both maps of a similarity."""
    explained(page, "measure=", *parts)
    page.wait_for_selector("#second:not([aria-busy])")
    return page


def test_any_of_several_classes_is_asked_as_it_is_typed(visit: Visit, heard: Heard, scenes: Any) -> None:
    heard.expected.append("status of 422")
    page = explained(visit("#sample=star-and-heart"))
    before = page.url
    choose(page, "group")
    assert page.locator("#classes").is_hidden()
    assert page.url == before  # nothing is asked yet
    page.fill("#group", "st*, ring")
    explained(page, "group=st*,+ring")
    assert page.inner_text("#typed") == "2 of 10 classes: ring, star."
    expected = vitrail.explain(scenes, str(STAR), target=Group("st*, ring"))
    np.testing.assert_allclose(page_state(page, "state.explanation.values"), expected.map, rtol=1e-3, atol=1e-4)
    assert page.inner_text("#question").startswith("Why st*, ring (")
    page.fill("#rival", "no such*")
    page.wait_for_selector("#typed.wrong")
    assert page.inner_text("#typed") == "No class of scenes matches 'no such*'."
    assert page.locator("#alert").is_hidden()
    assert page.input_value("#rival") == "no such*"  # whoever types goes on
    page.fill("#rival", "heart")
    explained(page, "rival=heart")
    assert "rather than heart" in page.inner_text("#question")
    assert page.inner_text("#legend .low").startswith("for heart")
    page.reload()
    explained(page, "group=", "rival=heart")
    assert [page.input_value(f"#{field}") for field in ("group", "rival")] == ["st*, ring", "heart"]
    assert page.is_checked("input[value=group]")
    page.click("#delete-top")
    page.wait_for_function("() => document.querySelector('#says').textContent.includes('prediction is')")
    compare(page, ["decompx", "grad_cam"])
    page.wait_for_selector("#run-compare:not([disabled])")
    assert page.locator("#tiles button").count() == 2
    assert page.inner_text("#compared").startswith("Why st*, ring")
    page.click("#tab-explain")
    choose(page, "class")
    page.wait_for_function("() => !location.hash.includes('group=')")
    assert page.locator("#classes").is_visible()


def test_two_pictures_are_compared(visit: Visit, scenes: Any) -> None:
    page = explained(visit("#sample=star-and-heart"))
    assert page.locator("#second").is_hidden()
    choose(page, "similarity")
    page.click("#second-samples button[title='Ring and hourglass']")
    both_shown(page, OTHER)
    pair = vitrail.similar(scenes, str(STAR), str(RING), pairs=False)
    for side, explanation in (("explanation", pair.first), ("second", pair.second)):
        np.testing.assert_allclose(page_state(page, f"state.{side}.values"), explanation.map, rtol=1e-3, atol=1e-4)
    assert float(page.inner_text("#now").replace("−", "-")) == pytest.approx(pair.score, abs=6e-4)
    assert "%" not in page.inner_text("#meter") + page.inner_text("#question")
    assert page.inner_text("#question").startswith("Why is it similar to Ring and hourglass (cosine ")
    assert page.get_attribute("#second img", "alt") == "Ring and hourglass"
    page.hover("#second canvas >> nth=1")
    assert "of Ring and hourglass" in page.inner_text("#readout")
    page.click("#delete-top")
    page.wait_for_selector("#meter:not([aria-busy])")
    assert page.inner_text("#delta").startswith("−0.")
    page.click("#reset")
    page.click("#play")
    page.wait_for_selector("#scrub:not([disabled])")
    assert "scaled: no patch 0, all patches 1" in page.inner_text("#curve")
    marks = [text.replace("−", "-") for text in page.locator("#curve text").all_text_contents()[:6:2]]
    assert float(marks[0]) < pair.score < float(marks[2])  # scores as they are, not their scale
    page.click("#reset")
    page.select_option("#measure", "dot")
    both_shown(page, "measure=dot")
    expected = vitrail.explain(scenes, str(STAR), target=Similarity(str(RING), "dot")).probability
    assert float(page.inner_text("#now").replace("−", "-")) == pytest.approx(expected, abs=6e-4)
    choose(page, "class")
    page.wait_for_function("() => !location.hash.includes('other_sample')")
    assert page.locator("#second").is_hidden()


def test_a_link_restores_two_pictures(visit: Visit, heard: Heard) -> None:
    page = both_shown(visit(f"{SIMILAR}&measure=dot"), OTHER, "measure=dot")
    assert page.is_checked("input[value=similarity]")
    assert page.input_value("#measure") == "dot"
    page.set_input_files("#second-file", FILE)
    page.wait_for_function("() => !location.hash.includes('other_sample')")
    both_shown(page, "other=", "measure=dot")
    page.reload()
    both_shown(page, "other=", "measure=dot")
    heard.expected.append("status of 410")
    page.goto(f"{page.url.split('#')[0]}#sample=cat&model=scenes&other={'0' * 64}")
    page.wait_for_function("() => document.querySelector('#note').textContent.includes('choose it again')")
    explained(page, "sample=cat")
    assert page.is_checked("input[value=class]")


def test_a_dropped_picture_is_compared_while_that_is_asked(visit: Visit, heard: Heard) -> None:
    heard.expected.append("status of 4")
    page = explained(visit("#sample=star-and-heart&model=scenes"))
    choose(page, "similarity")
    drop = """([name, bytes]) => {
      const data = new DataTransfer();
      data.items.add(new File([Uint8Array.from(bytes)], name, { type: "image/png" }));
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop, ["notes.png", list(b"no picture")])
    page.wait_for_selector("#alert:not([hidden])")
    assert "not an image" in page.inner_text("#alert p")
    page.evaluate(drop, ["ring.png", list(RING.read_bytes())])
    both_shown(page, "other=", "sample=star-and-heart")
    sent: list[bytes] = []

    def lose_once(route: Any) -> None:
        sent.append(route.request.post_data_buffer)
        if len(sent) == 1:
            return route.fulfill(status=410, json={"error": "this picture is no longer in the server's memory."})
        return route.continue_()

    page.route("**/api/mask", lose_once)
    page.click("#delete-top")
    page.wait_for_function("() => document.querySelector('#delta').textContent.startsWith('−')")
    assert b'name="other_picture"' in sent[0]
    assert b'name="other"; filename="ring.png"' in sent[1]  # sent again: the server had forgotten it


def test_patches_are_matched_on_request(visit_reading: Visit, reading: Any) -> None:
    page = both_shown(visit_reading("#sample=cat&other_sample=coffee"))
    assert "Then point at a patch" in page.inner_text("#matching")
    held = hold(page, "**/api/explain")
    page.click("#match")
    page.wait_for_selector("#progress:not([hidden])")
    page.click("#progress button")
    page.unroute("**/api/explain")
    assert b'name="pairs"' in held[0].request.post_data_buffer
    page.click("#match")
    page.wait_for_selector("#match[disabled]")
    assert "Point at a patch of one image" in page.inner_text("#matching")
    with reading.client() as client:
        fields = {"sample": "cat", "other_sample": "coffee", "pairs": "true", "trust": "false"}
        answer = client.post("/api/explain", files={name: (None, value) for name, value in fields.items()}).json()
    shares = np.frombuffer(base64.b64decode(answer["pairs"]["base64"]), dtype="<f4").reshape(16, 16)
    page.mouse.move(*on_patch(page, 5, (4, 4)))
    row, column = divmod(int(shares[5].argmax()), 4)
    assert f"best with row {row + 1}, column {column + 1} (" in page.inner_text("#readout")
    alone = page.locator("#second canvas").first.evaluate("canvas => canvas.toDataURL()")
    page.mouse.move(0, 0)
    assert page.locator("#second canvas").first.evaluate("canvas => canvas.toDataURL()") != alone
    page.locator("#second canvas").nth(1).focus()
    page.keyboard.press("Home")
    page.keyboard.press("PageUp")
    row, column = divmod(int(shares[:, 0].argmax()), 4)
    assert "Row 1, column 1 of A cup of coffee" in page.inner_text("#readout")
    assert f"best with row {row + 1}, column {column + 1} (" in page.inner_text("#readout")


def test_a_text_is_answered_as_it_is_typed_and_the_last_one_wins(visit_reading: Visit) -> None:
    page = explained(visit_reading("#sample=cat"))
    choose(page, "text")
    held: list[Any] = []
    page.route("**/api/explain", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/api/explain"):
        page.fill("#text", "a red")
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/api/explain")):  # it is cancelled
        page.locator("#text").press_sequentially(" star")
    explained(page, "text=a+red+star")
    assert page.input_value("#text") == "a red star"
    assert page.evaluate("document.activeElement.id") == "text"
    assert page.inner_text("#classes li.target .name") == "a red star"
    assert page.locator("#classes li").count() == 3
    page.click(".versus[data-index='0']")
    explained(page, "text=a+red+star", "against=0")
    assert page.inner_text("#question").startswith("Why a red star (")
    assert "rather than a photo of a cat" in page.inner_text("#question")
    page.reload()
    explained(page, "text=a+red+star", "against=0")
    assert page.input_value("#text") == "a red star"
    page.fill("#text", "a " * 50)
    page.wait_for_selector("#typed.wrong")
    assert "tokens" in page.inner_text("#typed")
    page.fill("#text", " ")
    page.wait_for_selector("#typed:not(.wrong)")
    assert page.inner_text("#typed") == "The text is empty: the map stays until it is not."
    assert "text=a+red+star" in page.url
    page.click("#classes .class >> nth=-1")
    page.wait_for_function("() => !location.hash.includes('text=')")
    assert page.is_checked("input[value=class]")


def test_only_models_that_read_texts_are_asked_about_texts(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart&model=scenes&text=a+red+star"))
    assert page.is_checked("input[value=class]")
    assert page.locator("#ask label:has([value=text])").is_hidden()
    assert "text=" not in page.url
    told = "The link asks about a text, which scenes cannot answer: choose another model."
    assert page.inner_text("#note") == told


def test_a_link_without_a_question_is_answered_without_a_note(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart&model=scenes"))
    assert page.inner_text("#note") == ""


@pytest.mark.parametrize(("scheme", "size"), [("light", PHONE), ("dark", (1280, 800))], ids=["phone", "desktop"])
def test_no_serious_barrier_is_found_in_any_question(visit_reading: Visit, scheme: str, size: tuple[int, int]) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = explained(visit_reading("#sample=cat", size=size, color_scheme=scheme))
    for kind, part in (("group", "group=0"), ("text", "text=a+red+star"), ("similarity", "other_sample=coffee")):
        choose(page, kind)
        if kind == "similarity":
            page.click("#second-samples button[title='A cup of coffee']")
        else:
            page.fill(f"#{kind}", {"group": "0", "text": "a red star"}[kind])
        explained(page, part)
        violations = axe.run(page).response["violations"]
        serious = [row for row in violations if row["impact"] in ("serious", "critical")]
        assert [(row["id"], row["nodes"][0]["html"]) for row in serious] == []
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
