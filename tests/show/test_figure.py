"""Pictures say what they should: colour, neutrality, what was not seen, legible captions."""

import io
import itertools
import math
import subprocess
import sys
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.errors import VitrailError
from vitrail.show.colours import Scale
from vitrail.show.figure import contact_sheet, display_size, labelled, overlay, png_bytes, side_by_side, thumbnail
from vitrail.show.legend import Legend, shared_legends
from vitrail.show.look import Look
from vitrail.show.pixels import faded, strongest
from vitrail.show.text import Paragraph, fit_text, font

SIZE = (400, 400)
GREY = Image.new("RGB", SIZE, (128, 128, 128))
PALE = round(float(faded(np.full((1, 3), 128, dtype=np.float32), 0.85)[0, 0]))


def halves(left: float, right: float) -> torch.Tensor:
    values = torch.full((SIZE[1], SIZE[0]), left)
    values[:, SIZE[0] // 2 :] = right
    return values


def colour(image: Image.Image, x: int, y: int = 200) -> np.ndarray:
    return np.array(image.getpixel((x, y)), dtype=int)


def test_signed_maps_are_blue_against_and_red_for() -> None:
    picture = overlay(GREY, halves(-1.0, 1.0))
    against, favour = colour(picture, 50), colour(picture, 350)
    assert against[2] > against[0] + 50
    assert favour[0] > favour[2] + 50


def test_zero_is_neutral_whatever_the_range() -> None:
    values = torch.zeros(SIZE[1], SIZE[0])
    values[:, :100], values[:, 300:] = -0.1, 5.0
    picture = overlay(GREY, values)
    assert colour(picture, 200).tolist() == [PALE] * 3
    assert np.abs(colour(picture, 50) - PALE).max() < np.abs(colour(picture, 350) - PALE).max() / 3


def test_unsigned_maps_grow_from_the_faded_photo_to_dark() -> None:
    values = torch.linspace(0, 1, SIZE[0]).expand(SIZE[1], -1)
    picture = overlay(GREY, values)
    assert np.abs(colour(picture, 0) - PALE).max() <= 2
    assert colour(picture, 399).sum() < colour(picture, 200).sum() < colour(picture, 0).sum()
    assert not np.array_equal(np.asarray(overlay(GREY, values, signed=True)), np.asarray(picture))


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_constant_unsigned_map_only_fades_the_photo(value: float) -> None:
    assert (np.asarray(overlay(GREY, halves(value, value))) == PALE).all()


def test_alpha_zero_leaves_the_photo() -> None:
    assert overlay(GREY, halves(-1.0, 1.0), alpha=0.0).tobytes() == GREY.tobytes()


def test_unseen_pixels_are_grey_hatched_and_unlike_zero() -> None:
    photo = Image.new("RGB", SIZE, (200, 40, 40))
    picture = np.asarray(overlay(photo, halves(math.nan, 0.0)), dtype=int)
    unseen, seen = picture[:, :200], picture[:, 200:]
    assert (np.ptp(unseen, axis=2) == 0).all()
    assert len(np.unique(unseen[..., 0])) > 1
    red, green, blue = seen[0, 0]
    assert (seen == seen[0, 0]).all()
    assert green == blue < red < green + 25, "faded"
    assert np.abs(unseen.mean((0, 1)) - seen[0, 0]).max() > 5


def test_nothing_seen_at_all() -> None:
    picture = np.asarray(overlay(GREY, halves(math.nan, math.nan)), dtype=int)
    assert (np.ptp(picture, axis=2) == 0).all()


def test_infinities_and_outliers_do_not_hide_the_rest() -> None:
    values = halves(0.0, 1.0)
    values[0, 0], values[0, 1] = 1e30, math.inf
    assert np.abs(colour(overlay(GREY, values), 350) - PALE).max() > 60
    assert Scale.of(values).above


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((64, 64), (384, 384)),
        ((500, 400), (500, 400)),
        ((200, 300), (384, 576)),
        ((4000, 3000), (1600, 1200)),
        ((3, 500), (10, 1600)),
        ((1, 1), (384, 384)),
        ((10_000, 1), (1600, 1)),
    ],
)
def test_display_size(size: tuple[int, int], shown: tuple[int, int]) -> None:
    assert display_size(size) == shown


@pytest.mark.parametrize("size", [(1, 1), (64, 64), (3, 500), (2000, 10), (1700, 1300)])
def test_every_size_can_be_shown(size: tuple[int, int]) -> None:
    values = torch.randn(size[1], size[0], generator=torch.Generator().manual_seed(0))
    picture = overlay(Image.new("RGB", size), values)
    assert picture.size == display_size(size)
    assert overlay(Image.new("RGB", size), values, size=size).size == size
    assert overlay(Image.new("RGB", size), values, style="outline").size == display_size(size)
    page = labelled(picture, "a cat 93 %", "decompx.skipplus", [Legend(Scale.of(values), target="cat")])
    assert page.width >= 384
    assert page.height > picture.height


