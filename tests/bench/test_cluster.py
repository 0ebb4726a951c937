"""The same plan on a local Ray cluster of two nodes, with a worker killed on the way."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from tests.bench.plans import same, table

import vitrail
from vitrail import VitrailError
from vitrail.audit import audit_images
from vitrail.bench import cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Outcome, Step, load_model, run
from vitrail.bench.store import Store
from vitrail.data import Scenes
from vitrail.models.view import View

ray = pytest.importorskip("ray", reason="Ray is not installed (extra cluster)")

PLAN = Plan([ModelSpec("scenes", {"device": "cpu"})], "scenes:10@3", ["gen_att", "random"],
            ["sparseness", "insertion(steps=8)"], target="label", deterministic=True)  # fmt: skip
COLUMNS = ["image", "method", "metric"]


@pytest.fixture(scope="module")
def nodes():  # type: ignore[no-untyped-def]
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    started.add_node(num_cpus=1)
    ray.init(address=started.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.shutdown()


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_cluster_gives_the_same_rows_though_workers_are_killed(
    kills: int, nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        if len(killed) < kills and step.done >= 4 * (len(killed) + 1):
            alive = [int(path.name) for path in noted.iterdir() if int(path.name) not in killed]
            os.kill(alive[0], signal.SIGKILL)
            killed.append(alive[0])

    before = run(replace(PLAN, images=4), tmp_path / "cluster")
    outcome = cluster.run_on_cluster(PLAN, tmp_path / "cluster", watch=kill_one, workers=2, load=load)
    assert len(killed) == kills
    run(PLAN, tmp_path / "alone")
    measured, expected = (
        Store(tmp_path / name).rows().sort_values(COLUMNS).reset_index(drop=True) for name in ("cluster", "alone")
    )
    assert measured[COLUMNS].equals(expected[COLUMNS])
    assert np.allclose(measured["value"], expected["value"], rtol=1e-6)
    assert outcome.known == before.images, "what is there already is not computed again"
    assert before.rows + outcome.rows == len(measured), "a shard that was lost was not written twice"
    assert len(Store(tmp_path / "cluster").maps()) == len(Store(tmp_path / "alone").maps())
    again = cluster.run_on_cluster(PLAN, tmp_path / "cluster", workers=1)
    assert (again.rows, again.known) == (0, outcome.known + outcome.images)


def test_rows_of_a_cluster_are_those_of_one_machine_bit_for_bit(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One image at a time, as the plan says, on as many threads as a worker has."""
    monkeypatch.setattr(cluster, "SHARD", 2)
    plan, threads = replace(PLAN, images=4), torch.get_num_threads()
    cluster.run_on_cluster(plan, tmp_path / "cluster", workers=2)
    torch.set_num_threads(1)
    try:
        run(plan, tmp_path / "alone")
    finally:
        torch.set_num_threads(threads)
    same(table(tmp_path / "cluster"), table(tmp_path / "alone"), exactly=True)
    maps, expected = (Store(tmp_path / name).maps() for name in ("cluster", "alone"))
    assert maps.keys() == expected.keys()
    assert all(np.array_equal(maps[name], expected[name]) for name in expected)


