"""The HTML report in a real browser: Chromium without a window and without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.report.opening import DESKTOP, PHONE, Open
from tests.report.run_folders import Made
from typer.testing import CliRunner

from vitrail.bench.store import Store
from vitrail.cli.program import app
from vitrail.report.report import report
from vitrail.report.templates import environment
from vitrail.show.colours import Scale

EVIL = [
    "</script><script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 2">',
    "<svg onload=window.pwned=3>",
    "{{table}} {{data}}",
    "<!--<script>",
    "\u202etxt.exe",
]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    report([Made(errors=1).write(folder / "run")], folder, ["html"])
    return folder / "report.html"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    other = Made(model="deit", seed=1, metrics=("insertion(steps=8)", "pointing_game"))
    report([Made().write(folder / "a"), other.write(folder / "b")], folder, ["html"])
    return folder / "report.html"


def methods(page: Any) -> list[str]:
    return page.locator("#results tbody tr:visible th").all_inner_texts()


def values(page: Any, column: int) -> list[float]:
    cells = page.locator(f"#results tbody tr:visible td:nth-of-type({column}) .mean").all_inner_texts()
    return [float(text.replace("−", "-")) for text in cells if text != "–"]


def test_the_report_of_a_real_run(tmp_path: Path, open_page: Open) -> None:
    words = ["bench", "--data", "scenes", "--images", "3", "--methods", "gen_att,random", "--metrics",
             "insertion(steps=8),sparseness", "--target", "label", "--out", str(tmp_path / "run")]  # fmt: skip
    for arguments in (words, ["report", str(tmp_path / "run"), "--format", "html"]):
        told = CliRunner().invoke(app, arguments)
        assert told.exit_code == 0, told.output
    page = open_page(tmp_path / "run" / "report" / "report.html")
    assert methods(page) == ["gen_att", "random"]
    rows = Store(tmp_path / "run").rows()
    means = rows.groupby(["metric", "method"])["value"].mean()
    for place, metric in enumerate(("insertion(steps=8)", "sparseness"), 1):
        assert values(page, place) == pytest.approx([means[metric, name] for name in methods(page)], abs=6e-4)
    page.click("#results th[data-k='1'] button")
    assert values(page, 2) == sorted(values(page, 2), reverse=True)
    assert page.locator("#cards .card").count() == 3
    assert page.locator("#cards .card").first.locator("button.tile").count() == 2
    page.click("[data-filter=methods] summary")
    page.uncheck("[data-filter=methods] label:has-text('random') input")
    assert methods(page) == ["gen_att"]


def test_the_table_sorts_by_mouse_and_keyboard(one: Path, open_page: Open) -> None:
    page = open_page(one)
    assert methods(page) == ["decompx.skipplus", "rollout", "grad_cam", "random"]
    page.click("#results th[data-k='1'] button")  # deletion: less is better, the best first
    assert values(page, 2) == sorted(values(page, 2))
    assert page.get_attribute("#results th[data-k='1']", "aria-sort") == "ascending"
    page.click("#results th[data-k='1'] button")
    assert values(page, 2) == sorted(values(page, 2), reverse=True)
    page.focus("#results th[data-k='name'] button")
    page.keyboard.press("Enter")
    assert methods(page) == sorted(methods(page))
    assert page.locator("[aria-sort]").count() == 1
    page.click("#results th[data-k='3'] button")  # completeness: what does not apply is last, either way
    assert methods(page)[0] == "decompx.skipplus"
    page.click("#results th[data-k='3'] button")
    assert methods(page)[0] == "decompx.skipplus"


def test_methods_and_metrics_are_filtered(one: Path, open_page: Open) -> None:
    page = open_page(one)
    page.click("[data-filter=methods] summary")
    page.fill("[data-filter=methods] input[type=search]", "roll, rand")
    page.click("[data-filter=methods] >> text=Only these")
    assert methods(page) == ["rollout", "random"]
    assert "2 of 4" in page.inner_text("[data-filter=methods] summary")
    assert page.locator("#cards .card").first.locator("button.tile").count() == 2
    page.fill("[data-filter=methods] input[type=search]", "")
    page.check("[data-filter=methods] label:has-text('grad_cam') input")
    assert methods(page) == ["rollout", "grad_cam", "random"]
    page.click("[data-filter=metrics] summary")
    page.uncheck("[data-filter=metrics] label:has-text('insertion') input")
    assert page.locator("#results thead th:visible").count() == 5
    assert page.locator("#results tbody tr:visible").first.locator("td:visible").count() == 4


def test_a_class_has_its_own_numbers_and_images(one: Path, open_page: Open) -> None:
    page = open_page(one)
    before = page.inner_text("#results tbody tr:first-child td:nth-of-type(1)")
    page.select_option("#class", "dog")
    after = page.inner_text("#results tbody tr:first-child td:nth-of-type(1)")
    assert after != before
    assert "n = 8" in after
    assert "dog" in page.inner_text("#status")
    about = page.locator("#cards .card p").all_inner_texts()
    assert len(about) == 8
    assert all("true class dog" in text for text in about)
    page.select_option("#class", "")
    assert page.inner_text("#results tbody tr:first-child td:nth-of-type(1)") == before


def test_the_gallery_shows_the_worst_first(one: Path, open_page: Open) -> None:
    page = open_page(one)
    page.select_option("[data-choice=metric]", label="deletion(steps=8) ↓")
    page.select_option("[data-choice=method]", label="rollout")
    page.click("#more")
    page.click("#more")
    assert page.locator("#more").is_hidden()
    assert page.locator("#cards .card").count() == 24
    shown = page.locator("#cards .tile:has-text('rollout') strong").all_inner_texts()
    found = [float(text.replace("−", "-")) for text in shown]
    assert found == sorted(found, reverse=True)
    page.select_option("[data-choice=order]", "best")
    shown = page.locator("#cards .tile:has-text('rollout') strong").all_inner_texts()
    assert float(shown[0]) == min(found)


def test_pictures_and_maps_are_drawn(one: Path, open_page: Open) -> None:
    page = open_page(one)
    card = page.locator("#cards .card").first
    assert card.locator("img").count() == 5
    assert card.locator("canvas").count() == 4
    assert card.locator("img").first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 48
    opacity = "canvas => getComputedStyle(canvas).opacity"
    page.locator("input[type=range]").evaluate("own => { own.value = 30; own.dispatchEvent(new Event('input')); }")
    assert card.locator("canvas").first.evaluate(opacity) == "0.3"


@pytest.mark.parametrize("signed", [True, False])
def test_overlays_have_the_colours_of_vitrail_show(tmp_path: Path, open_page: Open, signed: bool) -> None:
    made = Made(quality={"decompx.skipplus" if signed else "rollout": 0.5}, images=1, classes=("cat",))
    name = f"vit_tiny|photo-000|{next(iter(made.quality))}|predicted"
    grid = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)).half().float() - (0.5 if signed else 0)
    made.drawn_maps = lambda: {name: grid}  # type: ignore[method-assign]
    report([made.write(tmp_path / "run")], tmp_path, ["html"])
    page = open_page(tmp_path / "report.html")
    drawn = page.locator("#cards canvas").evaluate(
        "canvas => [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]"
    )
    found = np.array(drawn, dtype=np.float64).reshape(112, 112, 4)
    scale = Scale.of(grid, signed)
    smooth = torch.nn.functional.interpolate(
        torch.from_numpy(scale.positions(grid.numpy()))[None, None], size=(112, 112), mode="bilinear"
    )[0, 0].numpy()
    np.testing.assert_allclose(found[..., 3], 255 * 0.85 * scale.strengths(smooth) ** 0.8, atol=4)
    clear = found[..., 3] > 60  # a browser keeps the colours of nearly transparent pixels only roughly
    if signed:
        clear &= np.abs(smooth - 0.5) > 0.02  # where the colour jumps
    np.testing.assert_allclose(found[clear][:, :3], scale.colours(smooth)[clear], atol=8)


def test_curves_open_from_table_and_gallery(one: Path, open_page: Open) -> None:
    page = open_page(one)
    page.click("#results tbody tr:nth-child(2) td:nth-of-type(1) button")
    assert page.locator("dialog").is_visible()
    assert page.inner_text("#sheet-title") == "rollout"
    assert page.locator("dialog polyline").count() == 4
    assert page.locator("dialog polyline.chosen").count() == 1
    assert page.locator("dialog polygon.band").count() == 1
    points = page.get_attribute("dialog polyline.chosen", "points").split()
    assert len(points) == 9
    assert not any("NaN" in point for point in points)
    page.keyboard.press("Escape")
    assert page.locator("dialog").is_hidden()
    assert page.locator("#results td:nth-of-type(3) button").count() == 0  # pointing_game has no curves
    page.locator("#cards button.tile").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog svg[role=img]").count() == 2
    assert page.locator("dialog .values tr").count() == 4
    page.click("dialog >> text=Close")
    assert page.locator("dialog").is_hidden()


def test_settings_stand_side_by_side(two: Path, open_page: Open) -> None:
    page = open_page(two)
    assert page.locator("#results thead tr").count() == 2
    spans = page.locator("#results thead th.group").evaluate_all("all => all.map((one) => one.colSpan)")
    assert spans == [2, 1, 2, 1, 2]
    columns = page.locator("#results thead tr:nth-child(2) th")
    assert columns.count() == 8 == page.locator("#results tbody tr:first-child td").count()
    page.click("[data-filter=settings] summary")
    page.uncheck("[data-filter=settings] label:has-text('vit_tiny') input")
    assert page.locator("#results tbody tr:first-child td:visible").count() == 3
    assert page.locator("#results thead th.group:visible").count() == 3
    page.select_option("[data-choice=setting]", label="deit")
    assert page.locator("#cards .card").count() == 10


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_nothing_sticks_out_of_the_page(
    one: Path, two: Path, open_page: Open, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    for path in (one, two):
        page = open_page(path, size, color_scheme=scheme)
        page.click("[data-filter=methods] summary")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        page.locator("#cards button.tile").first.click()
        box = page.locator("dialog").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
        page.screenshot(path=tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")


def test_the_table_is_there_without_a_script(one: Path, open_page: Open) -> None:
    page = open_page(one, java_script_enabled=False)
    assert len(methods(page)) == 4
    assert page.locator("#results td.best:visible").count() >= 3
    assert page.locator("#filters").is_hidden()
    assert page.locator("#gallery").is_hidden()
    assert page.locator("noscript p").is_visible()
    assert page.locator("#agreement td.for:visible").count() == 6
    assert "Errors: 1" in page.inner_text("#errors")


def test_everything_can_be_reached_by_keyboard(one: Path, open_page: Open) -> None:
    page = open_page(one)
    seen = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        seen.add(
            page.evaluate("(e => e.closest('[data-filter]')?.dataset.filter ?? e.id ?? '')(document.activeElement)")
        )
        seen.add(page.evaluate("document.activeElement.className"))
    assert {"methods", "metrics", "class", "scroll", "tile"} <= seen


def test_hostile_names_are_inert(tmp_path: Path, open_page: Open) -> None:
    made = Made(
        quality={f"rise(note={EVIL[0]!r})": 0.7, f"rise(note={EVIL[1]!r})": 0.5, "rollout": 0.3},
        classes=EVIL,
        names=EVIL,
        model=EVIL[1],
        errors=1,
        images=len(EVIL) * 2,
    )
    for name in ("a", "b"):
        made.write(tmp_path / name)
        made.model = EVIL[2]
    report([tmp_path / "a", tmp_path / "b"], tmp_path, ["html"])
    page = open_page(tmp_path / "report.html")
    page.click("[data-filter=methods] summary")
    for name in EVIL:
        page.select_option("#class", name)
        assert page.locator("#cards .card").count() == 2
        assert name.strip() in page.inner_text("#status")
        page.locator("#cards button.tile").first.click()
        page.keyboard.press("Escape")
    page.select_option("#class", "")
    page.locator("#results td button").first.click()
    assert page.evaluate("window.pwned") is None
    assert page.locator("script").count() == 2
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("svg[onload]").count() == 0
    assert page.inner_text("#cards h3 >> nth=0") in EVIL


def test_a_run_without_pictures_still_tells_its_worst_cases(tmp_path: Path, open_page: Open) -> None:
    report([Made(maps=False).write(tmp_path / "run")], tmp_path, ["html"])
    page = open_page(tmp_path / "report.html")
    assert "stored no pictures" in page.inner_text("#gallery-note")
    assert page.locator("#cards .card").count() == 10
    assert page.locator("#cards img").count() == 0
    page.locator("#cards button.tile").first.click()
    assert page.locator("dialog svg[role=img]").count() == 2


def test_a_gallery_is_limited_and_says_so(tmp_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.report.gallery.IMAGES", 8)
    report([Made().write(tmp_path / "run")], tmp_path, ["html"])
    page = open_page(tmp_path / "report.html")
    assert "8 of 24 images" in page.inner_text("#gallery-note")
    assert page.locator("#cards .card").count() == 8


def test_a_file_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Made(images=200).write(tmp_path / "run")
    report([folder], tmp_path, ["html"])
    whole = (tmp_path / "report.html").stat().st_size
    assert whole < 400_000
    monkeypatch.setattr("vitrail.report.gallery.MAX_CHARACTERS", 20_000)
    report([folder], tmp_path, ["html"])
    assert (tmp_path / "report.html").stat().st_size < whole - 40_000


def test_json_cannot_leave_its_element() -> None:
    template = environment().from_string("{{ data | tojson }}")
    text = template.render(data={"</script>": ["<!--", "a & b", "\u2028", "é"]})
    assert not set("<>&\u2028é") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        template.render(data=float("nan"))