def test_wrong_arguments() -> None:
    with pytest.raises(VitrailError, match=r"shape \(400, 400\), but got \(14, 14\)"):
        overlay(GREY, torch.zeros(14, 14))
    for choice, message in (
        ({"alpha": 1.5}, "alpha must be between 0 .* but got 1.5"),
        ({"alpha": math.nan}, "alpha"),
        ({"style": "dots"}, "no style 'dots': expected smooth, blocks or outline"),
        ({"colormap": "rainbowish"}, "no colormap 'rainbowish': expected one of matplotlib's"),
    ):
        with pytest.raises(VitrailError, match=message):
            overlay(GREY, halves(0, 1), **choice)  # type: ignore[arg-type]
    for arrange in (side_by_side, contact_sheet):
        with pytest.raises(VitrailError, match="no pictures"):
            arrange([])
    with pytest.raises(VitrailError, match="columns"):
        side_by_side([GREY], columns=-1)


def test_scale() -> None:
    signed = Scale.of(torch.tensor([[-2.0, math.nan, 1.0]]))
    assert (signed.signed, signed.partial, signed.low) == (True, True, -signed.high)
    unsigned = Scale.of(torch.linspace(1, 2, 1000))
    assert (unsigned.signed, unsigned.partial, unsigned.low) == (False, False, 1.0)
    assert unsigned.high == pytest.approx(1.995, abs=1e-3)
    sparse = torch.zeros(100, 100)
    sparse[0, 0] = -4.0
    assert Scale.of(sparse) == Scale(-4.0, 4.0, True)
    assert Scale.of(torch.full((2, 2), math.nan)) == Scale(0.0, 0.0, False, True)
    huge = Scale(-3e38, 3e38, True)
    assert huge.positions(np.array([-3e38, 0, 3e38], dtype=np.float32)).tolist() == [0.0, 0.5, 1.0]


def test_captions_stay_below_the_picture() -> None:
    page = labelled(GREY, "title", "subtitle", [Legend(Scale(-1, 1, True, partial=True))])
    assert np.array_equal(np.asarray(page)[:400], np.asarray(GREY))
    strip = np.asarray(page)[400:]
    assert strip.min() < 80
    assert (strip[:8] == 255).all()
    assert labelled(GREY, "").size == GREY.size


def test_a_title_on_top() -> None:
    page = np.asarray(labelled(GREY, "title", "subtitle", [Legend(Scale(-1, 1, True))], title_on_top=True))
    top = int((page == 128).all((1, 2)).argmax())
    assert page[:top].min() < 80
    assert np.array_equal(page[top : top + 400], np.asarray(GREY))
    assert np.ptp(page[top + 400 :], axis=2).max() > 100, "the legend is below"


WORDS = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft, " * 3


@pytest.mark.parametrize(
    ("legend", "ends"),
    [
        (Legend(Scale(-2, 2, True), target="cock"), ("−2 against cock", "+2 for cock")),
        (Legend(Scale(-2, 2, True), target="cock", rival="partridge"), ("−2 for partridge", "+2 for cock")),
        (Legend(Scale(-2, 2, True), target="cock", numbers=False), ("against cock", "for cock")),
        (Legend(Scale(0, 0.5, False), target="cock"), ("0 less", "0.5 more")),
        (Legend(Scale(-2, 2, True, below=True), target="cock"), ("≤ −2 against cock", "+2 for cock")),
        (Legend(Scale(0, 2, False, above=True)), ("0 less", "≥ 2 more")),
    ],
)
def test_the_legend_says_which_colour_speaks_for_which_class(legend: Legend, ends: tuple[str, str]) -> None:
    assert legend.ends == ends


def test_the_scale_knows_what_it_clips() -> None:
    values = torch.linspace(-1, 1, 1000)
    values[0], values[-1] = -9, 9
    assert (Scale.of(values).below, Scale.of(values).above) == (True, True)
    assert (Scale.of(values.abs()).below, Scale.of(values.abs()).above) == (False, True)
    flat = Scale.of(halves(-1.0, 1.0))
    assert (flat.below, flat.above) == (False, False)


