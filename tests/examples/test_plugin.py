"""The package of examples/plugin: built and installed by pip without a network, and used by other processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.app.serving import CAT, subprocess_server
from tests.packages import EXAMPLE

from vitrail.bench.cluster import run_on_cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.store import Store
from vitrail.cli.bench import ModelLoader

pytestmark = pytest.mark.full

BENCH = ["bench", "--model", "stripes", "--data", "stripes:4", "--methods", "local_contrast,random"]
BENCH += ["--metrics", "border_share,pointing_game", "--device", "cpu"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""
    source, folder = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("target")
    shutil.copytree(EXAMPLE, source)  # the build writes beside its source
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(source)], check=True)
    return folder


def run(target: Path, place: Path, *command: str) -> str:
    """What a new process with the package prints."""
    paths = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *command], cwd=place, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_python_sees_it(target: Path, tmp_path: Path) -> None:
    code = (
        "import vitrail\n"
        "from vitrail.data import open_data\n"
        "ex = vitrail.explain(vitrail.load('stripes:48'), open_data('stripes:1')[0].image, 'local_contrast')\n"
        "print(ex.label, ex.score(['border_share'])['border_share'] < 0.5)"
    )
    assert run(target, tmp_path, "-c", code) == "horizontal True\n"


def test_the_command_line_lists_and_uses_it(target: Path, tmp_path: Path) -> None:
    (row,) = json.loads(run(target, tmp_path, "-m", "vitrail", "methods", "local_*", "--json"))
    assert (row["name"], row["parameters"]) == ("local_contrast", {"window": 9})
    (tmp_path / "cat.jpg").write_bytes(CAT)
    explain = ["explain", "cat.jpg", "--method", "local_contrast", "--no-trust"]
    run(target, tmp_path, "-m", "vitrail", *explain, "--model", "stripes")
    assert (tmp_path / "vitrail-out" / "cat.local_contrast.png").is_file()


def check_run(folder: Path) -> None:
    rows = Store(folder).rows()
    assert len(rows) == 4 * 2 * 2
    assert rows["error"].isna().all()
    assert Store(folder).environment()["plugins"] == {"vitrail-stripes": "0.1.0"}


def test_bench_measures_it_and_records_its_version(target: Path, tmp_path: Path) -> None:
    run(target, tmp_path, "-m", "vitrail", *BENCH, "--out", "run")
    check_run(tmp_path / "run")


def test_workers_of_a_cluster_find_it(
    target: Path, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed (extra cluster)")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")])))
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        ray.init(address=started.address, log_to_driver=False)
        plan = Plan(
            [ModelSpec("stripes")], "stripes:4", ["local_contrast", "random"], ["border_share", "pointing_game"]
        )
        run_on_cluster(plan, tmp_path / "run", workers=1, load=ModelLoader("cpu", []))
    finally:
        ray.shutdown()
        started.shutdown()
    check_run(tmp_path / "run")


def test_the_server_offers_it(target: Path, tmp_path: Path) -> None:
    paths = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
    with (
        subprocess_server(tmp_path / "log", "--model", "stripes", PYTHONPATH=paths) as server,
        server.client() as client,
    ):
        (model,) = client.get("/api/models").json()
        assert model["labels"] == ["horizontal", "vertical"]
        rows = {row["name"]: row for row in client.get("/api/methods", params={"model": "stripes"}).json()}
        assert rows["local_contrast"]["supported"] == "yes"
        form = {"image": CAT, "method": (None, "local_contrast"), "params": (None, '{"window": 5}')}
        answer = client.post("/api/explain", files=form).json()
        assert answer["method"] == "local_contrast"
