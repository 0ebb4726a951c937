"""Jobs: order, cancelling, time limits, a queue that is full, a worker that dies. The server has small limits."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from PIL import Image
from tests.app.server.hostile import photo, saved
from tests.app.serving import PATIENCE, Served, events, form, until, upload

from vitrail.app.server.dispatcher import Dispatcher
from vitrail.app.server.jobs import Answer, Job, Jobs, State, Task
from vitrail.app.server.responses import RequestError
from vitrail.app.server.settings import Settings


def state(client: httpx.Client, job: str) -> dict[str, Any]:
    return client.get(f"/api/jobs/{job}").json()


def begin(client: httpx.Client, kind: str = "explain", **fields: Any) -> str:
    """A job that is on its way."""
    answer = client.post(f"/api/{kind}", files=form(sample="cat", wait=False, **fields))
    assert answer.status_code == 202, answer.text
    return answer.json()["job"]


def long_job(client: httpx.Client, seed: int) -> str:
    """Many masks: it would take far longer than the time limit, and tells its progress."""
    return begin(client, method="rise", params={"masks": 400_000, "seed": seed})


def running(client: httpx.Client, job: str) -> None:
    """Begun, and far enough to hear that it is cancelled."""
    until(lambda: state(client, job)["state"] == "running" and state(client, job)["progress"] > 0)


@contextmanager
def hurried(small: Served, **limits: float) -> Iterator[None]:
    """Jobs have little time to end, or to stop."""
    settings = small.service.dispatcher.settings
    small.service.dispatcher.settings = replace(settings, **limits)
    try:
        yield
    finally:
        small.service.dispatcher.settings = settings


def free(client: httpx.Client) -> None:
    """The worker does the next thing at once."""
    begun = time.monotonic()
    assert client.post("/api/explain", files=form(sample="cat", method="random", target="0")).status_code == 200
    assert time.monotonic() - begun < PATIENCE


def test_deleting_a_running_job_frees_the_worker(small: Served, small_client: httpx.Client) -> None:
    job = long_job(small_client, 1)
    running(small_client, job)
    worker = small.service.dispatcher.pid
    assert small_client.delete(f"/api/jobs/{job}").status_code == 204
    until(lambda: state(small_client, job)["state"] == "cancelled")
    steps = small.service.jobs.find(job).progress
    free(small_client)
    assert small.service.jobs.find(job).progress == steps  # no more masks were scored for it
    assert small.service.dispatcher.pid == worker  # it stopped by itself
    assert small_client.delete(f"/api/jobs/{job}").status_code == 204  # once more changes nothing
    with small_client.stream("GET", f"/api/jobs/{job}/events") as stream:
        assert [name for name, _ in events(stream)][-1] == "cancelled"


def test_a_client_that_stops_waiting_takes_its_job_along(small: Served, small_client: httpx.Client) -> None:
    fields = form(sample="cat", method="rise", params={"masks": 400_000, "seed": 2})
    with pytest.raises(httpx.ReadTimeout):
        small_client.post("/api/explain", files=fields, timeout=httpx.Timeout(PATIENCE, read=0.7))
    until(lambda: not small.service.dispatcher._started)
    free(small_client)


def test_closing_the_stream_takes_the_job_along(small: Served, small_client: httpx.Client) -> None:
    job = long_job(small_client, 3)
    with small_client.stream("GET", f"/api/jobs/{job}/events") as stream:
        next(data for name, data in events(stream) if name == "progress")
    until(lambda: state(small_client, job)["state"] == "cancelled")
    free(small_client)


def test_a_job_that_takes_too_long_ends_by_itself(small: Served, small_client: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    fields = form(sample="cat", method="rise", params={"masks": 400_000, "seed": 4})
    with hurried(small, job_seconds=0.5):
        answer = small_client.post("/api/explain", files=fields)
    assert answer.status_code == 408
    assert "0.5 seconds" in answer.json()["error"]
    assert small.service.dispatcher.pid == worker
    free(small_client)


def test_work_that_does_not_listen_is_ended_with_its_process(small: Served, small_client: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    deaf = long_job(small_client, 9)
    running(small_client, deaf)
    os.kill(worker, signal.SIGSTOP)
    waiting = begin(small_client, method="random", target="1")
    with hurried(small, stop_seconds=0.2):
        small_client.delete(f"/api/jobs/{deaf}")
        until(lambda: state(small_client, deaf)["state"] == "cancelled")
    until(lambda: state(small_client, waiting)["state"] == "done")  # it was queued, and survives
    assert small.service.dispatcher.pid != worker
    free(small_client)


def test_a_worker_that_dies_is_started_again_and_only_its_job_fails(small: Served, small_client: httpx.Client) -> None:
    job = long_job(small_client, 5)
    running(small_client, job)
    waiting = begin(small_client, method="random", target="2")
    os.kill(small.service.dispatcher.pid, signal.SIGKILL)
    until(lambda: state(small_client, job)["state"] == "failed")
    assert "ended" in state(small_client, job)["error"]
    until(lambda: state(small_client, waiting)["state"] == "done")


def test_memory_beyond_the_limit_is_an_error_not_a_crash(small: Served, small_client: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    limit, _ = resource.prlimit(worker, resource.RLIMIT_DATA)  # no machine has the memory that is asked for below
    assert 0 < limit < 4 * small.service.settings.work_bytes
    answer = small_client.post("/api/explain", files=form(sample="cat", method="rise", params={"masks": 10**13}))
    assert answer.status_code == 422
    assert small.service.dispatcher.pid == worker


def test_a_full_queue_says_when_to_come_again(small_client: httpx.Client) -> None:
    first = long_job(small_client, 6)
    running(small_client, first)
    others = [long_job(small_client, seed) for seed in (7, 8)]
    assert [state(small_client, job)["position"] for job in others] == [1, 2]  # the running job is ahead of them
    fields = form(sample="cat", method="rollout", target="3", wait=False)
    answer = small_client.post("/api/explain", files=fields)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    quick = small_client.post("/api/predict", files=form(sample="coffee"))  # quick jobs have a queue of their own
    assert quick.status_code == 200
    assert state(small_client, first)["state"] == "running"
    assert small_client.get("/api/health").json()["queue"] == 2
    for job in (*others, first):
        small_client.delete(f"/api/jobs/{job}")
    assert [state(small_client, job)["state"] for job in others] == ["cancelled"] * 2
    until(lambda: state(small_client, first)["state"] == "cancelled")


def test_who_waits_hears_how_many_go_before() -> None:
    """Including the running one; the position is sent again when it changes."""

    async def wait() -> list[list[int]]:
        jobs = Jobs(8, 1000)
        first, second, third, fourth = (jobs.submit(Task("explain", "m", "p", {"n": n}), True) for n in range(4))
        running = await jobs.long.next()
        assert running is first
        fifth = jobs.submit(Task("explain", "m", "p", {"n": 4}), keep=True)
        jobs.drop(third)
        first.finish("done", Answer("application/json", b"{}"))
        assert await jobs.long.next() is second
        assert jobs.long.position(fifth) == 2
        return [[json.loads(data)["position"] for name, data in job.events.values() if name == "queued"]
                for job in (first, second, fourth, fifth)]  # fmt: skip

    assert asyncio.run(wait()) == [[0], [1], [3, 2, 1], [4, 3, 2]]


def test_a_job_that_was_cancelled_is_as_far_as_it_was() -> None:
    async def ended(state: State) -> float:
        job = Job(Task("explain", "m", "p", {}))
        job.emit("progress", b'{"done": 1, "total": 4}')
        job.finish(state)
        return job.fraction

    assert [asyncio.run(ended(state)) for state in ("cancelled", "failed", "done")] == [0.25, 0.25, 1]


def test_each_method_of_a_comparison_has_its_own_time(small: Served, small_client: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    with hurried(small, job_seconds=3):  # many times what the quick methods take
        calls = "random, rise(masks=400000), rollout"
        fields = form(sample="coffee", methods=calls, score=False, trust=False)
        answer = small_client.post("/api/compare", files=fields)
    assert answer.status_code == 200, answer.text
    first, slow, last = answer.json()["results"]
    assert "values" in first
    assert "values" in last
    assert "longer than 3 seconds" in slow["error"]
    assert small.service.dispatcher.pid == worker


def test_a_comparison_gets_new_time_with_each_method() -> None:
    async def until_when() -> tuple[float, float]:
        dispatcher = Dispatcher(Settings(job_seconds=50), [], Jobs(4, 1000), lambda _: pytest.fail("no picture"))
        job = Job(Task("compare", "m", "p", {}))
        dispatcher._assigned[job.id] = job
        dispatcher._on_message({"event": "started", "job": job.id}, b"")
        assert job.timer is not None
        first = job.timer
        for _ in range(2):
            dispatcher._on_message({"event": "partial", "job": job.id}, b"{}")
        assert first.cancelled()
        job.timer.cancel()
        return first.when(), job.timer.when()

    first, later = asyncio.run(until_when())
    assert later > first


def test_quick_work_goes_between_the_steps_of_long_work(small_client: httpx.Client) -> None:
    job = begin(small_client, "compare", methods="random, rise(masks=400000), rollout", score=False)
    running(small_client, job)
    for patch in range(3):
        assert small_client.post("/api/mask", files=form(sample="cat", removed=[patch])).status_code == 200
        assert state(small_client, job)["state"] == "running"
    small_client.delete(f"/api/jobs/{job}")
    until(lambda: state(small_client, job)["state"] == "cancelled")


def test_answers_are_remembered(small_client: httpx.Client) -> None:
    fields = form(sample="coffee", method="rollout")
    first = small_client.post("/api/explain", files=fields).json()
    assert small_client.post("/api/explain", files=fields).json() == first  # to the time it took


def test_evicted_pictures_are_gone(small_client: httpx.Client) -> None:
    first = small_client.post("/api/predict", files=upload(saved(photo((70, 60)), "PNG"))).json()["picture"]
    assert small_client.post("/api/predict", files=form(picture=first)).status_code == 200
    for size in range(12):  # each of about 230 kB, of which two million bytes are kept
        noise = photo((300, 260 + size))
        assert small_client.post("/api/predict", files=upload(saved(noise, "PNG"))).status_code == 200
    answer = small_client.post("/api/predict", files=form(picture=first))
    assert answer.status_code == 410
    assert "send it again" in answer.json()["error"]


def test_a_picture_the_worker_forgot_is_brought_again(small: Served, small_client: httpx.Client) -> None:
    picture = small_client.post("/api/predict", files=upload(saved(photo((90, 80)), "PNG"))).json()["picture"]
    shelf = small.service.dispatcher._pictures
    for size in range(3):
        small_client.post("/api/predict", files=upload(saved(Image.new("RGB", (900, 800 + size)), "PNG")))
    assert picture not in shelf
    answer = small_client.post("/api/explain", files=form(picture=picture, method="rollout"))
    assert answer.status_code == 200
    assert answer.json()["image"]["size"] == [90, 80]


def test_many_at_once_all_get_an_answer(small_client: httpx.Client, small: Served) -> None:
    statuses: list[int] = []

    def ask(number: int) -> None:
        with small.client() as client:
            for patch in range(4):
                answer = client.post("/api/mask", files=form(sample="cat", removed=[patch, number]))
                statuses.append(answer.status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 32
    assert set(statuses) <= {200, 429}
    assert 200 in statuses


def test_finished_jobs_are_kept_within_bounds() -> None:
    async def flood() -> tuple[int, int]:
        jobs = Jobs(4, 1000)
        first = None
        for number in range(40):
            job = jobs.submit(Task("compare", "m", "p", {"n": number}), keep=True)
            first = first or job
            jobs.queue(job.task).remove(job)
            job.finish("done", Answer("application/json", bytes(2**20)))
            jobs.settle(job, 0.1)
        assert first is not None
        with pytest.raises(RequestError, match="no longer kept"):
            jobs.find(first.id)
        return jobs._finished.currsize, len(jobs._active)

    held, followed = asyncio.run(flood())
    assert held <= 17 * 2**20
    assert followed == 0


def test_progress_is_not_piled_up() -> None:
    async def emit_many() -> Job:
        job = Job(Task("explain", "m", "p", {}))
        for done in range(1000):
            job.emit("progress", b'{"done": %d, "total": 1000}' % done)
        return job

    job = asyncio.run(emit_many())
    assert list(job.events.values()) == [("progress", b'{"done": 999, "total": 1000}')]
    assert job.fraction == pytest.approx(0.999)


def test_events_come_in_their_order_and_once() -> None:
    async def follow() -> list[bytes]:
        job = Job(Task("compare", "m", "p", {}))
        job.emit("queued", b"1")
        job.emit("progress", b"{}")
        job.emit("progress", b"2")
        job.emit("partial", b"3")
        heard = []
        async for line in job.stream():
            heard.append(line.split(b"data: ")[1].strip())
            if line.startswith(b"event: partial") and len(heard) == 3:
                job.emit("partial", b"4")
                job.emit("progress", b"5")
            elif line.startswith(b"event: progress") and len(heard) == 5:
                job.finish("done", Answer("application/json", b"6"))
        return heard

    assert asyncio.run(follow()) == [b"1", b"2", b"3", b"4", b"5", b"6"]