def test_an_audit_on_a_cluster_is_that_of_one_machine(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects come from a table, and one image cannot be read."""
    monkeypatch.setattr(cluster, "SHARD", 2)
    images = tmp_path / "images"
    images.mkdir()
    lines = ["file,boxes"]
    for number in range(8):
        Image.fromarray(Scenes(8)[number].image).save(images / f"{number}.png")
        lines.append(f"{number}.png,8,8,40,40")
    (images / "broken.png").write_bytes(b"no picture")
    (tmp_path / "boxes.csv").write_text("\n".join(lines).replace(",8,8,40,40", ',"8,8,40,40"'), encoding="utf-8")
    for name, address in (("cluster", "auto"), ("alone", None)):
        audit_images(
            "scenes", str(images), tmp_path / name, boxes=tmp_path / "boxes.csv", regions=[(0.0, 0.0, 0.5, 0.5)],
            trust=False, batch_size=1, options={"device": "cpu"}, cluster=address,
        )  # fmt: skip
    for file in ("images.csv", "classes.csv", "clusters.csv"):
        measured, expected = (pd.read_csv(tmp_path / name / file) for name in ("cluster", "alone"))
        pd.testing.assert_frame_equal(measured, expected, rtol=1e-5)
    assert len(pd.read_csv(tmp_path / "cluster" / "images.csv")) == 8
    with pytest.raises(VitrailError, match="give both by name, or leave out cluster"):
        audit_images(vitrail.load("scenes"), str(images), tmp_path / "view", cluster="auto")


@pytest.mark.full
def test_a_worker_that_is_always_lost_ends_the_run(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ATTEMPTS", 2)

    def load(spec: ModelSpec) -> object:
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    with pytest.raises(VitrailError, match=r"being loaded\) lost their worker 2 times"):
        cluster.run_on_cluster(PLAN, tmp_path, workers=1, load=load)  # type: ignore[arg-type]


@pytest.mark.full
def test_a_worker_that_waits_for_its_place_holds_no_images(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SHARD", 2)
    monkeypatch.setattr(cluster, "shares", lambda there, workers: (3, {"num_cpus": 1}))  # of which only two fit
    outcomes: list[Outcome] = []
    thread = Thread(target=lambda: outcomes.append(cluster.run_on_cluster(PLAN, tmp_path)), daemon=True)
    thread.start()
    thread.join(240)
    assert outcomes, "a shard waits for a worker that never comes"
    assert outcomes[0].rows == len(Store(tmp_path).rows())
    assert Store(tmp_path).environment()["device"].startswith("2 × "), "the devices of those who worked"


@pytest.mark.full
def test_workers_share_cpus(nodes: object, tmp_path: Path) -> None:
    """More workers than CPUs, and one that reports what it runs on."""

    def load(spec: ModelSpec) -> View:
        @vitrail.method("tests_cluster_raising")
        def raising(model, images, target):  # type: ignore[no-untyped-def]
            raise ValueError("svd did not converge")

        return load_model(spec)

    plan = replace(PLAN, methods=["random", "tests_cluster_raising"], metrics=["sparseness"])
    outcome = cluster.run_on_cluster(plan, tmp_path, workers=3, load=load)
    rows = Store(tmp_path).rows()
    assert outcome.errors == outcome.images == len(rows) / 2
    assert set(rows["error"].dropna()) == {"ValueError: svd did not converge"}
    assert "CPU" in Store(tmp_path).environment()["device"]
    again = cluster.run_on_cluster(plan, tmp_path, workers=1, load=load)
    assert (again.errors, again.failed_before, again.rows) == (0, outcome.errors, 0)


@pytest.mark.full
def test_a_run_without_room_says_what_it_waits_for(
    nodes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, warn = Event(), warnings.warn

    def warned(*arguments: Any, **options: Any) -> None:
        told.set()
        warn(*arguments, **options)

    monkeypatch.setattr("vitrail.bench.cluster.warnings.warn", warned)
    monkeypatch.setattr(cluster, "PATIENCE", 0.5)
    rest = [ray.remote(num_cpus=1)(Sleeper).remote() for _ in range(int(ray.cluster_resources()["CPU"]))]
    ray.get([sleeper.ready.remote() for sleeper in rest])
    leaving = Thread(target=lambda: (told.wait(60), [ray.kill(sleeper) for sleeper in rest]))
    leaving.start()
    with pytest.warns(UserWarning, match=r"no worker of scenes is ready .* no machine .* \(num_cpus=1\)"):
        outcome = cluster.run_on_cluster(replace(PLAN, images=2, methods=["random"]), tmp_path / "run")
    leaving.join()
    assert outcome.rows
    assert not outcome.failed


class Sleeper:
    """Takes a CPU."""

    def ready(self) -> bool:
        return True


def test_what_a_worker_takes() -> None:
    assert cluster.shares({"CPU": 4.0}, None) == (4, {"num_cpus": 1.0})
    assert cluster.shares({"CPU": 4.0}, 2) == (2, {"num_cpus": 1.0})
    assert cluster.shares({"CPU": 2.0}, 3) == (3, {"num_cpus": 0.5}), "so that three fit on machines of one CPU each"
    assert cluster.shares({"CPU": 1.0}, 6) == (6, {"num_cpus": 0.1666})
    assert cluster.shares({"CPU": 8.0, "GPU": 2.0}, None) == (2, {"num_gpus": 1.0})
    assert cluster.shares({"CPU": 8.0, "GPU": 1.0}, 2) == (2, {"num_gpus": 0.5})


def test_no_cluster_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(VitrailError, match="ray start --head"):
        cluster._connect("127.0.0.1:1")


def test_an_address_outside_needs_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(VitrailError, match=r"--cluster ray://head:10001 needs the Ray client .*vitrail\[cluster\]"):
        cluster._connect("ray://head:10001")


@pytest.mark.full
def test_a_plan_that_cannot_start_leaves_the_old_one(nodes: object, tmp_path: Path) -> None:
    PLAN.write(tmp_path / "plan.toml")
    with pytest.raises(VitrailError, match="no_such_method"):
        cluster.run_on_cluster(replace(PLAN, methods=["no_such_method"]), tmp_path, workers=1)
    assert Store(tmp_path).plan() == PLAN


@pytest.mark.full
def test_a_metric_that_nothing_can_be_measured_by_is_refused(nodes: object, tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.fromarray(Scenes(1)[0].image).save(pictures / "0.png")
    chosen = replace(PLAN, data=str(pictures), metrics=["pointing_game"], target=None)
    with pytest.raises(VitrailError, match="pointing_game needs boxes or masks, which none of the first 1 images"):
        cluster.run_on_cluster(chosen, tmp_path / "run", workers=1)
    assert not (tmp_path / "run" / "plan.toml").exists()
