"""The same plan on a Ray cluster: shards of images go to workers, one model each; one process writes.

A worker reads its images itself, so the data must be visible from every machine under the plan's path. A shard whose
worker is lost is given to another; its rows are written only when it is complete, so nothing is there twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Loader, ModelRun, Outcome, Step, load_model, open_plan_data
from vitrail.bench.store import Store
from vitrail.errors import VitrailError

SHARD = 16  # images
ATTEMPTS = 5  # of one shard


@dataclass
class Shelf:
    """Takes the place of a store in a worker: what it would write goes back to the one who asked."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    maps: dict[str, Tensor] = field(default_factory=dict)
    pictures: list[Mapping[str, Any]] = field(default_factory=list)

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows += rows

    def add_maps(self, maps: Mapping[str, Tensor]) -> None:
        self.maps |= {name: one.detach().to("cpu", torch.float16) for name, one in maps.items()}

    def add_pictures(self, pictures: Sequence[Mapping[str, Any]]) -> None:
        self.pictures += pictures


class Worker:
    """One model on one device; an actor on the cluster."""

    def __init__(self, plan: Plan, spec: ModelSpec, done: set[str], load: Loader) -> None:
        self.plan, self.spec, self.done = plan, spec, done
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # Ray shows each worker its own
        self.view, self.data = load(spec), open_plan_data(plan)

    def measure(self, positions: Sequence[int]) -> tuple[Shelf, Outcome]:
        """The rows of some images that are not there yet."""
        shelf, outcome = Shelf(), Outcome()
        run = ModelRun(self.plan, self.spec.name, self.view, self.data, shelf, outcome)
        run.go(positions, self.done)
        return shelf, outcome


def run_on_cluster(
    plan: Plan,
    out: str | Path,
    address: str = "auto",
    *,
    load: Loader = load_model,
    watch: Callable[[Step], None] | None = None,
    retry: bool = False,
    workers: int | None = None,
) -> Outcome:
    """As ``vitrail.bench.run.run``, on a Ray cluster.

    Args:
        plan: what to do.
        out: the run folder, new or begun, on the machine that calls this.
        address: "auto" for the cluster this machine belongs to, "ray://HOST:PORT", or "local" to start one here.
        load: makes the view of a model, in the worker.
        watch: is told of every shard.
        retry: tries again what failed before.
        workers: how many; None = one per GPU, or per CPU where there are none.
    """
    ray = _connect(address)
    store, outcome, begin = Store(out), Outcome(), time.perf_counter()
    with store.locked():
        total = len(open_plan_data(plan))
        for spec in plan.models:
            store.begin(plan, torch.device("cpu"))
            done = ray.put(store.done(retry))
            crew = Crew(ray, plan, spec, done, load, workers)
            for count, shelf, own in crew.go([range(i, min(i + SHARD, total)) for i in range(0, total, SHARD)]):
                _keep(store, shelf)
                _add(outcome, own)
                if watch is not None:
                    watch(Step(spec.name, count, total, shelf.rows))
    outcome.seconds = time.perf_counter() - begin
    return outcome


class Crew:
    """The workers of one model, and who does what."""

    def __init__(self, ray: Any, plan: Plan, spec: ModelSpec, done: Any, load: Loader, workers: int | None) -> None:
        self.ray = ray
        there = ray.cluster_resources()
        gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 1))
        count = workers or gpus or max(1, cpus)
        share = {"num_gpus": 1} if gpus else {"num_cpus": 1}  # more might be more than any one machine has
        actor: Any = ray.remote(Worker)

        def make() -> Any:
            return actor.options(**share, max_restarts=0).remote(plan, spec, done, load)

        self.make = make
        self.free = [self.make() for _ in range(count)]

    def go(self, shards: Sequence[range]) -> Any:
        """(images done, shelf, outcome) of each shard, as they come back; lost workers are replaced."""
        try:
            yield from self._go(shards)
        finally:
            for worker in self.free:
                self.ray.kill(worker)

    def _go(self, shards: Sequence[range]) -> Any:
        waiting, busy, tried, count = list(shards), dict[Any, tuple[Any, range]](), dict[range, int](), 0
        while waiting or busy:
            while waiting and self.free:
                worker, shard = self.free.pop(), waiting.pop(0)
                busy[worker.measure.remote(list(shard))] = (worker, shard)
            (ready,), _ = self.ray.wait(list(busy), num_returns=1)
            worker, shard = busy.pop(ready)
            try:
                shelf, outcome = self.ray.get(ready)
            except self.ray.exceptions.RayActorError as error:
                tried[shard] = tried.get(shard, 0) + 1
                if tried[shard] == ATTEMPTS:
                    raise VitrailError(
                        f"images {shard.start}…{shard.stop - 1} lost their worker {ATTEMPTS} times ({error}): what is "
                        "done is kept; look at the memory of the machines."
                    ) from None
                waiting.append(shard)
                self.free.append(self.make())
                continue
            except self.ray.exceptions.RayTaskError as error:
                raise VitrailError(
                    f"a worker failed on images {shard.start}…{shard.stop - 1}: {error.cause}."
                ) from None
            self.free.append(worker)
            count += len(shard)
            yield count, shelf, outcome


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise VitrailError("--cluster needs Ray, which is not installed: pip install 'vitrail[cluster]'.") from None
    if ray.is_initialized():
        return ray
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise VitrailError(
            f"there is no Ray cluster at {address!r} ({error}): start one with `ray start --head`, or use local."
        ) from None
    return ray


def _keep(store: Store, shelf: Shelf) -> None:
    if shelf.maps:
        store.add_maps(shelf.maps)
    if shelf.pictures:
        store.add_pictures(shelf.pictures)
    if shelf.rows:
        store.add_rows(shelf.rows)


def _add(total: Outcome, own: Outcome) -> None:
    for name in ("images", "known", "rows", "errors"):
        setattr(total, name, getattr(total, name) + getattr(own, name))
    total.first_error = total.first_error or own.first_error
