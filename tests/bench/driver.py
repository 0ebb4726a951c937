"""The driver of a run on a cluster, in a process of its own: Ray reads its token once per process.

    python -m tests.bench.driver ADDRESS FOLDER

Runs FOLDER/plan.toml with the plugin FOLDER/gated.py into FOLDER/run. No shard is finished before all three workers
have one, so that whoever is killed then loses some. After the first shard it writes FOLDER/first and waits for
FOLDER/changed, a number of CPUs that the cluster then has. FOLDER/seen.json says what happened.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import ray
from tests.bench.nodes import wait_until

from vitrail.bench import cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Step, load_model
from vitrail.models.view import View
from vitrail.plugins import load_plugins


def cpus() -> float:
    return ray.cluster_resources().get("CPU", 0.0)


def machines() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def drive(address: str, folder: Path) -> None:
    cluster.SHARD = 2
    loads, shut, changed = folder / "loads", folder / "shut", folder / "changed"
    loads.mkdir()
    shards, pools = list[int](), list[cluster.WorkerPool]()
    start_workers = cluster.WorkerPool._start_workers

    def noted_start(pool: cluster.WorkerPool, unfinished: int) -> None:
        pools.append(pool)
        start_workers(pool, unfinished)

    cluster.WorkerPool._start_workers = noted_start  # type: ignore[method-assign]
    first_ready = cluster.WorkerPool._first_ready
    shut.touch()

    def at_work(pool: cluster.WorkerPool) -> int:
        return sum(shard is not None for _, shard in pool.busy.values())

    def noted_wait(pool: cluster.WorkerPool) -> object:
        if not shards and at_work(pool) == 3:
            shut.unlink()
        return first_ready(pool)

    cluster.WorkerPool._first_ready = noted_wait  # type: ignore[method-assign]
    ray.init(address=address, log_to_driver=False)
    wait_until(lambda: cpus() == 3, "the cluster of three CPUs")
    before = machines()

    def load(spec: ModelSpec) -> View:
        context = ray.get_runtime_context()
        (loads / f"{context.get_node_id()} {os.getpid()} {context.get_task_name()}").touch()
        if context.get_node_id() not in before:
            shut.unlink(missing_ok=True)  # the others have waited for the machine that joined
        load_plugins([folder / "gated.py"])
        return load_model(spec)

    def see(step: Step) -> None:
        shards.append(at_work(pools[-1]))
        if len(shards) == 1:
            shut.touch()
            (folder / "first").touch()
            wait_until(changed.exists, "the change of the machines")
            wait_until(lambda: cpus() == float(changed.read_text()), "the loss and the arrival of CPUs")

    outcome = cluster.run_on_cluster(Plan.read(folder / "plan.toml"), folder / "run", address, watch=see, load=load)
    seen = {"images": outcome.images, "errors": outcome.errors, "shards": shards, "joined": list(machines() - before)}
    (folder / "seen.json").write_text(json.dumps(seen))
    ray.shutdown()


if __name__ == "__main__":
    drive(sys.argv[1], Path(sys.argv[2]))
