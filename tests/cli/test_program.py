"""The program: start, exit codes, signals, encodings, errors."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.common import OVERVIEW, Run, error_line, files_in, noise, results_in
from typer.testing import CliRunner

import vitrail
from vitrail.cli import explain
from vitrail.cli.program import app, main


def program(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "vitrail", *map(str, arguments)]


QUICK = ["--model", "scenes", "--no-trust"]  # transformers need seconds to be imported by a new process
COMMANDS = ["explain", "compare", "models", "methods", "metrics", "bench", "audit", "report", "reproduce", "serve"]
COMMANDS += ["train-explainer", "similar", "data"]
HEAVY = "{'torch', 'timm', 'numpy', 'PIL', 'matplotlib', 'pandas', 'transformers', 'scipy'}"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_starting_imports_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys, atexit\natexit.register(lambda: print('heavy:', sorted({HEAVY} & set(sys.modules))))\n"
    code += f"sys.argv = ['vitrail', *{arguments}]\nimport vitrail.cli\nvitrail.cli.main()" if arguments else ""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


# Packages of the extras, and what imports pydantic, which comes with fastapi, but with newer versions of typer, too.
EXTRAS = "fastapi starlette uvicorn multipart cachetools ray transformers h5py skimage ipywidgets".split()
EXTRAS += ["vitrail.app.server.schemas", "vitrail.app.server.routes"]
MISSING = f"""
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {EXTRAS} else super().find_spec(name, path, target)

sys.meta_path = [Installed if finder is PathFinder else finder for finder in sys.meta_path]
"""


def without_extras(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command line where no extra is installed."""
    code = f"{MISSING}\nsys.argv = ['vitrail', *{[*map(str, arguments)]}]\nimport vitrail.cli\nvitrail.cli.main()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_no_extra_is_needed_to_explain_and_to_measure(place: Path) -> None:
    for command in COMMANDS:
        done = without_extras(command, "--help")
        assert done.returncode == 0, done.stderr
    chosen = [
        "--methods",
        "random",
        "--metrics",
        "sparseness",
        "--device",
        "cpu",
        "--pairs",
        "scenes",
        "--shard",
        "1/64",
    ]
    done = without_extras("bench", "leaderboard", *chosen, "--out", place / "board")
    assert done.returncode == 0, done.stderr
    assert (place / "board" / "scenes" / "plan.toml").exists()
    assert (place / "board" / "leaderboard.html").exists()


def test_a_missing_extra_is_named() -> None:
    done = without_extras("serve")
    assert done.returncode == 1
    assert "vitrail[app]" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_file_of_its_name(name: str) -> None:
    module = "listing" if name in ("models", "methods", "metrics", "data") else name.partition("-")[0]
    function = name.replace("-", "_")
    (command,) = (i.callback for i in app.registered_commands if i.callback and i.callback.__name__ == function)
    assert command.__module__ == f"vitrail.cli.{module}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_no_types_of_python(name: str) -> None:
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0
    assert "list[" not in done.output


