"""Scripts that are run on other machines run here with a tiny network: tests/docs checks that those named exist."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def ran(script: str, *arguments: str) -> str:
    """The output of a script that succeeds."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpu_in_miniature(tmp_path: Path) -> None:
    parts = "limits,graphs,batches,single,pixels,curves,memory"
    ran("gpu.py", "--small", "--device", "cpu", "--only", parts, "--out", str(tmp_path))
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert not report["failed"]
    assert all(line["ours"] > 0 or line["unit"] == "GiB" for line in report["lines"])
    outcomes = [{k: v for k, v in graph.items() if k != "captured"} for graph in report["graphs"]]
    assert len(outcomes) == 24  # twelve methods in two precisions
    assert all(all(outcome.values()) for outcome in outcomes), "without graphs, all is eager"


def test_agreement_in_miniature(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    ran(
        "agreement.py",
        "--models",
        "scenes",
        "--images",
        "1",
        "--methods",
        "gen_att,gradient",
        "--device",
        "cpu",
        "--fp16",
        "--out",
        str(path),
    )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["gen_att", "gradient"]
    assert all(row["changed"] == "True" and float(row["least"]) > 0.99 for row in rows)


def test_bf16_in_miniature() -> None:
    printed = ran("bf16.py", "--models", "scenes", "--times", "1")
    lines = [line.split(" | ") for line in printed.splitlines() if line.startswith("| scenes ")]
    assert [line[1] for line in lines] == ["`tis(masks=256)`", "`posterior`", "`rise(masks=256)`"]
    assert all(float(line[-1].rstrip(" |")) > 0 for line in lines)


def test_shapley_in_miniature() -> None:
    printed = ran("shapley.py", "--data", "scenes:2", "--images", "2", "--permutations", "4", "--methods", "gen_att")
    lines = [line.split("Pearson ") for line in printed.splitlines()[1:]]
    assert [line[0].strip() for line in lines] == ["another seed", "vit_shapley", "gen_att"]
    assert float(lines[0][1].split(",")[0]) > 0.5
    assert all(-1 <= float(value) <= 1 for line in lines for value in line[1].split(", Spearman "))


def test_peers_in_miniature(tmp_path: Path) -> None:
    """captum alone: the other libraries are in no environment of ours."""
    path = tmp_path / "peers.csv"
    ran("peers.py", "--small", "--only", "captum", "--times", "1", "--out", str(path))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["library"] for row in rows] == ["captum"] * 5
    assert all(float(row["difference"]) < 1e-4 for row in rows)
    assert all(float(row[f"{side}_seconds"]) > 0 for row in rows for side in ("theirs", "ours"))


def test_scaling_in_miniature(tmp_path: Path) -> None:
    table, picture = tmp_path / "scaling.csv", tmp_path / "scaling.png"
    printed = ran(
        "scaling.py",
        "--small",
        "--only",
        "tokens,masks",
        "--methods",
        "gen_att,rise",
        "--out",
        str(table),
        "--plot",
        str(picture),
    )
    with table.open() as file:
        rows = list(csv.DictReader(file))
    sizes = [(row["axis"], row["method"], int(row["size"])) for row in rows]
    assert sizes == [
        ("tokens", "gen_att", 196),
        ("tokens", "gen_att", 400),
        ("masks", "rise", 64),
        ("masks", "rise", 128),
    ]
    assert all(float(row["seconds"]) > 0 for row in rows)
    assert float(rows[1]["mebibytes"]) > float(rows[0]["mebibytes"]) > 0
    assert [line.split(" | ")[2] for line in printed.splitlines()[-2:]] == ["196 … 400", "64 … 128"]
    assert picture.stat().st_size > 10_000


def test_a_large_image_in_miniature() -> None:
    printed = ran("scaling.py", "--large", "--small", "--side", "512", "--methods", "gen_att,decompx.*,rollout")
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("| `")]
    assert [method for method, *_ in rows] == ["`decompx.plus`", "`decompx.skipplus`", "`gen_att`"]
    assert all(0 < float(gibibytes) < 22 for *_, gibibytes in rows)
