"""Parts of a run that are damaged: left out by those who read, set aside and measured again by those who run."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from tests.bench.plans import own_methods, plan, same, table  # noqa: F401
from tests.report.run_folders import Made

from vitrail import VitrailError
from vitrail.bench import run as running
from vitrail.bench.run import run
from vitrail.bench.store import Store
from vitrail.cli import main
from vitrail.report.report import report
from vitrail.report.results import read_results


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


HARMS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "bit-flipped": lambda content: flip(content, len(content) // 3),
}


def parts(folder: Path, kind: str = "rows") -> list[Path]:
    return sorted((folder / kind).glob("part-*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of four images, each in parts of its own."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running.ModelRun, "_report", lambda *_: None)  # nothing is written before the end of a run
        for position in range(4):
            run(plan(images=4, methods=["gen_att", "random(seed=3)"]), folder, positions=[position])
    assert len(parts(folder)) == len(parts(folder, "maps")) == len(parts(folder, "pictures")) == 4
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.mark.parametrize(
    ("kind", "harm"), [*(("rows", harm) for harm in HARMS), ("maps", "bit-flipped"), ("pictures", "truncated")]
)
def test_a_damaged_part_is_set_aside_named_and_measured_again(whole: Path, copy: Path, kind: str, harm: str) -> None:
    part = parts(copy, kind)[1]
    damaged = HARMS[harm](part.read_bytes())
    part.write_bytes(damaged)
    with pytest.warns(UserWarning, match=rf"{part.name} is damaged .*{part.name}\.damaged"):
        again = run(Store(copy).plan(), copy)
    assert (again.images, again.known, again.rows) == (1, 3, 4)
    assert part.with_name(part.name + ".damaged").read_bytes() == damaged
    assert not part.exists()
    same(table(copy), table(whole), exactly=True)
    assert Store(copy).maps().keys() == Store(whole).maps().keys()
    assert len(Store(copy).pictures()) == 4
    assert run(Store(copy).plan(), copy).rows == 0, "nothing is missing any more"


def test_without_maps_those_that_were_damaged_are_not_missed(copy: Path) -> None:
    parts(copy, "maps")[0].write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"):
        assert run(plan(images=4, methods=["gen_att", "random(seed=3)"], maps=False), copy).rows == 0


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("harm", HARMS)
def test_report_goes_on_and_says_so(
    copy: Path, harm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("rows", "maps", "pictures")
    harmed = [parts(copy, kind)[place] for place, kind in enumerate(kinds)]
    for part in harmed:
        part.write_bytes(HARMS[harm](part.read_bytes()))
    before = {path: path.read_bytes() for kind in kinds for path in parts(copy, kind)}
    monkeypatch.setattr("sys.argv", ["vitrail", "report", str(copy), "--format", "html,md"])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert not stop.value.code
    assert "3 images, 2 methods, 2 metrics" in said.out
    assert sorted(re.findall(r"Warning: \S*(part-\S+) is damaged", said.err)) == sorted(part.name for part in harmed)
    text = (copy / "report" / "report.md").read_text(encoding="utf-8")
    assert f"damaged: run/rows/{harmed[0].name}, run/pictures/{harmed[2].name}" in text
    assert {path: path.read_bytes() for kind in kinds for path in parts(copy, kind)} == before, "a report only reads"


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    folder = Made(images=2).write(tmp_path / "run")
    (part,) = parts(folder)
    content, dice = part.read_bytes(), random.Random(0)
    for place in dice.sample(range(len(content)), 60):
        part.write_bytes(flip(content, place))
        with pytest.warns(UserWarning, match="is damaged"):
            assert len(Store(folder).rows()) == 0
    part.write_bytes(content)
    assert len(Store(folder).rows()) == 2 * 16


def test_parts_of_older_versions_have_no_digest_and_are_still_read(copy: Path, whole: Path) -> None:
    for number, kind in enumerate(("rows", "maps", "pictures")):
        for part in parts(copy, kind):
            part.rename(part.with_name(part.name[:26] + f"0123456{number}" + part.suffix))
    same(table(copy), table(whole), exactly=True)
    assert run(Store(copy).plan(), copy).rows == 0
    cut = parts(copy)[2]
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=f"{cut.name} is damaged"):
        assert run(Store(copy).plan(), copy).rows == 4
    same(table(copy), table(whole), exactly=True)


@pytest.mark.parametrize("change", [{"key": None}, {"value": "text"}])
def test_a_table_of_other_columns_is_no_part(copy: Path, change: dict[str, str | None]) -> None:
    part = parts(copy)[0]
    rows = pd.read_parquet(part)
    for name, value in change.items():
        rows = rows.drop(columns=name) if value is None else rows.assign(**{name: value})
    part.unlink()
    rows.to_parquet(part.with_name("part-00000000000000000001-01234567.parquet"))
    with pytest.warns(UserWarning, match="is damaged .*(no column key|'text' as a scalar of type double)"):
        assert run(Store(copy).plan(), copy).rows == 4


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("content", [b"", b"data = ", b"\xff\xfe"])
def test_a_damaged_plan_or_environment_does_not_end_a_report(copy: Path, content: bytes, tmp_path: Path) -> None:
    for name in ("plan.toml", "environment.json"):
        (copy / name).write_bytes(content)
    with pytest.warns(UserWarning, match="environment.json|without its plan"):
        summary, _ = report([copy], tmp_path / "out", ["md"])
    assert len(summary.results.settings[0].images) == 4


def test_a_run_of_which_nothing_is_left(copy: Path) -> None:
    for part in parts(copy):
        part.write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(VitrailError, match="every part is damaged"):
        read_results([copy])
