"""A plan on a Ray cluster: workers hold one model each and measure shards of images; one process writes.

A worker reads its images itself, so the data must be visible from every machine under the plan's path. A shard whose
worker is lost goes to another worker; its rows are written only when it is complete, so no row is written twice. A
worker has one shard at a time, so that never more results wait than there are workers.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from vitrail.bench.folders import Place
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Loader, ModelRun, Outcome, Step, load_model, open_plan_data
from vitrail.bench.store import Buffer, Store, environment
from vitrail.data.base import DataSet
from vitrail.errors import VitrailError

if TYPE_CHECKING:
    import pandas as pd

SHARD = 16  # images
ATTEMPTS = 5  # per shard
CONNECTIONS = 3  # attempts
PATIENCE = 60.0  # seconds without a worker until the caller is told
HEAD = "node:__internal_head__"  # a resource that Ray gives the head

T = TypeVar("T")


class Worker:
    """One model on one device; a Ray actor, which the dashboard and logs call as ``repr`` does."""

    def __init__(
        self,
        plan: Plan,
        spec: ModelSpec,
        done: dict[str, str | None],
        load: Loader,
        retry: bool,
        open_data: Callable[[Plan], DataSet],
    ) -> None:
        self.plan, self.spec, self.done, self.load, self.retry = plan, spec, done, load, retry
        self.open_data = open_data

    def __repr__(self) -> str:
        return f"vitrail: {self.spec.name}"

    def prepare(self) -> dict[str, Any]:
        """Loads the model and opens the data; returns the environment."""
        if torch.cuda.is_available():
            torch.cuda.set_device(0)  # Ray shows each worker its own
        view, data = self.load(self.spec), self.open_data(self.plan)
        self.run = ModelRun(self.plan, self.spec.name, view, data, retry=self.retry)
        self.run.check_metrics()
        return environment(view)

    def measure(self, positions: Sequence[int]) -> tuple[Buffer, Outcome]:
        """The missing rows of some images."""
        self.run.buffer, self.run.outcome = Buffer(), Outcome()
        self.run.measure(positions, self.done)
        return self.run.buffer, self.run.outcome


def run_on_cluster(
    plan: Plan,
    out: Place,
    address: str = "auto",
    *,
    load: Loader = load_model,
    watch: Callable[[Step], None] | None = None,
    retry: bool = False,
    workers: int | None = None,
    data: DataSet | None = None,
    open_data: Callable[[Plan], DataSet] = open_plan_data,
) -> Outcome:
    """As ``vitrail.bench.run.run``, on a Ray cluster.

    Args:
        plan: the plan.
        out: the run folder, new or started, on the calling machine; or an address of an object store.
        address: "auto" for the cluster of this machine, "HOST:PORT" for the one that this machine joined,
            "ray://HOST:PORT" from outside, or "local" to start one here.
        load: builds the view of a model, in the worker.
        watch: called after every shard.
        retry: retry what failed before.
        workers: number of workers; None = one per GPU, or per CPU where there are none, those of machines that join
            later included. More workers than GPUs (or CPUs) share them.
        data: the images of the plan, if they are open already.
        open_data: opens the images of the plan, in the worker.
    """
    ray = _connect(address)
    store, outcome, start = Store(out), Outcome(), time.perf_counter()
    with store.locked():
        total = len(open_data(plan) if data is None else data)
        shards = [range(first, min(first + SHARD, total)) for first in range(0, total, SHARD)]
        for spec in plan.models:
            arguments = (plan, spec, ray.put(store.done(plan.maps)), load, retry, open_data)
            pool = WorkerPool(ray, workers, spec.name, arguments, on_ready=lambda about: store.begin(plan, about))
            try:
                for count, results, shard_outcome in pool.measure(shards):
                    step = Step(spec.name, count, total, results.rows)
                    results.flush(store)
                    outcome.add(shard_outcome)
                    if watch is not None:
                        watch(step)
            except (ConnectionError, ray.exceptions.RayError) as error:
                reason = str(error).strip().splitlines()[0].rstrip(".")
                raise VitrailError(
                    f"the cluster at {address!r} was lost ({reason}): finished shards are kept, the same command "
                    "resumes."
                ) from None
    outcome.seconds = time.perf_counter() - start
    return outcome


class WorkerPool:
    """The workers of one model; each gets its first shard only when its model is loaded.

    Ray itself retries a call that does not reach its worker. It does not restart a lost worker, which would bind the
    shard to it: if its machine is gone for good, and no other has room, the shard would wait forever. Here any worker
    takes it.
    """

    def __init__(
        self,
        ray: Any,
        workers: int | None,
        model: str,
        arguments: Sequence[Any],
        on_ready: Callable[[dict[str, Any]], None],
    ) -> None:
        self.ray, self.workers, self.model, self.arguments, self.on_ready = ray, workers, model, arguments, on_ready
        _, self.resources = shares(ray.cluster_resources(), workers)
        # a result is lost with the machine that holds it, though its worker may have finished
        errors = ray.exceptions
        self.lost = (errors.RayActorError, errors.ObjectLostError, errors.OutOfMemoryError, errors.NodeDiedError)
        self.actor: Any = ray.remote(Worker)
        self.environments: list[dict[str, Any]] = []
        self.idle: list[Any] = []
        self.busy: dict[Any, tuple[Any, range | None]] = {}  # reference → worker, its shard; None = loading
        self.losses: Counter[range | None] = Counter()
        self.waited = False

    def measure(self, shards: Sequence[range]) -> Iterator[tuple[int, Buffer, Outcome]]:
        """(images done, results, outcome) of each shard, in order of completion; lost workers are replaced."""
        waiting, count = list(shards), 0
        try:
            while unfinished := len(waiting) + sum(shard is not None for _, shard in self.busy.values()):
                self._start_workers(unfinished)
                while waiting and self.idle:
                    worker, shard = self.idle.pop(), waiting.pop(0)
                    name = f"{self.model}: images {shard.start}–{shard.stop - 1}"
                    self.busy[worker.measure.options(name=name).remote(list(shard))] = (worker, shard)
                reference = self._first_ready()
                worker, done = self.busy.pop(reference)
                result = self._result(reference, done)
                if result is None:
                    self.ray.kill(worker)  # it may only be out of reach, and hold its GPU
                    waiting += [] if done is None else [done]
                    continue
                self.idle.append(worker)
                if done is None:
                    self._register(result)
                else:
                    count += len(done)
                    yield count, *result
        finally:
            for worker in [*self.idle, *(worker for worker, _ in self.busy.values())]:
                self.ray.kill(worker)

    def _first_ready(self) -> Any:
        """The first call to end; who waits for nothing but new workers is told once."""
        starting = not self.idle and all(shard is None for _, shard in self.busy.values())
        patience = PATIENCE if starting and not self.waited else None
        ready, _ = self.ray.wait(list(self.busy), num_returns=1, timeout=patience)
        if not ready:
            self.waited = True
            share = ", ".join(f"{name}={value:g}" for name, value in self.resources.items())
            warnings.warn(
                f"no worker of {self.model} is ready after {PATIENCE:.0f} s: its model is still being loaded, or no "
                f"machine of the cluster has room for it ({share}); see `ray status`. Waiting.",
                stacklevel=2,
            )
            ready, _ = self.ray.wait(list(self.busy), num_returns=1)
        return ready[0]

    def _start_workers(self, shards: int) -> None:
        """Starts workers in place of lost ones, and on machines that have joined; no more than there are shards."""
        count, _ = shares(self.ray.cluster_resources(), self.workers)
        for _ in range(len(self.idle) + len(self.busy), min(count, shards)):
            options = {**self.resources, "max_restarts": 0, "max_task_retries": ATTEMPTS}
            worker = self.actor.options(**options).remote(*self.arguments)
            self.busy[worker.prepare.options(name=f"{self.model}: load").remote()] = (worker, None)

    def _register(self, about: dict[str, Any]) -> None:
        self.losses.pop(None, None)
        self.environments.append(about)
        devices = Counter(about["device"] for about in self.environments)
        device = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in devices.items())
        self.on_ready({**self.environments[0], "device": device})

    def _result(self, reference: Any, shard: range | None) -> Any:
        """The result of a worker; None if it was lost."""
        images = "(none yet: the model was being loaded)" if shard is None else f"{shard.start}…{shard.stop - 1}"
        try:
            return self.ray.get(reference)
        except self.lost as error:
            self.losses[shard] += 1
            if self.losses[shard] == ATTEMPTS:
                raise VitrailError(
                    f"images {images} lost their worker {ATTEMPTS} times ({error}): finished shards are kept; check "
                    "the memory of the machines."
                ) from None
            return None
        except self.ray.exceptions.RayTaskError as error:
            raise VitrailError(f"a worker failed on images {images}: {str(error.cause).rstrip('.')}.") from None


def shares(resources: Mapping[str, float], workers: int | None) -> tuple[int, dict[str, float]]:
    """The number of workers, and the share of a GPU, or of a CPU where there are none, that each requests."""
    name = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
    devices = max(1, int(resources.get(name, 1)))
    count = workers or devices
    per_device = math.ceil(count / devices)
    return count, {f"num_{name.lower()}s": math.floor(10_000 / per_device) / 10_000}  # Ray's resolution


class ClusterStore(Store):
    """A run folder that only the head of a cluster can read."""

    def __init__(self, folder: Place, address: str) -> None:
        super().__init__(folder)
        self.ray = _connect(address)

    @property
    def exists(self) -> bool:
        return self.ask(lambda store: store.exists)

    @property
    def has_rows(self) -> bool:
        return self.ask(lambda store: store.has_rows)

    def plan(self) -> Plan:
        return self.ask(lambda store: store.plan())

    def rows(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        return self.ask(lambda store: store.rows(columns))

    def ask(self, question: Callable[[Store], T]) -> T:
        """The answer of a function of the store, called on the head."""
        folder = self.folder
        task = self.ray.remote(lambda: question(Store(folder)))
        placed = task.options(num_cpus=0, resources={HEAD: 0.001}, max_retries=ATTEMPTS, name=f"watch {folder}")
        try:
            return self.ray.get(placed.remote())
        except self.ray.exceptions.RayTaskError as error:
            raise VitrailError(f"the head of the cluster failed: {str(error.cause).rstrip('.')}.") from None


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise VitrailError("--cluster needs Ray, which is not installed: pip install 'vitrail[cluster]'.") from None
    if address.startswith("ray://") and find_spec("grpc") is None:
        raise VitrailError(
            f"--cluster {address} needs the Ray client (grpcio), which is not installed: pip install "
            "'vitrail[cluster]', or 'ray[client]'."
        )
    if ray.is_initialized():
        return ray
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for attempt in range(1, CONNECTIONS + 1):
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
                break
            except (
                ConnectionAbortedError
            ):  # the head accepts, but the server that it starts for a client fails at times
                if attempt == CONNECTIONS:
                    raise
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise VitrailError(
            f"there is no Ray cluster at {address!r} ({error}): start one with `ray start --head`, or use local."
        ) from None
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, handler)  # Ray replaces the caller's
    return ray
