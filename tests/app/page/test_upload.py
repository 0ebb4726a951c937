"""The page in a real browser: opening pictures, each displayed as the model sees it."""

from __future__ import annotations

import io
from importlib.resources import files
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from tests.app.pages import Heard, Visit, compare, explained, hold, page_state, shown_probability

CAT = Image.open(str(files("vitrail.data") / "samples" / "cat.jpg")).convert("RGB").resize((300, 200))
ORIENTATION = 0x0112

# Only the photo: no map, no hatching over what the model does not see.
BARE = "() => ['map', 'panes'].forEach((id) => { document.getElementById(id).style.visibility = 'hidden'; })"
TEXT = {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no picture"}


def picture(kind: str, image: Image.Image = CAT, **options: Any) -> dict[str, Any]:
    """A file as the browser gets it."""
    image.save(data := io.BytesIO(), kind.upper(), **options)
    return {"name": f"a picture.{kind}", "mimeType": f"image/{kind}", "buffer": data.getvalue()}


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif.tobytes()


def tiles_of(image: Image.Image) -> np.ndarray:
    """Coarse colours: small differences of scaling and coding do not count."""
    return np.asarray(image.convert("RGB").resize((6, 4), Image.Resampling.BOX), dtype=float)


def shown(page: Any) -> Image.Image:
    """The photo as it is on the screen, map and all else away."""
    page.evaluate("() => document.querySelector('#photo').decode()")
    page.evaluate(BARE)
    return Image.open(io.BytesIO(page.locator("#photo").screenshot()))


def open_next(page: Any, file: dict[str, Any]) -> None:
    before = page.url
    page.set_input_files("#file", file)
    page.wait_for_function("before => location.href !== before", arg=before)
    explained(page, "picture=")


@pytest.fixture
def holed() -> Image.Image:
    """Transparent around an ellipse; what is hidden there is black."""
    alpha = Image.new("L", CAT.size, 0)
    ImageDraw.Draw(alpha).ellipse((60, 40, 240, 160), fill=255)
    made = Image.new("RGBA", CAT.size, (0, 0, 0, 0))
    made.paste(CAT, mask=alpha)
    return made


def test_a_picture_is_shown_as_the_model_saw_it(visit: Visit, holed: Image.Image) -> None:
    page = explained(visit("#sample=star-and-heart&alpha=0", color_scheme="dark"))
    white = Image.new("RGB", CAT.size, "white")
    white.paste(holed, mask=holed.getchannel("A"))
    other = CAT.transpose(Image.Transpose.ROTATE_180)
    moving = {"save_all": True, "append_images": [other], "duration": [20, 60_000]}
    upside, side = Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_90
    cases = [
        (picture("webp", CAT.transpose(side), exif=turned(6)), CAT),
        (picture("webp", CAT.transpose(upside), exif=turned(3)), CAT),
        (picture("jpeg", CAT.transpose(side), exif=turned(6)), CAT),
        (picture("gif", CAT, **moving), CAT),
        (picture("webp", CAT, **moving), CAT),
        (picture("png", holed), white),
    ]
    for file, expected in cases:
        open_next(page, file)
        assert page_state(page, "state.prediction.size") == list(CAT.size)
        np.testing.assert_allclose(tiles_of(shown(page)), tiles_of(expected), atol=16, err_msg=file["name"])


def test_another_picture_can_be_opened_after_a_comparison(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    compare(page, ["rollout"])
    page.wait_for_selector("#tiles button")
    page.wait_for_selector("#run-compare:not([disabled])")
    open_next(page, picture("png"))
    assert page.locator("#tiles .tile").count() == 0
    page.click("#run-compare")
    page.wait_for_selector("#tiles button")
    page.wait_for_selector("#run-compare:not([disabled])")
    page.select_option("#model", "photo")
    explained(page, "model=photo")
    assert page.locator("#tiles .tile").count() == 0


def test_a_refused_file_leaves_what_is_open(visit: Visit, heard: Heard) -> None:
    heard.expected.append("status of 4")
    page = explained(visit("#sample=star-and-heart"))
    page.click("#delete-top")
    explained(page, "removed=")
    before = shown_probability(page), page.url, page_state(page, "state.explanation.values")
    page.set_input_files("#file", TEXT)
    page.wait_for_selector("#alert:not([hidden])")
    assert "not an image" in page.inner_text("#alert p")
    assert (shown_probability(page), page.url, page_state(page, "state.explanation.values")) == before
    assert page.locator("#work").is_visible()
    assert page.locator("#map").evaluate("map => map.width") > 0
    page.click("#new")  # from the first screen too there is a way back
    page.set_input_files("#file", TEXT)
    page.wait_for_selector("#alert:not([hidden])")
    page.click("#back")
    assert (shown_probability(page), page.url) == before[:2]


def test_the_address_follows_the_picture_at_once(visit: Visit) -> None:
    page = explained(visit("#sample=star-and-heart"))
    hold(page, "**/api/explain")
    page.set_input_files("#file", picture("png"))
    page.wait_for_function(
        "() => document.querySelector('#classes .name')?.textContent && !location.hash.includes('sample')"
    )
    page.unroute("**/api/explain")
    page.reload()  # before the first map is there
    explained(page, "picture=")
    assert page.evaluate("document.querySelector('#photo').naturalWidth") == CAT.width


def test_a_chosen_model_stays(visit: Visit) -> None:
    page = explained(visit("#sample=coffee&method=rollout"))
    page.click("#new")
    page.select_option("#model", "scenes")
    page.wait_for_function("() => document.querySelector('#model-note').textContent.startsWith('scenes')")
    assert page.locator("#start").is_visible()  # it does not jump back to the picture before
    page.click("#back")
    explained(page, "model=scenes", "sample=coffee", "method=rollout")
    page.click("#new")
    page.click("#samples button:has-text('A cat')")  # suits the other model
    explained(page, "model=scenes", "sample=cat")


def test_a_picture_opened_before_the_server_has_answered_is_explained(visit: Visit) -> None:
    page = visit()
    held = hold(page, "**/api/models")
    page.reload()
    page.set_input_files("#file", picture("png"))
    assert page.locator("#alert").is_hidden()
    held[0].continue_()
    explained(page, "picture=")


def test_a_picture_opened_after_a_failed_start_tries_again(visit: Visit, heard: Heard) -> None:
    heard.expected.append("ERR_FAILED")
    page = visit()
    page.route("**/api/models", lambda route: route.abort())
    page.reload()
    page.wait_for_selector("#alert:not([hidden])")
    page.click("#alert > button")
    page.set_input_files("#file", picture("png"))
    page.wait_for_selector("#alert:not([hidden])")
    page.unroute("**/api/models")
    page.set_input_files("#file", picture("png"))
    explained(page, "picture=")
