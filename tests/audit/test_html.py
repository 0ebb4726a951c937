"""The report of an audit in a real browser, from a file and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.audit import stickers
from tests.audit.stickers import NAMES, TARGET, pictures
from tests.report.opening import PHONE, Open

from vitrail.audit import audit_images
from vitrail.data.base import Example
from vitrail.data.memory import InMemory

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five images have a wrong label, one an evil name."""
    examples = [
        Example(EVIL if i == 3 else e.id, e.image, 0 if i in (1, 5, 7, 9, 11) else e.label)
        for i, e in enumerate(pictures(True))
    ]
    data = InMemory(examples, labels=NAMES, name="stickers")
    return audit_images(stickers.model(True), data, tmp_path_factory.mktemp("page"), trust=False).report


def shown(page: Any) -> list[str]:
    return page.locator("#cards .tile strong").all_inner_texts()


def test_the_first_page_names_the_class_and_shows_the_sticker(report: Path, open_page: Open) -> None:
    page = open_page(report)
    box = page.locator("#alarm-1").bounding_box()
    assert NAMES[TARGET] in page.locator("#alarm-1").inner_text()
    assert box["y"] < 900, "without scrolling"
    picture = page.locator(".finding img")
    assert picture.evaluate("image => image.complete && image.naturalWidth > 0")
    assert page.locator(".examples img").count() == 8


def test_filters_of_the_images(report: Path, open_page: Open) -> None:
    page = open_page(report)
    assert len(shown(page)) == 48
    page.check("[data-choice=errors]")
    assert len(shown(page)) == 5
    assert all("✗" in text for text in shown(page))
    page.uncheck("[data-choice=errors]")
    page.check("[data-choice=suspicious]")
    assert {text.split()[0] for text in shown(page)} == {NAMES[TARGET]}
    page.uncheck("[data-choice=suspicious]")
    page.select_option("[data-choice=predicted]", NAMES[1])
    count = len(shown(page))
    assert 0 < count < 48
    assert page.locator("#count").inner_text() == f"{count} of 48 images."
    page.locator("#cards .tile").first.click()
    assert page.locator("#sheet[open]").count() == 1
    assert "predicted" in page.locator("#sheet").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#sheet[open]").count() == 0


def test_a_phone_and_no_script(report: Path, open_page: Open) -> None:
    page = open_page(report, PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    plain = open_page(report, java_script_enabled=False)
    assert "is suspicious" in plain.locator(".verdict").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(report: Path, open_page: Open, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = open_page(report, color_scheme=scheme, bypass_csp=True)
    violations = axe.run(page).response["violations"]
    assert [(entry["id"], entry["nodes"][0]["html"][:200]) for entry in violations] == []
