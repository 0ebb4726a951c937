"""vitrail as a program."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command_line.given import OVERVIEW, left, noise, written

import vitrail
from vitrail.cli.program import main

# As a program


def program(*arguments: Any) -> list[str]:
    return [sys.executable, "-c", "from vitrail.cli.program import main; main()", *map(str, arguments)]


HEAVY = "{'torch', 'timm', 'numpy', 'PIL', 'matplotlib', 'pandas', 'transformers', 'scipy'}"


@pytest.mark.parametrize("start", ["import vitrail", "vitrail.cli.program.main()"])
def test_starting_is_quick(start: str) -> None:
    code = f"import sys, atexit\natexit.register(lambda: print('heavy:', sorted({HEAVY} & set(sys.modules))))\n"
    code += "sys.argv = ['vitrail', '--help']\nimport vitrail.cli.program\n" if "cli" in start else ""
    done = subprocess.run([sys.executable, "-c", code + start], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_console_script_ends_with_one_line_and_code_one(place: Path) -> None:
    script = Path(sys.executable).with_name("vitrail")
    done = subprocess.run([script, "explain", "nowhere.png"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: Image 'nowhere.png' was not found: check the path.\n"
    assert left(place) == set()


def test_ctrl_c_keeps_what_is_done(tiny: list[str], place: Path) -> None:
    folder = place / "many"
    folder.mkdir()
    for number in range(80):
        noise(number).save(folder / f"{number:03}.png")
    run = subprocess.Popen(
        program("explain", folder, *tiny), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert run.stdout is not None
    assert any("→" in line for line in run.stdout)  # the first picture is there
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "everything written so far is complete" in err
    assert "Traceback" not in err
    names = written(place)
    pictures = {name for name in names if name.endswith("skipplus.png")}
    assert 0 < len(pictures) < 80
    assert names == pictures | {name.replace(".png", ".json") for name in pictures} | OVERVIEW
    for name in pictures:
        assert vitrail.open(place / "vitrail-out" / name, check=False).map.shape == (4, 4)
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = {Path(row["picture"]).name for row in csv.DictReader(file)}
    assert rows <= pictures
    assert len(pictures - rows) <= 1  # stopped right between a picture and its row


def test_output_in_an_old_encoding(tiny: list[str], photo: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "argv", ["vitrail", "explain", str(photo), *tiny])
    with pytest.raises(SystemExit) as stop:
        main()
    out.flush()
    assert not stop.value.code
    assert b"? vitrail-out/photo" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_closed_pipe_is_no_error() -> None:
    there, here = os.pipe()
    os.close(there)
    run = subprocess.run(program("methods"), stdout=here, stderr=subprocess.PIPE, text=True, check=False)
    os.close(here)
    assert run.stderr == ""


def test_a_home_that_cannot_be_written_is_no_matter(tiny: list[str], photo: Path) -> None:
    places = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL"))}
    run = subprocess.run(
        program("explain", photo, *tiny), env={**places, "HOME": "/dev/null/home"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
