"""Takes the screenshots of the web page: `python tools/page_pictures.py [NAME…]` writes `docs/pictures/page*.png`.

They show the page of `vitrail serve`, driven by Playwright in the installed Chromium (or the executable that the
environment variable CHROMIUM names): an explanation with its curves in the light theme, two classes contrasted in the
dark theme, a comparison, two images with their patches matched, and a phone.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
DESKTOP, PHONE = (1280, 800), (360, 740)
LONG = 300_000  # timeout of a comparison in milliseconds
SCENES = "model=scenes&sample=star-and-heart"
MOST = 221_000  # maximum bytes of a screenshot


def tested(page: Page) -> None:
    """Both curves drawn, some patches removed with the pointer, the pointer over another patch."""
    page.get_by_role("button", name="Play").click()
    page.wait_for_selector("#scrub:not([disabled])")
    page.get_by_role("radio", name="Insertion").check()
    page.locator("#scrub").press("End")
    page.get_by_role("radio", name="Deletion").check()
    frame = page.locator("#panes").bounding_box()
    assert frame is not None

    def at(across: float, down: float) -> tuple[float, float]:
        return frame["x"] + across * frame["width"], frame["y"] + down * frame["height"]

    page.mouse.move(*at(0.33, 0.36))
    page.mouse.down()
    for down in (0.36, 0.42):  # over one eye
        page.mouse.move(*at(0.34, down), steps=4)
        page.mouse.move(*at(0.42, down), steps=12)
    page.mouse.up()
    page.mouse.move(*at(0.48, 0.2))


def compared(page: Page) -> None:
    page.get_by_role("tab", name="Compare methods").click()
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("button", name="Compare again").wait_for(timeout=LONG)


def matched(page: Page) -> None:
    """The pointer over a patch, its partners in the other image shown."""
    page.get_by_role("button", name="Match patches").click()
    page.locator("#matching", has_text="Point at a patch of one image").wait_for(timeout=LONG)
    frame = page.locator("#panes").bounding_box()
    assert frame is not None
    page.mouse.move(frame["x"] + 0.44 * frame["width"], frame["y"] + 0.82 * frame["height"])


def unchanged(page: Page) -> None:
    """The page as it opens."""


SHOTS: dict[str, tuple[tuple[int, int], str, str, Callable[[Page], None]]] = {
    "page": (DESKTOP, "light", "model=photo&sample=cat", tested),
    "page-dark": (DESKTOP, "dark", "model=photo&sample=cat&target=30&against=32", unchanged),
    "page-compare": (DESKTOP, "light", "model=photo&sample=coffee", compared),
    "page-similar": (DESKTOP, "light", f"{SCENES}&other_sample=ring-and-hourglass", matched),
    "page-phone": (PHONE, "light", SCENES, unchanged),
}


def main() -> None:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-headless-shell")
    command = [sys.executable, "-m", "vitrail.cli.program", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as play:
        try:
            assert server.stdout is not None
            address = next(line for line in server.stdout if "http://" in line).split()[-1]
            browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name in sys.argv[1:] or SHOTS:
                take(browser, address, name)
            browser.close()
        finally:
            server.terminate()


def take(browser: Browser, address: str, name: str) -> None:
    (width, height), scheme, fragment, press = SHOTS[name]
    phone = name == "page-phone"
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if phone else 1,
        is_mobile=phone,
        has_touch=phone,
        reduced_motion="reduce",  # curves appear without animation
    )
    page.goto(f"{address}#{fragment}")
    page.wait_for_selector("#legend:not([hidden])")
    page.locator("#trust", has_text="agreement").wait_for()
    press(page)
    page.wait_for_timeout(500)  # until the last transition has ended
    picture = small_png(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    (FOLDER / f"{name}.png").write_bytes(picture)
    print(f"{name}.png: {len(picture) / 1000:.0f} kB")
    page.close()


def small_png(picture: Image.Image) -> bytes:
    """A PNG with a palette of 256 colours, dithered where that stays below the size limit."""
    palette = picture.quantize(256, method=Image.Quantize.MEDIANCUT, kmeans=3)
    for dither in (Image.Dither.FLOYDSTEINBERG, Image.Dither.NONE):
        buffer = io.BytesIO()
        picture.quantize(palette=palette, dither=dither).save(buffer, "PNG", optimize=True)
        if buffer.tell() <= MOST:
            return buffer.getvalue()
    raise SystemExit(f"the screenshot has {buffer.tell()} bytes, expected at most {MOST}: reduce the viewport.")


if __name__ == "__main__":
    main()
