"""Loading time of the page and latency of the first heatmap, in a real browser.

Run: python benchmarks/page.py [--drops 10] [--threads 1]
Starts ``vitrail serve`` with the embedded model ``photo`` on a free port and opens its page with Playwright in Chromium
(the executable that CHROMIUM names, if set). Prints the size of the page, the time to the first paint, and the time
from dropping a photograph to the painted heatmap; every drop is another picture, so that nothing is cached.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import shutil
import statistics
from importlib.resources import files

from PIL import Image, ImageEnhance
from playwright.sync_api import Page, sync_playwright
from serve import server

SAMPLES = files("vitrail.data") / "samples"
SIDE = 1600

# Drops a file and returns the milliseconds until the map is painted.
DROP = """async (text) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const data = new DataTransfer(), map = document.querySelector("#legend");
  data.items.add(new File([bytes], "photo.jpg", { type: "image/jpeg" }));
  const begin = performance.now();
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
  while (!map.hidden) await new Promise(requestAnimationFrame);
  while (map.hidden) await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  return performance.now() - begin;
}"""
WEIGHT = """() => performance.getEntriesByType("resource").concat(performance.getEntriesByType("navigation"))
  .filter(({ name }) => name.includes("/static/") || name.endsWith("/"))
  .reduce((sum, { decodedBodySize }) => sum + decodedBodySize, 0)"""
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drops", type=int, default=10)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    options = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-headless-shell")
    with server(["photo"], "--threads", str(options.threads)) as (url, _), sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(url)
        page.wait_for_selector("#samples img")
        weight, paint = page.evaluate(WEIGHT), page.evaluate(PAINT)
        print(f"size of the page: {weight / 1000:.0f} kB; first paint after {paint:.0f} ms")
        seconds = [dropped(page, photograph(i)) for i in range(options.drops)]
        times = f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"
        print(f"from drop to painted heatmap ({options.drops} photographs of {SIDE} pixels): {times}")
        browser.close()


def dropped(page: Page, picture: bytes) -> float:
    """Seconds until the map is painted."""
    return page.evaluate(DROP, base64.b64encode(picture).decode()) / 1000


def photograph(number: int) -> bytes:
    """A photograph at the resolution of a camera, each slightly brighter than the previous."""
    with Image.open(str(SAMPLES / ("cat.jpg" if number % 2 else "coffee.jpg"))) as sample:
        large = sample.resize((SIDE, SIDE * sample.height // sample.width), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    ImageEnhance.Brightness(large).enhance(1 + number / 100).save(buffer, "JPEG", quality=92)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
