"""The same plan on a local Ray cluster of two nodes, with a worker killed on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from vitrail import VitrailError
from vitrail.bench import cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Step, load_model, run
from vitrail.bench.store import Store
from vitrail.models.view import View

ray = pytest.importorskip("ray", reason="Ray is not installed (extra cluster)")

PLAN = Plan([ModelSpec("scenes", {"device": "cpu"})], "scenes:20@3", ["gen_att", "random"],
            ["sparseness", "insertion(steps=8)"], target="label", deterministic=True)  # fmt: skip
COLUMNS = ["image", "method", "metric"]


@pytest.fixture(scope="module")
def nodes():  # type: ignore[no-untyped-def]
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


def test_a_cluster_gives_the_same_rows_though_a_worker_is_killed(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SHARD", 2)
    killed: list[int] = []

    noted = tmp_path / "workers"
    noted.mkdir()

    def load(spec: ModelSpec) -> View:
        (noted / str(os.getpid())).touch()
        return load_model(spec)

    def kill_one(step: Step) -> None:
        """After the first shards, whoever is at work."""
        if len(killed) < 2 and step.done >= 4 * (len(killed) + 1):
            alive = [int(path.name) for path in noted.iterdir() if int(path.name) not in killed]
            os.kill(alive[0], signal.SIGKILL)
            killed.append(alive[0])

    outcome = cluster.run_on_cluster(PLAN, tmp_path / "cluster", watch=kill_one, workers=2, load=load)
    assert len(killed) == 2
    run(PLAN, tmp_path / "alone")
    found, expected = (
        Store(tmp_path / name).rows().sort_values(COLUMNS).reset_index(drop=True) for name in ("cluster", "alone")
    )
    assert found[COLUMNS].equals(expected[COLUMNS])
    assert np.allclose(found["value"], expected["value"], rtol=1e-6)
    assert outcome.rows == len(found), "a shard that was lost was not written twice"
    assert len(Store(tmp_path / "cluster").maps()) == len(Store(tmp_path / "alone").maps())
    again = cluster.run_on_cluster(PLAN, tmp_path / "cluster", workers=1)
    assert (again.rows, again.known) == (0, outcome.images)


def test_a_worker_that_is_always_lost_ends_the_run(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ATTEMPTS", 2)

    def load(spec: ModelSpec) -> object:
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    with pytest.raises(VitrailError, match="lost their worker 2 times"):
        cluster.run_on_cluster(PLAN, tmp_path, workers=1, load=load)  # type: ignore[arg-type]


def test_no_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(VitrailError, match="ray start --head"):
        cluster._connect("127.0.0.1:1")
