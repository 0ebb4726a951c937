"""Scripts that are run on other machines run here with a tiny network: tests/docs checks that those named exist."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

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
    assert len(outcomes) == 14
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
        "--out",
        str(path),
    )
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["gen_att", "gradient"]
    assert all(row["changed"] == "True" and float(row["least"]) > 0.99 for row in rows)