@pytest.mark.parametrize("style", ["smooth", "outline"])
@pytest.mark.parametrize("width", [200, 352, 1500])
@pytest.mark.parametrize("target", ["cock", "black and gold garden spider, Argiope aurantia", WORDS, "x" * 500])
def test_a_legend_never_runs_out_of_its_width(
    target: str, width: int, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    lengths: list[float] = []

    def drawn(paragraph: Paragraph, pen: Any, left: int, top: int, colour: str, **align: int) -> None:
        texts.extend(paragraph.lines)
        lengths.extend(left + max(align.get("right_in", 0), font(paragraph.size).getlength(line)) for line in texts)

    monkeypatch.setattr(Paragraph, "draw", drawn)
    scale = Scale(-123.456, 123.456, True, partial=True, below=True, above=True)
    strip = Legend(scale, Look(style=style), target, rival=target).draw(width, 16)
    assert strip.width == width
    if len(target) < 60 and width > 300:  # the whole text, smaller or on several lines
        assert "…" not in "".join(texts)
    assert all(length <= width for length in lengths)


def test_a_sheet_has_one_legend_per_colour_scale() -> None:
    def legend(signed: bool, target: str, rival: str | None = None, partial: bool = False) -> Legend:
        return Legend(Scale(-1.0 if signed else 0.0, 1.0, signed, partial, above=True), target=target, rival=rival)

    both = shared_legends([legend(True, "cock"), legend(False, ""), legend(True, "cock", partial=True)])
    assert [shared.ends for shared in both] == [("against cock", "for cock"), ("less", "more")]
    assert [shared.scale.partial for shared in both] == [True, False], "named once"
    (mixed,) = shared_legends([legend(True, "cock"), legend(True, "hen")])
    assert mixed.ends == ("against the class", "for the class")
    (contrast,) = shared_legends([legend(True, "cock", "hen"), legend(True, "duck", "hen")])
    assert contrast.ends == ("for hen", "for the class")


def test_an_outline_encloses_half_of_the_evidence() -> None:
    evidence = np.array([[4, 3, 2, 1, 0]], dtype=np.float32)
    assert strongest(evidence).tolist() == [[True, True, False, False, False]]
    assert not strongest(np.zeros((2, 2), dtype=np.float32)).any()
    photo = Image.new("RGB", SIZE, (200, 40, 40))
    picture = overlay(photo, halves(-1.0, 1.0), style="outline")
    assert colour(picture, 350).tolist() == [200, 40, 40], "the photo itself within the outline"
    assert np.ptp(colour(picture, 50)) < 25, "faded outside"
    assert colour(picture, 198).tolist() == [255, 255, 255], "a white line outside the coloured one"
    assert "half of the evidence for cock" in Legend(Scale(-1, 1, True), Look(style="outline"), "cock").outline


LONG = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft " * 4 + "12.3 %"


@pytest.mark.parametrize("text", [LONG, "x" * 5000, "ok", "a\nb\tc\0d", "Σωκράτης · щенок · 日本 · 🐈 · عربى"])
@pytest.mark.parametrize("width", [20, 350, 1500])
def test_text_always_fits(text: str, width: int) -> None:
    paragraph = fit_text(text, width, 24, bold=True, lines=2)
    face = font(paragraph.size, True)
    assert 1 <= len(paragraph.lines) <= 2
    assert all(face.getlength(line) <= width for line in paragraph.lines)
    assert "\n" not in "".join(paragraph.lines)


def test_text_prefers_smaller_type_to_broken_words_and_keeps_the_number() -> None:
    assert fit_text("vit_base_patch16_224.augreg2_in21k_ft_in1k", 340, 24, lines=1).size < 24
    assert fit_text(LONG, 350, 24, lines=2).lines[-1].endswith("12.3 %")
    assert fit_text("  ", 350, 24).lines == ()


def test_arranging() -> None:
    tall, wide = Image.new("RGB", (10, 40), "red"), Image.new("RGB", (30, 20), "blue")
    row = side_by_side([tall, wide])
    assert row.size == (10 + 30 + 3 * 16, 40 + 2 * 16)
    assert row.getpixel((16, 16)) == (255, 0, 0)
    assert row.getpixel((16 + 10 + 16, 16)) == (0, 0, 255)
    assert side_by_side([tall, wide, tall], columns=2).size == (10 + 30 + 3 * 16, 40 + 40 + 3 * 16)
    assert side_by_side([tall], columns=5).width == 10 + 2 * 16


def test_png_bytes() -> None:
    decoded = Image.open(io.BytesIO(png_bytes(GREY)))
    assert (decoded.format, decoded.tobytes()) == ("PNG", GREY.tobytes())


def test_contact_sheets_stay_small() -> None:
    dot = Image.new("RGB", (8, 8))
    few = contact_sheet([(dot, "one"), (dot, "two"), (dot, "three")])
    many = contact_sheet([(dot, "")] * 900)
    assert few.width == 2 * 320 + 3 * 16
    assert many.width * many.height < 100_000_000
    assert thumbnail(Image.new("L", (1000, 500))).size == (320, 160)


def test_a_panorama_shows_its_focus_instead_of_a_stripe() -> None:
    panorama = Image.new("RGB", (3000, 100))
    panorama.paste((255, 0, 0), (2700, 0, 2720, 100))
    for image, focus, size in (
        (panorama, (0.9, 0.5), (320, 107)),
        (panorama.rotate(90, expand=True), (0.5, 0.1), (107, 320)),
    ):
        small = thumbnail(image, focus=focus)
        assert small.size == size
        assert np.asarray(small)[..., 0].max() > 200
        assert np.asarray(thumbnail(image))[..., 0].max() == 0


def test_a_caption_of_several_lines() -> None:
    dot = Image.new("RGB", (8, 8))
    assert contact_sheet([(dot, "gen_att\n0.1 s")]).height > contact_sheet([(dot, "gen_att")]).height


def test_drawing_touches_no_global_state_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, torch; from PIL import Image; import vitrail.models.preprocessing, vitrail.data.images;"
        "import vitrail.files;"
        "import vitrail.show.figure as f;"
        "heavy = {'matplotlib', 'timm', 'torchvision', 'transformers'} & set(sys.modules); assert not heavy, heavy;"
        "f.labelled(f.overlay(Image.new('RGB', (9, 9)), torch.randn(9, 9)), 'a', 'b');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def literal(photo: Image.Image, values: torch.Tensor, scale: Scale, look: Look, weights: np.ndarray) -> np.ndarray:
    """An overlay pixel by pixel as its rules say, in double precision, with matplotlib's own colours."""
    low, high, (height, width) = scale.low, scale.high, values.shape
    colours = matplotlib.colormaps[look.colormap or ("RdBu_r" if scale.signed else "viridis_r")]
    page = np.zeros((height, width, 3))
    for y, x in np.ndindex(height, width):
        rgb, value = np.array(photo.getpixel((x, y)), dtype=float), float(values[y, x])
        grey = rgb @ [0.2126, 0.7152, 0.0722]
        if math.isnan(value):
            stripe = min(max(1.5 - abs((x + y) % 10 - 5), 0), 1)
            page[y, x] = 0.3 * grey + 0.7 * 215 - 32 * stripe
            continue
        place = np.float32(min(max((value - low) / (high - low), 0), 1))
        strength = abs(2 * place - 1) if scale.signed else place
        if scale.signed:
            ink = colours(0.5 + (-1 if place < 0.5 else 1) * float(np.float32(0.28) + np.float32(0.18) * strength))
        else:
            ink = colours(np.float32(0.3) + np.float32(0.7) * place)
        opacity = look.alpha * float(strength) ** 0.8 * weights[y, x]
        muted = rgb + look.alpha * (grey - rgb)
        faint = muted + 0.75 * look.alpha * (255 - muted)
        page[y, x] = faint * (1 - opacity) + 255 * np.array(ink[:3]) * opacity
    return page


@pytest.mark.parametrize("strip", [1, 70, 65_536])
@pytest.mark.parametrize("look", [Look(), Look("PuOr", 0.4), Look("tab10")], ids=lambda look: look.colormap or "")
@pytest.mark.parametrize("signed", [True, False])
def test_a_picture_is_the_literal_one(signed: bool, look: Look, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.show.figure._STRIP_PIXELS", strip)
    dice = np.random.default_rng(0)
    photo = Image.fromarray(dice.integers(0, 256, (40, 60, 3), dtype=np.uint8))
    values = torch.from_numpy(dice.normal(size=(40, 60)).astype(np.float32))
    values = values if signed else values.abs()
    values[:, :7], values[35:, 30:], weights = math.nan, math.nan, dice.random((40, 60)).astype(np.float32)
    picture = overlay(
        photo, values, alpha=look.alpha, size=photo.size, colormap=look.colormap, weights=torch.from_numpy(weights)
    )
    expected = literal(photo, values, Scale.of(values), look, weights)
    assert np.abs(np.asarray(picture) - expected).max() < 0.51


def test_a_colour_is_that_of_matplotlib_at_every_step() -> None:
    """The table is looked up as matplotlib does it, also at both ends and where nothing is known."""
    for signed, name in itertools.product((True, False), ("RdBu_r", "tab10", "viridis", "Set3")):
        positions = np.append(np.linspace(0, 1, 4097, dtype=np.float32), np.float32(math.nan))
        places = (
            0.5 + np.where(positions < 0.5, -1.0, 1.0) * (0.28 + 0.18 * np.abs(2 * positions - 1))
            if signed
            else 0.3 + 0.7 * positions
        )
        expected = np.asarray(matplotlib.colormaps[name](places)[:, :3] * 255, dtype=np.float32)
        assert (Scale(-1.0 if signed else 0.0, 1.0, signed).colours(positions, name) == expected).all()
