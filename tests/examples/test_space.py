"""The Space: a real process, clicked in a real browser."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

SPACE = Path(__file__).parents[2] / "examples" / "space"
SAMPLES = SPACE.parents[1] / "src" / "vitrail" / "data" / "samples"
PATIENCE = 600_000  # milliseconds


def test_the_space_says_what_hugging_face_needs_to_know() -> None:
    _, front, text = (SPACE / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    card = yaml.safe_load(front)
    assert card["sdk"] == "gradio"
    assert (SPACE / card["app_file"]).is_file()
    assert text.strip()
    assert len((SPACE / "app.py").read_text(encoding="utf-8").splitlines()) <= 80
    assert "vitrail" in (SPACE / "requirements.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the app, started as its README says."""
    pytest.importorskip("gradio")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("space")
    settings = {
        "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": str(folder),
        "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, SPACE / "app.py"], cwd=folder, env=os.environ | settings,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Running on local URL" in line:
                break
        try:
            assert process.poll() is None, "".join(said)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def choose(page: Any, name: str, option: str) -> None:
    page.get_by_label(name, exact=True).click()
    page.get_by_role("option", name=option, exact=True).click()


@pytest.mark.full
def test_upload_choose_and_explain(space: str, browser: Any) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 950})
    page.set_default_timeout(PATIENCE)
    elsewhere: list[str] = []
    page.on("request", lambda call: call.url.startswith((space, "data:", "blob:")) or elsewhere.append(call.url))
    page.goto(space)
    page.set_input_files("input[type=file]", SAMPLES / "coffee.jpg")
    page.wait_for_selector("img[src*='coffee']")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text(re.compile(r"^trust: 0\.\d\d – removing the top 10% of patches takes espresso")).wait_for()
    first = page.locator("img[src*='/file=']").last.get_attribute("src")

    choose(page, "Class", "tabby")
    choose(page, "Method", "gen_att")
    page.get_by_role("button", name="Explain").click()
    page.get_by_text(re.compile(r"^trust: .* takes tabby")).wait_for()
    assert page.locator("img[src*='/file=']").last.get_attribute("src") != first

    choose(page, "Model", "scenes")
    page.get_by_label("Class", exact=True).click()
    page.get_by_role("option", name="hourglass", exact=True).wait_for()
    assert page.get_by_role("option", name="tabby", exact=True).count() == 0
    assert elsewhere == []
    page.close()


@pytest.mark.full
def test_without_an_image_the_page_asks_for_one(space: str, browser: Any) -> None:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    page.goto(space)
    page.get_by_role("button", name="Explain").click()
    page.get_by_text("Choose an image first.").wait_for()
    page.close()
