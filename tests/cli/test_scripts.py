"""What docs/scripts.md promises to programs: JSON, exit codes, where output goes, environment variables."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.app.serving import PATIENCE
from tests.cli.common import Result, Run, noise

from vitrail.cli import explain
from vitrail.cli.codes import EXIT_CODES
from vitrail.cli.outputs import print_json
from vitrail.cli.program import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "scripts.md").read_text(encoding="utf-8")


def documented() -> Iterator[tuple[str, set[str]]]:
    """The commands of the table and the keys of their documents, of the elements where they are lists."""
    table = TEXT.partition("## What `--json` prints")[2].partition("\n\n- ")[0]
    for command, keys in re.findall(r"^\| `([\w -]+)` \| [^|]* \| ([^|]*) \|$", table, re.MULTILINE):
        yield command, set(re.findall(r"`([\w-]+)`", keys))


KEYS = dict(documented())
KEYS["compare"] = KEYS["explain"]


def strict(text: str) -> Any:
    """JSON without NaN and infinity, which Python would read."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def keys_of(result: Result) -> set[str]:
    """The keys of the only document on the standard output; what else there is is for people, without bars."""
    assert result.code == 0, result.err
    assert not re.search(r"\r|━|\d%\|", result.err)
    assert "\x1b" not in result.err
    document = strict(result.out)
    return set(document[0] if isinstance(document, list) else document)


def test_every_command_has_json_and_is_in_the_table() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    without = [
        name for name, command in commands.items() if "--json" not in [o for p in command.params for o in p.opts]
    ]
    assert without == []
    assert {command.split()[0] for command in KEYS} == set(commands)


@pytest.mark.parametrize(
    "arguments",
    [
        ["models", "deit_tiny*"],
        ["methods", "random"],
        ["metrics", "sparseness"],
        ["data", "scenes*"],
        ["reproduce --list"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_listings(arguments: list[str], vit: Run) -> None:
    name, *rest = arguments
    result = vit(*name.split(), *rest, "--json")
    assert keys_of(result) == KEYS[name]
    assert result.err == ""


def test_methods_of_a_model_say_whether_they_can(vit: Run) -> None:
    assert keys_of(vit("methods", "random", "--model", "scenes", "--json")) == KEYS["methods"] | {"supported"}


def test_explain_compare_and_similar(vit: Run, tiny: list[str], photo: Path, place: Path) -> None:
    noise(1).save(place / "other.png")
    assert keys_of(vit("explain", photo, *tiny, "--no-trust", "--json")) == KEYS["explain"]
    compared = vit("compare", photo, *tiny, "--methods", "random,gen_att", "--no-trust", "--json")
    assert keys_of(compared) == KEYS["compare"]
    assert [entry["method"] for entry in strict(compared.out)] == ["random", "gen_att"]
    assert Path(strict(compared.out)[0]["picture"]).is_file()
    assert keys_of(vit("similar", photo, "other.png", *tiny, "--json")) == KEYS["similar"]


def test_bench_and_report(vit: Run, tiny: list[str], photo: Path) -> None:
    measured = vit("bench", "--data", photo, *tiny, "--methods", "random", "--metrics", "sparseness", "--json")
    assert keys_of(measured) == KEYS["bench"]
    (run,) = strict(measured.out)["runs"]
    assert all(f"`{key}`" in TEXT for key in run)
    assert (run["run"], run["measured"], run["known"], run["failed"]) == ("vitrail-run", 1, 0, 0)
    report = vit("report", "vitrail-run", "--format", "csv", "--json")
    assert keys_of(report) == KEYS["report"]
    document = strict(report.out)
    assert all(Path(path).is_file() for path in document["files"])
    assert document["results"][0]["method"] == "random"
    assert all(f"`{key}`" in TEXT for key in document["results"][0])
    assert vit("bench", "--watch", "vitrail-run", "--json").code == 1


@pytest.mark.full
def test_audit(vit: Run, tiny: list[str], place: Path) -> None:
    (place / "data").mkdir()
    for seed in range(4):
        noise(seed).save(place / "data" / f"{seed}.png")
    result = vit("audit", "data", *tiny, "--no-trust", "--out", "report", "--json")
    assert keys_of(result) == KEYS["audit"]
    assert strict(result.out)["totals"]["images"] == 4
    assert all(f"`{key}`" in TEXT for key in strict(result.out)["totals"])


@pytest.mark.full
def test_train_explainer(vit: Run, tiny: list[str], place: Path) -> None:
    (place / "data").mkdir()
    for seed in range(5):
        noise(seed).save(place / "data" / f"{seed}.png")
    quick = ["--steps", 2, "--batch-size", 2, "--subsets", 16, "--hidden", 16, "--blocks", 1, "--workers", 0]
    result = vit("train-explainer", *tiny, "--data", "data", "--out", "mine.safetensors", *quick, "--json")
    assert keys_of(result) == KEYS["train-explainer"]


@pytest.mark.full
def test_serve_says_where_it_is() -> None:
    command = [sys.executable, "-m", "vitrail", "serve", "--model", "scenes", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        text = ""
        for line in server.stdout:
            text += line
            if line == "}\n":
                break
        document = strict(text)
        server.terminate()
        rest, _ = server.communicate(timeout=PATIENCE)
    assert set(document) == KEYS["serve"]
    assert document["url"].startswith("http://127.0.0.1:")
    assert (document["token"], document["models"]) == (None, ["scenes"])
    assert (server.returncode, rest) == (0, "")


def test_what_failed_is_in_the_document(vit: Run, tiny: list[str], album: Path) -> None:
    result = vit("explain", album, *tiny, "--no-trust", "--json")
    assert result.code == 1
    entries = strict(result.out)
    assert [set(entry) for entry in entries if "error" in entry] == [{"image", "error"}]
    assert sum(set(entry) == KEYS["explain"] for entry in entries) == 3


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(
        {"a": float("nan"), "b": [np.float64("inf"), np.int64(3), np.bool_(True)], "c": Path("x"), 4: (1.5, None)}
    )
    assert strict(capsys.readouterr().out) == {"a": None, "b": [None, 3, True], "c": "x", "4": [1.5, None]}


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    table = TEXT.partition("## Exit codes")[2].partition("##")[0]
    assert {
        int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", table, re.MULTILINE)
    } == EXIT_CODES


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["methods", "random"], 0),
        (["explain", "nowhere.png", "--json"], 1),
        (["methods", "no_such_method"], 1),
        ([], 2),
        (["no-such-command"], 2),
        (["explain"], 2),
        (["bench", "--images", "none"], 2),
    ],
)
def test_exit_codes(arguments: list[str], code: int, vit: Run) -> None:
    result = vit(*arguments)
    assert result.code == code
    assert code in EXIT_CODES
    if code == 1:
        assert result.out == ""
        assert result.err.startswith("Error: ")


def test_ctrl_c_has_its_exit_code(vit: Run, photo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "find_sources", interrupted)
    result = vit("explain", photo, "--json")
    assert (result.code, result.out) == (130, "")
    assert "stopped" in result.err


def test_every_variable_of_the_environment_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"""environ(?:\.get\(|\.setdefault\(|\[)"(\w+)""", source))
    table = TEXT.partition("## Environment variables")[2]
    assert read - {"OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"} <= set(re.findall(r"`([A-Z_]+)`", table))
    assert "VITRAIL_TRACEBACK" in read
