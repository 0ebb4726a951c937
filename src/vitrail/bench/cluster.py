"""The same plan on a Ray cluster: shards of images go to workers, one model each; one process writes.

A worker reads its images itself, so the data must be visible from every machine under the plan's path. A shard whose
worker is lost is given to another; its rows are written only when it is complete, so nothing is there twice.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.bench.applicability import check_metrics_apply
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Loader, ModelRun, Outcome, Step, load_model, open_plan_data
from vitrail.bench.store import Store, environment
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

    def __init__(self, plan: Plan, spec: ModelSpec, done: dict[str, str | None], load: Loader, retry: bool) -> None:
        self.plan, self.spec, self.done, self.load, self.retry = plan, spec, done, load, retry

    def prepare(self) -> dict[str, Any]:
        """Loads the model and opens the data; says where it works and with what."""
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # Ray shows each worker its own
        view, data = self.load(self.spec), open_plan_data(self.plan)
        self.run = ModelRun(self.plan, self.spec.name, view, data, Shelf(), Outcome(), retry=self.retry)
        check_metrics_apply(self.run)
        return environment(view.device)

    def measure(self, positions: Sequence[int]) -> tuple[Shelf, Outcome]:
        """The rows of some images that are not there yet."""
        shelf, outcome = Shelf(), Outcome()
        self.run.keeper, self.run.outcome = shelf, outcome
        self.run.go(positions, self.done)
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
        workers: how many; None = one per GPU, or per CPU where there are none. If there are more workers than GPUs (or
            CPUs), each takes a part of one.
    """
    ray = _connect(address)
    store, outcome, begin = Store(out), Outcome(), time.perf_counter()
    with store.locked():
        total = len(open_plan_data(plan))
        for spec in plan.models:
            crew = Crew(ray, workers, (plan, spec, ray.put(store.done(plan.maps)), load, retry))
            crew.ready = lambda about: store.begin(plan, about)
            for count, shelf, own in crew.go([range(i, min(i + SHARD, total)) for i in range(0, total, SHARD)]):
                _keep(store, shelf)
                _add(outcome, own)
                if watch is not None:
                    watch(Step(spec.name, count, total, shelf.rows))
    outcome.seconds = time.perf_counter() - begin
    return outcome


class Crew:
    """The workers of one model, and who does what: a worker gets its first shard when it is ready, not before."""

    def __init__(self, ray: Any, workers: int | None, given: Sequence[Any]) -> None:
        self.ray = ray
        self.count, self.share = shares(ray.cluster_resources(), workers)
        self.actor: Any = ray.remote(Worker)
        self.given = given
        self.ready: Callable[[dict[str, Any]], None] = lambda about: None  # is told where the workers are
        self.places: list[dict[str, Any]] = []
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, range | None]] = {}  # answer awaited → worker, its shard; None = it prepares
        self.tried: Counter[range | None] = Counter()

    def go(self, shards: Sequence[range]) -> Iterator[tuple[int, Shelf, Outcome]]:
        """(images done, shelf, outcome) of each shard, as they come back; lost workers are replaced."""
        waiting, count = list(shards), 0
        try:
            for _ in range(self.count):
                self._hire()
            while waiting or any(shard is not None for _, shard in self.busy.values()):
                while waiting and self.idle:
                    worker, shard = self.idle.pop(), waiting.pop(0)
                    self.busy[worker.measure.remote(list(shard))] = (worker, shard)
                (answer,), _ = self.ray.wait(list(self.busy), num_returns=1)
                worker, done = self.busy.pop(answer)
                found = self._answer(answer, done)
                if found is None:
                    waiting += [] if done is None else [done]
                    self._hire()
                    continue
                self.idle.append(worker)
                if done is None:
                    self._welcome(found)
                else:
                    count += len(done)
                    yield count, *found
        finally:
            for worker in [*self.idle, *(worker for worker, _ in self.busy.values())]:
                self.ray.kill(worker)

    def _hire(self) -> None:
        worker = self.actor.options(**self.share, max_restarts=0).remote(*self.given)
        self.busy[worker.prepare.remote()] = (worker, None)

    def _welcome(self, about: dict[str, Any]) -> None:
        self.tried.pop(None, None)
        self.places.append(about)
        devices = Counter(one["device"] for one in self.places)
        told = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in devices.items())
        self.ready({**self.places[0], "device": told})

    def _answer(self, answer: Any, shard: range | None) -> Any:
        """What a worker found; None if it was lost."""
        which = "(none yet: the model was being loaded)" if shard is None else f"{shard.start}…{shard.stop - 1}"
        try:
            return self.ray.get(answer)
        except self.ray.exceptions.RayActorError as error:
            self.tried[shard] += 1
            if self.tried[shard] == ATTEMPTS:
                raise VitrailError(
                    f"images {which} lost their worker {ATTEMPTS} times ({error}): what is done is kept; look at the "
                    "memory of the machines."
                ) from None
            return None
        except self.ray.exceptions.RayTaskError as error:
            raise VitrailError(f"a worker failed on images {which}: {str(error.cause).rstrip('.')}.") from None


def shares(there: Mapping[str, float], workers: int | None) -> tuple[int, dict[str, float]]:
    """How many workers, and which part of a GPU, or of a CPU where there are none, each of them takes."""
    name = "GPU" if there.get("GPU", 0) >= 1 else "CPU"
    devices = max(1, int(there.get(name, 1)))
    count = workers or devices
    crowd = math.ceil(count / devices)  # on one device; Ray counts in ten-thousandths
    return count, {f"num_{name.lower()}s": math.floor(10_000 / crowd) / 10_000}


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise VitrailError("--cluster needs Ray, which is not installed: pip install 'vitrail[cluster]'.") from None
    if address.startswith("ray://") and find_spec("grpc") is None:
        raise VitrailError(
            f"--cluster {address} needs the client of Ray (grpcio), which is not installed: pip install "
            "'vitrail[cluster]', or 'ray[client]'."
        )
    if ray.is_initialized():
        return ray
    here = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise VitrailError(
            f"there is no Ray cluster at {address!r} ({error}): start one with `ray start --head`, or use local."
        ) from None
    finally:
        if here:
            signal.signal(signal.SIGTERM, handler)  # Ray puts its own in place of the caller's
    return ray


def _keep(store: Store, shelf: Shelf) -> None:
    if shelf.maps:
        store.add_maps(shelf.maps)
    if shelf.pictures:
        store.add_pictures(shelf.pictures)
    if shelf.rows:
        store.add_rows(shelf.rows)


def _add(total: Outcome, own: Outcome) -> None:
    for name in ("images", "known", "rows", "errors", "failed_before"):
        setattr(total, name, getattr(total, name) + getattr(own, name))
    total.first_error = total.first_error or own.first_error
