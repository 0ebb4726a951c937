"""The page in a real browser, against the real server: from a picture to an explanation that can be tested by hand."""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.app.pages import Heard, Visit, explained, on_patch, page_state, photo_model, shown_probability, upload

import vitrail
from vitrail.show.colours import Scale
from vitrail.show.pixels import LIGHTENING

COFFEE, CAT = (files("vitrail.data") / "samples" / f"{name}.jpg" for name in ("coffee", "cat"))
LABEL, ESPRESSO, TABBY, EGYPTIAN = "espresso", 193, 30, 32
PATCHES, SCENE_PATCHES = 256, 64

# Presses the button within the timer: from outside the animation might be over before the press arrives.
PAUSE_AT = """(step) => {
  const start = window.setInterval, play = document.querySelector("#play"), scrub = document.querySelector("#scrub");
  window.setInterval = (action, pace) => start(() => {
    action();
    if (Number(scrub.value) === step) play.click();
  }, pace);
}"""


@pytest.fixture(scope="module")
def photograph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A picture that no sample is, wider than what the model looks at."""
    path = tmp_path_factory.mktemp("upload") / "a cup.png"
    Image.open(str(COFFEE)).crop((0, 10, 448, 299)).save(path)
    return path


def visible(page: Any, *parts: str) -> list[str]:
    return [part for part in parts if page.locator(part).is_visible()]


def rows(page: Any) -> list[str]:
    return page.locator("#classes .name").all_inner_texts()


def test_an_upload_is_predicted_and_explained(visit: Visit, photograph: Path) -> None:
    page = visit()
    page.wait_for_selector("#samples img")
    assert visible(page, "#start", "#work", "#alert", "#new") == ["#start"]
    upload(page, photograph)
    assert visible(page, "#start", "#work", "#alert", "#new") == ["#work", "#new"]
    assert rows(page)[0] == LABEL
    assert len(rows(page)) == 5
    shares = [float(text.replace("%", "")) for text in page.locator("#classes .share").all_inner_texts()]
    assert shares == sorted(shares, reverse=True)
    assert page.get_attribute("#classes li.target .class", "aria-pressed") == "true"
    assert page.input_value("#method") == "decompx.skipplus"
    assert page.inner_text("#now") == page.inner_text("#classes li.target .share")
    assert page.evaluate("document.querySelector('#photo').naturalWidth") == 448
    assert page.locator("#legend .unseen-key").is_visible()  # left and right of the middle square
    assert page.title().startswith(LABEL)


@pytest.mark.parametrize("way", ["drop", "paste", "camera"])
def test_other_ways_to_open_a_picture(visit: Visit, photograph: Path, way: str) -> None:
    page = visit(has_touch=way == "camera", is_mobile=way == "camera")
    page.wait_for_selector("#samples img")
    if way == "camera":
        with page.expect_file_chooser() as chooser:
            page.tap("#photograph")
        chooser.value.set_files(photograph)
    else:
        page.evaluate(
            """([way, text]) => {
              const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
              const data = new DataTransfer();
              data.items.add(new File([bytes], "cup.png", { type: "image/png" }));
              const source = way === "drop" ? { dataTransfer: data } : { clipboardData: data };
              const Kind = way === "drop" ? DragEvent : ClipboardEvent;
              document.body.dispatchEvent(new Kind(way, { ...source, bubbles: true, cancelable: true }));
            }""",
            [way, base64.b64encode(photograph.read_bytes()).decode()],
        )
    assert rows(explained(page))[0] == LABEL


def test_hovering_reads_a_patch_in_words(visit: Visit) -> None:
    page = explained(visit(f"#sample=cat&target={TABBY}&against={EGYPTIAN}"))
    best, worst = page_state(page, "[order()[0], order().at(-1)]")
    question = "“tabby” rather than “Egyptian cat”"
    page.mouse.move(*on_patch(page, best))
    assert page.inner_text("#readout .words") == f"1st of {PATCHES}: strong evidence for {question}"
    row, column = divmod(best, 16)
    assert page.inner_text("#readout .place").startswith(f"Row {row + 1}, column {column + 1} · score +")
    page.wait_for_function("() => document.querySelector('#spoken').textContent.startsWith('1st of 256')")
    page.mouse.move(*on_patch(page, worst))
    assert page.inner_text("#readout .words").startswith(f"{PATCHES}th of {PATCHES}: ")
    assert f"evidence against {question}" in page.inner_text("#readout .words")
    page.mouse.move(0, 0)
    assert page.inner_text("#readout .words") == ""


def test_deleting_what_matters_makes_the_probability_fall(visit: Visit) -> None:
    page = explained(visit("#sample=coffee"))
    whole = shown_probability(page)
    assert whole > 0.9
    for patch in page_state(page, "order().slice(0, 3)"):
        page.mouse.click(*on_patch(page, patch))
    assert page.inner_text("#removed") == "3 of 256 patches deleted."
    for _ in range(5):
        page.click("#delete-top")
    fallen = shown_probability(page)
    assert fallen < whole - 0.3
    assert page.inner_text("#delta").startswith("−")
    assert "without" in page.inner_text("#says") or "prediction is" in page.inner_text("#says")
    bar = page.evaluate("Number(document.querySelector('.bar-now').style.getPropertyValue('--now'))")
    assert bar == pytest.approx(fallen, abs=6e-4)
    page.click("#reset")
    assert shown_probability(page) == whole
    assert page.locator("#reset").is_disabled()


def test_patches_are_put_back(visit: Visit) -> None:
    page = explained(visit("#sample=coffee"))
    whole = shown_probability(page)
    page.click("#delete-all")
    empty = shown_probability(page)
    assert empty < 0.2
    best = page_state(page, "order()")
    page.mouse.click(*on_patch(page, best[0]))  # after "delete all" a click puts back
    assert page.inner_text("#removed") == "255 of 256 patches deleted."
    page.check("input[name=brush][value=delete]")
    page.keyboard.down("Shift")
    page.mouse.click(*on_patch(page, best[1]))
    page.keyboard.up("Shift")
    assert page.inner_text("#removed") == "254 of 256 patches deleted."
    page.check("input[name=brush][value=insert]")
    page.mouse.move(*on_patch(page, 16 * 7))
    page.mouse.down()
    page.mouse.move(*on_patch(page, 16 * 7 + 15), steps=32)
    page.mouse.up()
    assert int(page.inner_text("#removed").split()[0]) <= 254 - 14
    for patch in best[:120]:
        page_state(page, f"state.removed.delete({patch})")
    page.mouse.click(*on_patch(page, best[130]))
    assert shown_probability(page) > max(empty, whole - 0.3)


def test_the_controls_stay_where_they_are_when_an_answer_arrives(visit: Visit) -> None:
    page = explained(visit("#sample=coffee"))
    place = page.locator("#brush").bounding_box()
    answer = {"probability": 0.1, "full": 0.9, "space": "tokens", "classes": [{"index": EGYPTIAN, "probability": 0.5}]}
    page.route("**/api/mask", lambda route: route.fulfill(json=answer))
    page.click("#delete-all")
    page.wait_for_function("() => document.querySelector('#says').textContent.includes('Egyptian cat')")
    assert page.locator("#brush").bounding_box()["y"] == pytest.approx(place["y"], abs=1)


def test_only_the_newest_answer_is_shown(visit: Visit) -> None:
    page = explained(visit("#sample=coffee"))
    held: list[Any] = []
    page.route("**/api/mask", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/api/mask"):
        page.click("#delete-top")
    with page.expect_request_finished(lambda request: request.url.endswith("/api/mask")):
        page.click("#delete-all")
    assert shown_probability(page) < 0.2
    from playwright.sync_api import Error

    with suppress(Error):  # the page may have aborted the first request
        held[0].fulfill(json={"probability": 0.99, "full": 0.99, "classes": [{"index": 0, "label": "late"}]})
    page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 0))")
    assert shown_probability(page) < 0.2
    assert "late" not in page.inner_text("#says")


def test_two_classes_are_contrasted(visit: Visit) -> None:
    page = explained(visit("#sample=cat"))
    alone = page_state(page, "state.explanation.values")
    page.click(f".versus[data-index='{EGYPTIAN}']")
    explained(page, f"target={TABBY}", f"against={EGYPTIAN}")
    question = page.inner_text("#question")
    assert re.match(r"Why tabby \(5\d\.\d %\) rather than Egyptian cat \(2\d\.\d %\)\?", question)
    local = vitrail.explain(photo_model(), str(CAT), target=TABBY, against=EGYPTIAN)
    np.testing.assert_allclose(page_state(page, "state.explanation.values"), local.map, rtol=1e-3, atol=1e-4)
    assert not np.allclose(alone, local.map, atol=1e-2)
    page.click("#question button")
    page.wait_for_function("() => !location.hash.includes('against')")
    page.fill("#other", "bell pepp")
    page.press("#other", "Enter")
    explained(page, "target=184")
    assert page.inner_text("#classes li.target .name") == "bell pepper"
    page.fill("#other", "no such thing")
    page.press("#other", "Enter")
    assert "no class “no such thing”" in page.inner_text("#alert p")


@pytest.mark.parametrize("method", ["decompx.skipplus", "rollout"])
def test_the_map_has_the_colours_of_vitrail_show(visit: Visit, method: str) -> None:
    page = explained(visit(f"#sample=coffee&method={method}&drawing=blocks&alpha=0.7"))
    assert page.evaluate("getComputedStyle(document.querySelector('#map')).opacity") == "0.7"
    grey, light = re.findall(r"[\d.]+", page.evaluate("getComputedStyle(document.querySelector('#photo')).filter"))
    assert (float(grey), float(light)) == (0.7, pytest.approx(1 - LIGHTENING * 0.7)), "faded as in vitrail.show"
    local = vitrail.explain(photo_model(), str(COFFEE), method)
    scale = Scale.of(local.shares, local.signed)
    pixels = page.evaluate(
        """async () => {
          const { state } = await import("/static/state.js"), canvas = document.querySelector("#map");
          const context = canvas.getContext("2d"), [left, top, right, bottom] = state.prediction.box;
          const scale = canvas.width / state.prediction.size[0], all = [];
          const { data } = context.getImageData(0, 0, canvas.width, canvas.height);
          for (let row = 0; row < 16; row++) for (let column = 0; column < 16; column++) {
            const x = scale * (left + ((column + 0.5) / 16) * (right - left));
            const y = scale * (top + ((row + 0.5) / 16) * (bottom - top));
            const at = 4 * (Math.floor(y) * canvas.width + Math.floor(x));
            all.push([...data.slice(at, at + 4)]);
          }
          return all;
        }"""
    )
    places = scale.positions(local.shares.numpy()).flatten()
    np.testing.assert_allclose(np.array(pixels)[:, 3], 255 * scale.strengths(places) ** 0.8, atol=5)
    strong = scale.strengths(places) > 0.2
    np.testing.assert_allclose(np.array(pixels)[strong, :3], scale.colours(places)[strong], atol=9)
    low, high = page.inner_text("#legend .low"), page.inner_text("#legend .high")
    names = (f"against {local.label}", f"for {local.label}") if local.signed else ("less", "more")
    assert low.startswith(names[0])
    assert high.endswith(names[1])


def test_an_outline_leaves_the_photo_and_says_what_it_encloses(visit: Visit) -> None:
    page = explained(visit("#sample=coffee&drawing=outline"))
    assert page.evaluate("getComputedStyle(document.querySelector('#photo')).filter") == "none"
    assert page.inner_text("#legend .high") == "Outlined: the smallest area with half of the evidence for espresso"
    assert not page.locator("#legend canvas").is_visible()
    colours = page.evaluate(
        """() => {
          const canvas = document.querySelector("#map"), { width, height } = canvas;
          const shades = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
          return [0, 0xffffffff].map((shade) => shades.filter((each) => each === shade).length / shades.length);
        }"""
    )
    assert 0.02 < colours[0] < 0.6, "clear within the outline"
    assert colours[1] > 0.002, "a white line"
    page.check("input[name=drawing][value=smooth]", force=True)
    assert page.locator("#legend canvas").is_visible()


def test_a_contrast_names_both_classes(visit: Visit) -> None:
    page = explained(visit(f"#sample=coffee&target={ESPRESSO}&against={TABBY}"))
    assert page.inner_text("#legend .low").startswith("for tabby")
    assert page.inner_text("#legend .high").endswith("for espresso")


def test_parameters_are_a_form(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    page.select_option("#method", "rise")
    page.click("#parameters summary")
    assert page.get_attribute("#p-masks", "type") == "number"
    assert page.locator("#p-space option").all_inner_texts() == ["pixels", "tokens"]
    page.fill("#p-masks", "64")
    page.fill("#p-seed", "3")
    page.click("#form button[type=submit]")
    explained(page, "method=rise", "p.masks=64", "p.seed=3")
    assert page_state(page, "[state.explanation.method, state.explanation.params.masks]") == ["rise", 64]
    assert page.inner_text("#changed") == "· 2 changed"
    page.fill("#p-masks", "-5")
    page.click("#form button[type=submit]")
    page.wait_for_selector("#alert:not([hidden])")
    assert "masks" in page.inner_text("#alert p").lower()
    assert page.inner_text("#changed") == "· 2 changed"  # what is shown is what was computed
    page.click("#form >> text=Defaults")
    page.select_option("#method", "decompx.skipplus")
    explained(page, "method=decompx.skipplus")
    assert "p.masks" not in page.url


def test_long_work_shows_progress_and_can_be_cancelled(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    before = page_state(page, "state.explanation.values")
    with page.expect_request(lambda request: request.method == "DELETE" and "/api/jobs/" in request.url):
        page.select_option("#method", "kernel_shap")
        page.wait_for_selector("#progress:not([hidden])")
        page.click("#progress button")
    page.wait_for_selector("#progress", state="hidden")
    assert page.input_value("#method") == "decompx.skipplus"
    assert page_state(page, "state.explanation.values") == before
    page.click("#classes li:nth-child(2) .class")
    explained(page, "target=")


def test_the_animation_draws_the_curve(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart", reduced_motion="no-preference"))
    whole = shown_probability(page)
    requests: list[str] = []
    page.on("request", lambda request: "/api/" in request.url and requests.append(request.url.rsplit("/", 1)[-1]))
    step = 6
    page.evaluate(PAUSE_AT, step)
    page.click("#play")
    page.wait_for_function("step => Number(document.querySelector('#scrub').value) === step", arg=step)
    assert page.inner_text("#play") == "Play"
    removed = page_state(page, "[...state.removed]")
    assert page.locator("#curve polyline.deletion:not(.ghost)").get_attribute("points").count(",") == step + 1
    assert len(removed) == step * SCENE_PATCHES // 32
    assert set(removed) == set(page_state(page, f"order().slice(0, {len(removed)})"))
    asked = len(requests)
    page.check("input[name=way][value=insertion]")
    page.focus("#scrub")
    page.keyboard.press("End")
    assert page_state(page, "state.removed.size") == 0
    assert page.locator("#curve polyline.insertion:not(.ghost)").get_attribute("points").count(",") == 33
    assert shown_probability(page) == whole
    assert requests[asked:] == []  # one request was enough
    page.keyboard.press("Home")
    assert page.inner_text("#removed") == "64 of 64 patches deleted."
    assert "insertion 0." in page.inner_text("#curve figcaption")


def test_reduced_motion_shows_the_whole_curve_at_once(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart", reduced_motion="reduce"))
    page.click("#play")
    page.wait_for_selector("#curve polyline.deletion:not(.ghost)")
    assert page.locator("#curve polyline.deletion:not(.ghost)").get_attribute("points").count(",") == 33
    assert page.inner_text("#play") == "Play"


def test_a_model_without_tokens_is_played_in_pixels(visit: Visit) -> None:
    page = visit(reduced_motion="reduce")
    page.wait_for_selector("#samples img")

    def without_tokens(route: Any) -> None:
        models = route.fetch().json()
        route.fulfill(json=[{**model, "view": "features"} for model in models])

    page.route("**/api/models", without_tokens)
    page.goto(f"{page.url}#sample=star-and-heart")
    page.reload()
    explained(page)
    with page.expect_request("**/api/score") as request:
        page.click("#play")
    assert "pixels" in request.value.post_data
    page.wait_for_selector("#scrub:not([disabled])")
    assert page.inner_text("#removed") == "64 of 64 patches deleted."
    page.focus("#scrub")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#removed") == "2 of 64 patches deleted."


def test_another_model_looks_at_the_same_picture(visit: Visit) -> None:
    page = explained(visit("#sample=coffee"))
    page.click("#delete-top")
    page.select_option("#model", "scenes")
    explained(page, "model=scenes")
    assert page_state(page, "[state.prediction.grid, state.removed.size]") == [[8, 8], 0]
    assert page.evaluate("document.querySelector('#photo').naturalWidth") == 448


@pytest.mark.usefixtures("as_served")
def test_downloads_hold_what_was_computed(visit: Visit, tmp_path: Path) -> None:
    page = explained(visit("#sample=coffee"))
    kept = {}
    for kind in ("png", "json", "npz"):
        with page.expect_download() as download:
            page.click(f"[data-save={kind}]")
        assert download.value.suggested_filename == f"A-cup-of-coffee.decompx.skipplus.{kind}"
        kept[kind] = tmp_path / f"saved.{kind}"
        download.value.save_as(kept[kind])
    local = vitrail.explain(photo_model(), str(COFFEE))
    opened = vitrail.open(kept["json"], image=str(COFFEE))
    torch.testing.assert_close(opened.map, local.map, rtol=1e-3, atol=1e-4)
    assert (opened.target, opened.label, opened.method) == (ESPRESSO, LABEL, "decompx.skipplus")
    with np.load(kept["npz"]) as arrays:
        np.testing.assert_allclose(arrays["map"], local.map, rtol=1e-3, atol=1e-4)
        assert arrays["map"].dtype == np.float32
        assert arrays["tokens"].shape == (16, 16)
        np.testing.assert_allclose(arrays["box"], local.box)
        assert arrays["target"].tolist() == [ESPRESSO]
    local.trust()
    picture = np.asarray(Image.open(kept["png"]).convert("RGB"), dtype=float)
    expected = np.asarray(local.picture().convert("RGB"), dtype=float)
    assert picture.shape == expected.shape
    assert np.abs(picture - expected).mean() < 1


def test_a_link_restores_the_view(visit: Visit, photograph: Path) -> None:
    page = upload(visit(permissions=["clipboard-read", "clipboard-write"]), photograph)
    page.select_option("#method", "rollout")
    explained(page, "method=rollout")
    page.click("#delete-top")
    fallen = shown_probability(page)
    page.check("input[name=drawing][value=blocks]")
    page.locator("#alpha").fill("40")
    explained(page, "drawing=blocks", "alpha=0.4", "removed=")
    page.bring_to_front()  # only a page with the focus may write to the clipboard
    page.click("[data-save=link]")
    page.wait_for_function("() => document.querySelector('#note').textContent.startsWith('Link copied')")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.url
    other = explained(visit(link[link.index("#") :]))
    assert other.evaluate("document.querySelector('#photo').naturalWidth") == 448
    assert other.input_value("#method") == "rollout"
    assert other.input_value("#alpha") == "40"
    assert other.is_checked("input[name=drawing][value=blocks]")
    assert shown_probability(other) == fallen
    assert other.inner_text("#removed") == page.inner_text("#removed")
    other.evaluate("location.hash = '#sample=coffee&method=grad_cam'")  # a link followed in the open page
    explained(other, "sample=coffee", "method=grad_cam")


def test_a_link_to_a_picture_that_has_gone_waits_for_it(visit: Visit, photograph: Path, heard: Heard) -> None:
    heard.expected.append("status of 4")
    page = visit(f"#picture={'0' * 64}&method=rollout&removed=1,2,3&target={TABBY}")
    page.wait_for_selector("#alert:not([hidden])")
    assert "no longer has the image" in page.inner_text("#alert p")
    upload(page, photograph)
    explained(page, "method=rollout", f"target={TABBY}", "removed=1,2,3")
    assert page.inner_text("#removed") == "3 of 256 patches deleted."
    assert page.locator("#alert").is_hidden()


def test_a_picture_the_server_forgot_is_sent_again(visit: Visit, photograph: Path, heard: Heard) -> None:
    heard.expected.append("status of 410")
    page = upload(visit(), photograph)
    asked: list[bool] = []

    def forget(route: Any) -> None:
        asked.append(b'name="image"' in (route.request.post_data_buffer or b""))
        if asked[-1]:
            route.continue_()
        else:
            route.fulfill(status=410, json={"error": "this picture is no longer in the server's memory."})

    page.route("**/api/mask", forget)
    page.click("#delete-top")
    page.wait_for_function("() => document.querySelector('#says').textContent.includes('prediction is')")
    assert asked == [False, True]
    assert page.locator("#alert").is_hidden()
