"""Work ahead of its consumer: tasks run in threads, their results come in order.

Decoding, resizing and drawing release Python's lock, so that threads do them side by side while the device computes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn, TypeVar

T = TypeVar("T")

MOST_THREADS = 16  # more would mostly wait for Python's lock
BATCHES = 2  # that are read ahead of the one that is explained


def ahead(tasks: Iterable[Callable[[], T]], most: int, *, eager: bool = False) -> Generator[Future[T], None, None]:
    """Runs tasks in threads and yields each when it has ended, in order; ``result()`` gives its value or its error.

    No thread outlives the generator: whoever may leave it early closes it (``contextlib.closing``).

    Args:
        tasks: drawn in the thread of the consumer, no earlier than they can start.
        most: tasks that have begun and have not been yielded; with one, no thread is started.
        eager: yield what has ended before a further task is drawn, where drawing one takes long; otherwise as many
            tasks as allowed are kept going.
    """
    if most < 2:
        yield from map(_ended, tasks)
        return
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(min(most, threads()), thread_name_prefix="vitrail-ahead")
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            while waiting and (len(waiting) == most or (eager and waiting[0].done())):
                yield _awaited(waiting)
        while waiting:
            yield _awaited(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def failed(error: Exception) -> NoReturn:
    """As a task: what has failed before it became one."""
    raise error


def threads() -> int:
    """How many threads work ahead: one for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


def _awaited(waiting: deque[Future[T]]) -> Future[T]:
    """The first of the tasks, when it has ended."""
    waiting[0].exception()
    return waiting.popleft()


def _ended(task: Callable[[], T]) -> Future[T]:
    """A task that is run here and now."""
    future: Future[T] = Future()
    try:
        future.set_result(task())
    except Exception as error:
        future.set_exception(error)
    return future
