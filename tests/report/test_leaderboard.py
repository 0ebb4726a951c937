"""The leaderboard: its table against literal computations, its page as text and in a real browser."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.stats import spearmanr
from tests.report.opening import PHONE, Open
from tests.report.run_folders import Made, frame_of

import vitrail
from vitrail.bench.store import Store
from vitrail.errors import VitrailError
from vitrail.report import leaderboard
from vitrail.report.leaderboard import (
    COLUMNS,
    REFERENCE,
    Pair,
    merge_tables,
    page,
    read_table,
    strip_name,
    summarise_pair,
    write_table,
)
from vitrail.report.standings import BEST, TIED, standings

HEADLINE = "insertion_minus_deletion(steps=8)"
METRICS = (HEADLINE, "insertion(steps=8)", "deletion(steps=8)", "pointing_game", "completeness")
PAIRS = [
    Pair("scenes", "Scenes", "A small model on generated scenes."),
    Pair("photos", "Photos", "A larger model on photographs."),
]
QUALITY = {
    "decompx.skipplus": 0.8, "gen_att": 0.7, "rollout": 0.75, "grad_cam": 0.5, "rise": 0.9, "gradient": 0.3,
    "random": 0.1,
}  # fmt: skip
COSTS = pd.DataFrame(
    {
        "method": ["decompx.skipplus", "gen_att", "rollout", "grad_cam", "rise", "random"],
        "forwards": [2.6, 3.3, 2.0, 2.1, 1024.0, 1.0],
        "images_per_second": [15.0, 12.0, 20.0, 19.0, 0.04, 40.0],
    }
)
EVIL = "mine(note='</script><script>window.pwned = 1</script><img src=x onerror=alert(1)>')"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Made(quality=QUALITY, metrics=METRICS).write(tmp_path_factory.mktemp("board") / "run")


@pytest.fixture(scope="module")
def table(run: Path, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    other = Made(quality=QUALITY, metrics=METRICS, seed=1, noise=0.02).write(tmp_path_factory.mktemp("other") / "run")
    return merge_tables(summarise_pair(Store(run), "scenes"), summarise_pair(Store(other), "photos"))


def rows_of(*lines: tuple[Any, ...]) -> pd.DataFrame:
    """A table of (pair, method, metric, mean, half the interval, gap, half its interval, better)."""
    frame = [(p, m, k, mean, mean - h, mean + h, 20, gap, gap - g, gap + g, b) for p, m, k, mean, h, gap, g, b in lines]
    return pd.DataFrame(frame, columns=list(COLUMNS))


def headline(pair: str, **means: float) -> pd.DataFrame:
    """Rows of the headline metric, with intervals of ±0.02 and gaps to "ref" of ±0.01."""
    return rows_of(*(
        (pair, method, HEADLINE, mean, 0.02, mean - means["ref"], 0.01 * (method != "ref"), "higher")
        for method, mean in means.items()
    ))  # fmt: skip


def embedded(text: str) -> dict[str, Any]:
    (content,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return json.loads(content)


# The table


def test_means_intervals_and_gaps_of_a_run(run: Path) -> None:
    table = summarise_pair(Store(run), "scenes").set_index(["method", "metric"])
    values = frame_of(run).pivot_table(index="image", columns=["metric", "call"], values="value", sort=False)
    draws = np.random.default_rng(0).integers(24, size=(2000, 24))
    for method in QUALITY:
        for metric in METRICS[:4]:
            row, numbers = table.loc[method, metric], values[metric][method].to_numpy()
            gaps = numbers - values[metric][REFERENCE].to_numpy()
            for name, sample in (("", numbers), ("gap", gaps)):
                low, high = np.percentile([sample[draw].mean() for draw in draws], [2.5, 97.5])
                names = [name or "mean", f"{name}_low".strip("_"), f"{name}_high".strip("_")]
                assert list(row[names]) == pytest.approx([sample.mean(), low, high], abs=1e-12)
            assert (row["n"], row["pair"]) == (24, "scenes")
            assert row["better"] == ("lower" if metric.startswith("deletion") else "higher")
    completeness = table.xs("completeness", level="metric")
    assert list(completeness.index) == [REFERENCE], "what does not apply has no row"


def test_gaps_are_of_common_images_and_need_six(tmp_path: Path) -> None:
    made = Made(quality={REFERENCE: 0.8, "rollout": 0.6, "random": 0.1}, metrics=(HEADLINE,), images=9)
    rows = made.rows()
    drop = {(REFERENCE, "photo-008"), ("rollout", "photo-000"), ("rollout", "photo-001")}
    drop |= {("random", f"photo-00{i}") for i in range(3)}
    rows = [row for row in rows if (row["method"], row["image"]) not in drop]
    store = Store(made.write(tmp_path / "run"))
    for part in (store.folder / "rows").iterdir():
        part.unlink()
    store.add_rows(rows)
    table = summarise_pair(store, "a").set_index("method")
    values = frame_of(store.folder).pivot_table(index="image", columns="call", values="value")
    common = values[["rollout", REFERENCE]].dropna()
    assert (len(common), table.loc["rollout", "n"]) == (6, 7)
    assert table.loc["rollout", "gap"] == pytest.approx((common["rollout"] - common[REFERENCE]).mean())
    assert table.loc["random", "n"] == 6, "of which five are common"
    assert table.loc["random", ["gap", "gap_low", "gap_high"]].isna().all()
    assert not np.isnan(table.loc["random", "low"])


def test_a_metric_of_the_whole_data_set_is_combined(tmp_path: Path) -> None:
    made = Made(quality={REFERENCE: 0.8, "rollout": 0.6}, metrics=("mean_iou",))
    store = Store(made.write(tmp_path / "run"))
    draw = np.random.default_rng(0)
    for part in (store.folder / "rows").iterdir():
        part.unlink()
    store.add_rows([{**row, "parts": (draw.random(4) * 100).tolist()} for row in made.rows()])
    table = summarise_pair(store, "a").set_index("method")
    frame = frame_of(store.folder)
    from vitrail.metrics.statistics import numbers_of

    parts, combine = {}, None
    for method in made.quality:
        parts[method], combine = numbers_of(frame[frame["call"] == method])
    assert combine is not None
    import torch

    def value(method: str, images: Any) -> float:
        return float(combine(torch.from_numpy(parts[method][images])))

    everything = slice(None)
    assert table.loc["rollout", "mean"] == pytest.approx(value("rollout", everything))
    gap = value("rollout", everything) - value(REFERENCE, everything)
    draws = np.random.default_rng(0).integers(24, size=(2000, 24))
    low, high = np.percentile([value("rollout", rows) - value(REFERENCE, rows) for rows in draws], [2.5, 97.5])
    assert list(table.loc["rollout", ["gap", "gap_low", "gap_high"]]) == pytest.approx([gap, low, high])


def test_what_the_plan_does_not_have_is_left_out(tmp_path: Path) -> None:
    store = Store(Made(quality=QUALITY, metrics=METRICS).write(tmp_path / "run"))
    extra = Made(quality={"tis": 0.5}, metrics=METRICS).rows()
    store.add_rows([{**row, "key": f"other-{row['key']}"} for row in extra])
    assert set(summarise_pair(store, "a")["method"]) == set(QUALITY)


def test_a_pair_is_one_model_on_one_data_set(tmp_path: Path) -> None:
    store = Store(Made(quality=QUALITY).write(tmp_path / "run"))
    store.add_rows([{**row, "key": f"b-{row['key']}"} for row in Made(quality=QUALITY, model="deit").rows()])
    with pytest.raises(VitrailError, match=r"several settings \(vit_tiny; deit\)"):
        summarise_pair(store, "a")


def test_without_the_reference_there_are_no_gaps(tmp_path: Path) -> None:
    store = Store(Made(quality={"rollout": 0.5, "random": 0.1}, metrics=(HEADLINE,)).write(tmp_path / "run"))
    table = summarise_pair(store, "a")
    assert table["gap"].isna().all()
    assert table["low"].notna().all()


@pytest.mark.parametrize("name", ["board.csv", "board.csv.gz"])
def test_a_table_is_written_and_read(table: pd.DataFrame, tmp_path: Path, name: str) -> None:
    named = pd.concat([table, table.iloc[:1].assign(method="null", gap=np.nan)], ignore_index=True)
    for place in ("a", "b"):
        write_table(named, tmp_path / place / name)
    content = (tmp_path / "a" / name).read_bytes()
    assert content == (tmp_path / "b" / name).read_bytes()
    assert (content[:2] == b"\x1f\x8b") == name.endswith(".gz")
    if name.endswith(".gz"):
        assert content[4:8] == bytes(4), "no time of writing"
        content = gzip.decompress(content)
    numbers = [number for line in content.decode().splitlines()[1:] for number in re.findall(r"[-\d.e]+", line)]
    assert max(len(re.sub(r"e.*|[-.]", "", number).lstrip("0")) for number in numbers) == 5
    again = read_table(tmp_path / "a" / name)
    pd.testing.assert_frame_equal(again, named, rtol=1e-4, check_dtype=False)
    assert again["n"].dtype.kind == "i"


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("pair,method\nx,y\n")
    with pytest.raises(VitrailError, match="is no leaderboard: it has no column metric"):
        read_table(tmp_path / "a.csv")
    (tmp_path / "b.csv.gz").write_bytes(b"not compressed")
    with pytest.raises(VitrailError, match=r"cannot read the leaderboard '.*b\.csv\.gz'"):
        read_table(tmp_path / "b.csv.gz")
    with pytest.raises(VitrailError, match="cannot read"):
        read_table(tmp_path / "missing.csv")
    write_table(headline("a", ref=0.5, random=0.1).assign(better="more"), tmp_path / "c.csv")
    with pytest.raises(VitrailError, match="better must be higher or lower, but got more"):
        read_table(tmp_path / "c.csv")


def test_measured_rows_replace_shipped_ones() -> None:
    shipped, measured = headline("a", ref=0.5, x=0.4), headline("a", ref=0.6, y=0.3)
    merged = merge_tables(shipped, measured)
    assert dict(zip(merged["method"], merged["mean"], strict=True)) == {"x": 0.4, "ref": 0.6, "y": 0.3}
    assert merge_tables(merged, headline("b", ref=0.1))["pair"].tolist() == ["a"] * 3 + ["b"]
    assert len(merge_tables(shipped, shipped.iloc[:0])) == len(merge_tables(shipped.iloc[:0], shipped)) == 2


# Standings


def test_scores_are_mean_shares_between_random_and_the_best() -> None:
    table = pd.concat([headline("a", ref=0.5, x=0.3, random=0.1), headline("b", ref=0.2, x=0.6, random=0.0, y=0.3)])
    numbers = standings(table, ["a", "b"])
    score = dict(zip(numbers.methods, numbers.scores.mean, strict=True))
    assert score == pytest.approx({"ref": (1 + 1 / 3) / 2, "x": (0.5 + 1) / 2, "random": 0.0, "y": 0.5})
    assert dict(zip(numbers.methods, numbers.scores.pairs, strict=True)) == {"ref": 2, "x": 2, "random": 2, "y": 1}
    half = np.hypot(0.02 / 0.4, 0.02 / 0.6) / 2
    x = numbers.methods.index("x")
    assert numbers.scores.high[x] - numbers.scores.mean[x] == pytest.approx(half)
    assert numbers.scores.mean[x] - numbers.scores.low[x] == pytest.approx(half)
    gap = numbers.difference(x, numbers.methods.index("ref"))
    half = np.hypot(0.01 / 0.4, 0.01 / 0.6) / 2
    assert (gap.mean, gap.low, gap.high) == pytest.approx((1 / 12, 1 / 12 - half, 1 / 12 + half))


def test_the_attainable_is_what_greedy_attains_on_its_own_curve() -> None:
    insertion = {"random": 0.1, "greedy": 0.5, "greedy(curve=deletion)": 0.2, "ref": 0.4, "y": 0.3}
    deletion = {"random": 0.9, "greedy": 0.4, "greedy(curve=deletion)": 0.1, "ref": 0.3}  # lower is better
    rows = [
        headline("a", **insertion).assign(metric="token_insertion_aopc"),
        headline("a", **deletion).assign(metric="token_deletion_aopc", better="lower"),
        headline("b", random=0.0, ref=0.1, y=0.2).assign(metric="token_insertion_aopc"),  # nobody searched
        headline("b", ref=0.1).assign(metric="token_deletion_aopc", better="lower"),
    ]
    numbers = standings(pd.concat(rows), ["a", "b"])
    shares = dict(zip(numbers.methods, numbers.attainable, strict=True))
    assert np.isnan(shares.pop("y")), "it lacks one of the curves"
    expected = {"random": 0.0, "greedy": (1 + 5 / 8) / 2, "greedy(curve=deletion)": (1 / 4 + 1) / 2, "ref": 3 / 4}
    assert shares == pytest.approx(expected)
    assert np.isnan(standings(rows[2], ["b"]).attainable).all()


def test_a_pair_without_random_has_no_share() -> None:
    table = pd.concat([headline("a", ref=0.5, x=0.3, random=0.1), headline("b", ref=0.2, x=0.6)])
    numbers = standings(table, ["a", "b"])
    assert numbers.scores.pairs.tolist() == [1, 1, 1]
    assert np.isnan(numbers.shares[1]).all()


def test_marks_follow_the_intervals_of_gaps() -> None:
    means = {"ref": 0.5, "close": 0.505, "far": 0.47, "random": 0.1}
    numbers = standings(headline("a", **means), ["a"])
    assert numbers.marks[0, :, 0].tolist() == [TIED, BEST, 0, 0], "though the means of far and close overlap"
    lower = headline("a", **means).assign(better="lower")
    assert standings(lower, ["a"]).marks[0, :, 0].tolist() == [0, 0, BEST, 0], "a control is best nowhere"
    unpaired = headline("a", **means).assign(gap=np.nan, gap_low=np.nan, gap_high=np.nan)
    assert standings(unpaired, ["a"]).marks[0, :, 0].tolist() == [TIED, BEST, TIED, 0]
    assert standings(unpaired.assign(n=5), ["a"]).marks[0, :, 0].tolist() == [0, BEST, 0, 0], "too few images to tell"


def test_a_ceiling_competes_with_nothing() -> None:
    methods = {"ref": 0.5, "rise": 0.4, "random": 0.1}
    without = standings(headline("a", **methods), ["a"])
    numbers = standings(headline("a", **methods, **{"greedy(curve=deletion)": 0.9}), ["a"])
    assert numbers.rivals.tolist() == [True, True, False, False]
    assert numbers.scores.mean == pytest.approx([1, 0.75, 0, 2]), "the best method is 1; the ceiling is above"
    assert numbers.scores.mean[:3].tolist() == without.scores.mean.tolist()
    assert numbers.marks[0, :, 0].tolist() == [BEST, 0, 0, 0]
    costs = pd.DataFrame({"method": [*methods, "greedy(curve=deletion)"], "forwards": 1.0, "images_per_second": 1.0})
    text = page(headline("scenes", **methods, **{"greedy(curve=deletion)": 0.9}), PAIRS[:1], costs)
    assert "Use ref: it costs" in re.sub(r"<[^>]*>", "", text)
    assert text.count(">control</span>") == 2


def test_agreement_is_the_mean_rank_correlation() -> None:
    draw = np.random.default_rng(0)
    methods, metrics = [f"m{i}" for i in range(9)], {"a": "higher", "b": "lower", "c": "higher"}
    means = draw.normal(size=(3, 9, 3))
    means[:, :, 1] = -means[:, :, 0] + draw.normal(0, 0.02, (3, 9))  # a and b say the same, b upside down
    lines = [
        (f"p{p}", method, metric, means[p, m, k], 0.1, 0.0, 0.1, better)
        for p in range(3)
        for m, method in enumerate(methods)
        for k, (metric, better) in enumerate(metrics.items())
        if p < 2 or m < 5  # five methods are too few
    ]
    agreement = standings(rows_of(*lines), ["p0", "p1", "p2"]).agreement()
    signs = {"a": 1, "b": -1, "c": 1}
    for i, first in enumerate(agreement.metrics):
        for j, second in enumerate(agreement.metrics):
            columns = [list(metrics).index(name) for name in (first, second)]
            expected = np.mean([spearmanr(*means[p][:, columns].T).statistic for p in range(2)])
            assert agreement.matrix[i, j] == pytest.approx(expected * signs[first] * signs[second])
    assert sorted(agreement.groups[0]) == ["a", "b"]
    assert abs(agreement.metrics.index("a") - agreement.metrics.index("b")) == 1, "similar metrics stand together"
    contrary = {frozenset(pair[:2]) for pair in agreement.contrary()}
    assert (frozenset("ac") in contrary) == (agreement.matrix[tuple(map(agreement.metrics.index, "ac"))] <= 0)


# The page


def test_the_page_is_complete_and_asks_for_nothing(table: pd.DataFrame) -> None:
    text = page(table, PAIRS, COSTS, gallery={"rollout": "strips/rollout.webp"})
    plain = text.replace("<wbr>", "")
    assert all(f"<bdi>{method}</bdi>" in plain for method in QUALITY)
    assert all(pair.title in text and pair.about in text for pair in PAIRS)
    assert 'src="strips/rollout.webp" alt="Maps of rollout on six pictures"' in text
    assert "vitrail bench leaderboard --plugin mine.py" in text
    addresses = {address for address in re.findall(r"\b(?:https?:)?//[\w.]+", text) if "." in address}
    assert addresses == {"http://www.w3.org"}, "only the name of SVG"
    assert "What the maps look like" not in page(table, PAIRS, COSTS)


def test_the_advice_follows_from_the_numbers(table: pd.DataFrame) -> None:
    text = re.sub(r"<[^>]*>", "", page(table, PAIRS, COSTS))
    assert re.search(r"Use decompx\.skipplus unless time does not matter: it costs about 2\.6 forward passes\.", text)
    numbers = standings(table, ["scenes", "photos"])
    gap = numbers.difference(numbers.methods.index("rise"), numbers.methods.index(REFERENCE))
    assert f"rise scores {gap.mean:.2f} higher (95 % interval [{gap.low:.2f}, {gap.high:.2f}])" in text
    assert "do not explain a class with them: rollout." in text
    assert "It rests on 48 images in 2 pairs" in text
    swapped = COSTS.assign(forwards=COSTS["forwards"].where(COSTS["method"] != "rise", 4.0))
    text = re.sub(r"<[^>]*>", "", page(table, PAIRS, swapped))
    assert "Use rise: it costs about 4.0 forward passes, and no method that explains a class scores higher" in text
    assert "The default" not in text, "it scores lower, beyond doubt"
    unsure = table.assign(gap_low=table["gap_low"].where(table["method"] != "rise", -0.5))
    text = re.sub(r"<[^>]*>", "", page(unsure, PAIRS, swapped))
    assert f"The default, decompx.skipplus, cannot be told from it: rise scores {gap.mean:.3f} higher" in text


def test_a_method_that_ignores_the_class_is_never_recommended(table: pd.DataFrame) -> None:
    best = table.assign(mean=table["mean"].where((table["method"] != "rollout") | (table["metric"] != HEADLINE), 9.0))
    text = re.sub(r"<[^>]*>", "", page(best, PAIRS, COSTS))
    assert "Use decompx.skipplus" in text


def test_hostile_names_are_escaped(table: pd.DataFrame) -> None:
    hostile = table.assign(method=table["method"].replace("gradient", EVIL))
    pairs = [Pair("scenes", "<b>Scenes</b>", "<i>about</i>"), PAIRS[1]]
    text = page(hostile, pairs, COSTS, [EVIL], {EVIL: "x.webp"})
    assert text.count("<script") == 2
    for raw in ("<img src=x", "<b>Scenes", "<i>about", "pwned = 1</script>"):
        assert raw not in text
    assert embedded(text)["methods"][5]["name"] == EVIL
    assert "yours" in text


def test_a_fragment_leaks_no_style(table: pd.DataFrame) -> None:
    text = page(table, PAIRS, COSTS, whole=False)
    assert text.startswith('<div class="vlb">')
    assert text.rstrip().endswith("</div>")
    assert not re.search(r"<(html|head|body|main|h1)\b", text)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    rules = re.sub(r"/\*.*?\*/|@media [^{]*\{", "", style, flags=re.DOTALL)
    selectors = [part for rule in re.findall(r"([^{}]+)\{", rules) for part in re.split(r",(?![^(]*\))", rule)]
    assert len(selectors) > 50
    assert [selector for selector in selectors if ".vlb" not in selector] == []


def test_the_data_of_a_large_board_stays_small() -> None:
    methods = ["random", *(f"method_{i}(rule=frozen)" for i in range(99))]
    draw = np.random.default_rng(0)
    lines = [
        (f"pair{p}", method, HEADLINE if not k else f"metric_{k}(steps=56)", draw.normal(), 0.0123456, draw.normal(),
         0.0123456, "higher")
        for p in range(7) for method in methods for k in range(30)
    ]  # fmt: skip
    pairs = [Pair(f"pair{p}", f"Pair {p}", "Some model on some images.") for p in range(7)]
    assert len(json.dumps(embedded(page(rows_of(*lines), pairs, COSTS)), separators=(",", ":"))) < 1_500_000


def test_strip_names_are_safe_and_distinct() -> None:
    calls = ["rollout", "decompx.skipplus", "gen_att(rule=frozen)", "gen_att(rule='frozen')", "../../etc", "Ä b/c?d#e"]
    names = [strip_name(call) for call in calls]
    assert names[:2] == ["rollout.webp", "decompx.skipplus.webp"]
    assert len(set(names)) == len(calls)
    assert all(re.fullmatch(r"[a-z0-9_-][a-z0-9_.-]*\.webp", name) for name in names)


# In a browser


def visible(board: Any) -> list[str]:
    return [text.split("\n")[0].strip() for text in board.locator(".vlb-table tbody tr:visible bdi").all_inner_texts()]


def column(board: Any, place: int) -> list[float]:
    texts = board.locator(f".vlb-table tbody tr:visible td[data-pair='{place}'] .vlb-mean").all_inner_texts()
    return [float(text.replace("−", "-").lstrip("≈\u00a0")) for text in texts if text != "–"]


def test_sorting_filtering_and_metrics(table: pd.DataFrame, tmp_path: Path, open_page: Open) -> None:
    hostile = table.assign(method=table["method"].replace("gradient", EVIL))
    (tmp_path / "board.html").write_text(page(hostile, PAIRS, COSTS, [EVIL]), encoding="utf-8")
    board = open_page(tmp_path / "board.html")
    by_score = visible(board)
    assert by_score[0] == "rise"
    assert by_score[-1] == "random"
    assert board.locator(".vlb-yours .vlb-tag-yours").inner_text() == "yours"

    board.click("th[data-key='0'] button")
    assert column(board, 0) == sorted(column(board, 0), reverse=True)
    assert board.get_attribute("th[data-key='0']", "aria-sort") == "descending"
    board.focus("th[data-key=name] button")
    board.keyboard.press("Enter")
    assert visible(board) == sorted(visible(board), key=str.lower)
    assert board.locator("[aria-sort]").count() == 1
    board.click("th[data-key=cost] button")
    assert visible(board)[:3] == ["random", "rollout", "grad_cam"]
    assert visible(board)[-1] == EVIL, "an unknown cost is last"

    board.click("th[data-key='1'] button")
    board.select_option("[data-control=metric]", label="deletion(steps=8)")
    means = table[(table["pair"] == "photos") & (table["metric"] == "deletion(steps=8)")]["mean"]
    assert column(board, 1) == pytest.approx(sorted(means), abs=6e-4), "less is better, the best first"
    assert "deletion(steps=8) (lower is better)" in board.inner_text(".vlb-table caption")
    assert board.locator(".vlb-best").count() == 2
    board.select_option("[data-control=metric]", label="completeness")
    assert len(column(board, 0)) == 1
    assert visible(board)[0] == REFERENCE

    board.fill("[data-control=words]", "ROLL, attention")
    assert visible(board) == ["rollout"]
    assert "1 of 7 methods" in board.inner_text("[data-part=count]")
    assert board.locator(".vlb-point:not(.vlb-faint)").count() == 1
    board.fill("[data-control=words]", "")
    board.check("[data-control=cheap]")
    assert set(visible(board)) == {*QUALITY, EVIL} - {"rise", "gradient"}, "one's own method stays"
    assert board.evaluate("window.pwned") is None


def test_the_plot_is_read_by_pointer_and_keyboard(table: pd.DataFrame, tmp_path: Path, open_page: Open) -> None:
    (tmp_path / "board.html").write_text(page(table, PAIRS, COSTS), encoding="utf-8")
    board = open_page(tmp_path / "board.html")
    board.locator(".vlb-point").first.wait_for()  # drawn once the page has a size
    assert board.locator(".vlb-point").count() == len(COSTS)
    assert "Not shown: 1 method without" in board.inner_text("[data-part=plot-note]")
    front = {int(number) for number in board.eval_on_selector_all(
        ".vlb-point:has(.vlb-front)", "nodes => nodes.map((node) => node.dataset.method)")}  # fmt: skip
    assert {list(QUALITY)[number] for number in front} == {"grad_cam", REFERENCE, "rise"}
    board.hover(".vlb-point >> nth=-1")
    assert re.fullmatch(r"rise\nscore \d\.\d\d, 1,000 forward passes", board.inner_text(".vlb-tip"))
    board.focus(".vlb-point[tabindex='0']")
    assert "random" in board.inner_text(".vlb-tip")
    board.keyboard.press("ArrowRight")
    assert "rollout" in board.inner_text(".vlb-tip")
    assert "ignores the class" in board.inner_text(".vlb-tip")
    board.select_option("[data-control=pair]", label="Photos")
    board.hover(".vlb-point >> nth=-1")
    assert "share 1.00" in board.inner_text(".vlb-tip")


@pytest.mark.parametrize(("scheme", "size"), [("light", (1280, 900)), ("dark", PHONE)], ids=["desktop", "phone"])
def test_no_serious_barrier_is_in_the_page(
    table: pd.DataFrame, tmp_path: Path, open_page: Open, scheme: str, size: tuple[int, int]
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    Image.new("RGB", (576, 96), "grey").save(tmp_path / "strip.webp")
    text = page(table, PAIRS, COSTS, ["gen_att"], {"rollout": "strip.webp"})
    (tmp_path / "board.html").write_text(text, encoding="utf-8")
    board = open_page(tmp_path / "board.html", size, ["strip.webp"], color_scheme=scheme, reduced_motion="reduce")
    violations = axe.run(board).response["violations"]
    serious = [row for row in violations if row["impact"] in ("serious", "critical")]
    assert [(row["id"], row["nodes"][0]["html"]) for row in serious] == []
    assert board.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_pictures_beside_the_page_are_shown(table: pd.DataFrame, tmp_path: Path, open_page: Open) -> None:
    Image.new("RGB", (576, 96), "grey").save(tmp_path / "strip.webp")
    (tmp_path / "board.html").write_text(page(table, PAIRS, COSTS, gallery={"rollout": "strip.webp"}), encoding="utf-8")
    board = open_page(tmp_path / "board.html", beside=["strip.webp"])
    board.locator(".vlb-strip img").scroll_into_view_if_needed()
    board.evaluate("document.querySelector('.vlb-strip img').decode()")
    assert board.evaluate("document.querySelector('.vlb-strip img').naturalWidth") == 576
    board.fill("[data-control=words]", "gen_att")
    assert not board.locator(".vlb-strip").is_visible()


def test_a_fragment_follows_the_palette_of_the_site(table: pd.DataFrame, tmp_path: Path, open_page: Open) -> None:
    content = page(table, PAIRS, COSTS, whole=False)
    ink = "getComputedStyle(document.querySelector('.vlb')).color"
    colours = {}
    for palette in ("default", "slate"):
        path = tmp_path / f"{palette}.html"
        start = '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">'
        path.write_text(
            f'{start}<body data-md-color-scheme="{palette}"><p>Around</p>{content}</body>', encoding="utf-8"
        )
        board = open_page(path, color_scheme="dark" if palette == "default" else "light")
        board.click("th[data-key=name] button")
        assert visible(board) == sorted(visible(board))
        colours[palette] = board.evaluate(ink)
        assert board.evaluate("getComputedStyle(document.querySelector('p')).color") == "rgb(0, 0, 0)"
    assert colours == {"default": "rgb(27, 29, 33)", "slate": "rgb(233, 235, 238)"}


def test_the_cost_of_a_method_that_fails_is_unknown() -> None:
    @vitrail.method("tests_costs_failing")
    def failing(model, images, target):  # type: ignore[no-untyped-def]
        raise ValueError("svd did not converge")

    with pytest.warns(UserWarning, match="the cost of tests_costs_failing is unknown: svd did not converge"):
        assert leaderboard._own_costs(["tests_costs_failing"]).empty
    assert leaderboard._own_costs([]).empty