def test_the_console_script_ends_with_one_line_and_code_one(place: Path) -> None:
    script = Path(sys.executable).with_name("vitrail")
    done = subprocess.run([script, "explain", "nowhere.png"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "Error: image 'nowhere.png' was not found: check the path.\n"
    assert files_in(place) == set()


@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)]
)
def test_ctrl_c_and_sigterm_keep_what_is_done(sign: signal.Signals, code: int, place: Path) -> None:
    folder = place / "many"
    folder.mkdir()
    for number in range(80):
        noise(number).save(folder / f"{number:03}.png")
    run = subprocess.Popen(
        program("explain", folder, *QUICK), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert run.stdout is not None
    assert any("→" in line for line in run.stdout)  # the first picture is there
    run.send_signal(sign)
    _, err = run.communicate(timeout=60)
    assert run.returncode == code
    assert "everything written so far is complete" in err
    assert "Traceback" not in err
    names = results_in(place)
    pictures = {name for name in names if name.endswith("skipplus.png")}
    assert 0 < len(pictures) < 80
    assert names == pictures | {name.replace(".png", ".json") for name in pictures} | OVERVIEW
    for name in pictures:
        assert vitrail.open(place / "vitrail-out" / name, check=False).map.shape == (8, 8)
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
    assert b"-> vitrail-out/photo" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_a_second_sigterm_does_not_interrupt_the_saving(
    vit: Run, tiny: list[str], album: Path, place: Path, monkeypatch: pytest.MonkeyPatch, sigterm_for_nobody: object
) -> None:
    def terminate_then_write(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        write(*arguments)

    write = explain.Run.write_overview
    monkeypatch.setattr(explain.Run, "write_overview", terminate_then_write)
    record = explain.Run._record

    def record_then_terminate(*arguments: Any, **options: Any) -> None:
        record(*arguments, **options)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(explain.Run, "_record", record_then_terminate)
    result = vit("explain", album, *tiny)
    assert result.code == 143
    assert "everything written so far is complete" in result.err
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        pictures = [Path(row["picture"]).name for row in csv.DictReader(file) if row["picture"]]
    assert pictures[0] == "a.decompx.skipplus.png"
    assert len(pictures) == len(set(pictures)) <= 3, "what is explained is written, once"
    assert results_in(place) == {*pictures, *(Path(name).with_suffix(".json").name for name in pictures)} | OVERVIEW
    assert signal.getsignal(signal.SIGTERM) is sigterm_for_nobody, "the caller's handler is back"


@pytest.fixture
def sigterm_for_nobody() -> Iterator[object]:
    """Fails the test where SIGTERM is not handled, instead of ending all tests."""

    def unhandled(*_: object) -> None:
        raise AssertionError("nobody handles SIGTERM")

    before = signal.signal(signal.SIGTERM, unhandled)
    yield unhandled
    signal.signal(signal.SIGTERM, before)


FULL = "Error: cannot write to the standard output: No space left on device.\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_program_whose_output_is_a_full_device(unbuffered: str) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        command = program("--version")
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("command", [["methods"], ["metrics", "--json"], ["reproduce", "--list"], ["--help"]])
def test_output_on_a_full_device(command: list[str], vit: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        result = vit(*command)
    assert (result.code, result.err) == (1, FULL)


STRANGE = b"caf\xe9"  # in Latin-1


@pytest.fixture
def strange_names(place: Path) -> Path:
    """A picture whose name is not UTF-8, a broken one, and one that only ASCII lacks."""
    folder = place / "names"
    folder.mkdir()
    noise(0).save(folder / "a.png")
    noise(1).save(folder / "zü.png")
    for name, content in ((STRANGE + b".png", (folder / "a.png").read_bytes()), (STRANGE + b"-2.png", b"broken")):
        Path(os.fsdecode(bytes(folder) + b"/" + name)).write_bytes(content)
    return folder


def test_a_name_that_is_not_utf_8_does_not_end_a_folder(
    vit: Run, tiny: list[str], strange_names: Path, place: Path
) -> None:
    result = vit("explain", strange_names, *tiny)
    assert result.code == 1
    assert "1 image could not be explained" in result.out
    stem = os.fsdecode(STRANGE)
    pictures = {f"{name}.decompx.skipplus.png" for name in ("a", "zü", stem)}
    assert results_in(place) == pictures | {name.replace(".png", ".json") for name in pictures} | OVERVIEW
    with open(place / "vitrail-out" / "explanations.csv", newline="", encoding="utf-8") as file:
        rows = [Path(row["image"]).name for row in csv.DictReader(file)]
    assert rows == ["a.png", r"caf\xe9-2.png", r"caf\xe9.png", "zü.png"]
    saved = place / "vitrail-out" / f"{stem}.decompx.skipplus.json"
    assert vitrail.open(saved, check=False).image.size == (60, 40), "the path leads back to the picture"
    assert vit("compare", strange_names / f"{stem}.png", "--methods", "rollout,gen_att", *tiny).code == 0
    (as_json,) = json.loads(vit("explain", strange_names / f"{stem}.png", *tiny, "--json").out)
    assert as_json["image"]["path"] == str(strange_names / f"{stem}.png")


def test_names_in_a_locale_that_knows_only_ascii(strange_names: Path, place: Path) -> None:
    old = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run(
        program("explain", strange_names, *QUICK), capture_output=True, env=os.environ | old, check=False
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert rb"-> vitrail-out/z\xc3\xbc.decompx.skipplus.png" in done.stdout
    assert rb"caf\xe9-2.png" in done.stdout
    assert len(results_in(place)) == 2 * 3 + len(OVERVIEW)
    assert "zü.png" in (place / "vitrail-out" / "explanations.csv").read_text(encoding="utf-8")


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(program("methods"), stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert run.stderr == ""


@pytest.mark.full
def test_a_home_that_cannot_be_written_is_no_matter(tiny: list[str], photo: Path) -> None:
    places = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "MPL"))}
    run = subprocess.run(
        program("explain", photo, *tiny), env={**places, "HOME": "/dev/null/home"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--top", "0"], ["--top", "x"], ["--nonsense"], []])
def test_wrong_usage(arguments: list[str], vit: Run) -> None:
    result = vit("explain", *arguments)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_bug_is_told_without_a_traceback(
    vit: Run, tiny: list[str], photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oh no.")

    monkeypatch.setattr("vitrail.cli.explain.print_model", broken)
    assert "ZeroDivisionError: oh no. This is a bug" in error_line(vit("explain", photo, *tiny))
    monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["vitrail", "explain", str(photo), *tiny])
    with pytest.raises(ZeroDivisionError):
        main()
