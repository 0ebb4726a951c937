"""Jobs: order, cancelling, time limits, a queue that is full, a worker that dies. The server has small limits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tests.app.hostile import photo, saved
from tests.app.serving import PATIENCE, Served, events, form, until, upload

from vitrail.app.server.bounded import Bounded
from vitrail.app.server.dispatch import Dispatcher
from vitrail.app.server.errors import Refused
from vitrail.app.server.events import events as events_of
from vitrail.app.server.jobs import Answer, Job, Jobs, State, Task
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
def hurried(small: Served, seconds: float) -> Iterator[None]:
    """Jobs have little time."""
    usual = small.service.dispatcher.settings
    small.service.dispatcher.settings = replace(usual, job_seconds=seconds)
    yield
    small.service.dispatcher.settings = usual


def free(client: httpx.Client) -> None:
    """The worker does the next thing at once."""
    begun = time.monotonic()
    assert client.post("/api/explain", files=form(sample="cat", method="random", target="0")).status_code == 200
    assert time.monotonic() - begun < PATIENCE


def test_deleting_a_running_job_frees_the_worker(small: Served, pressing: httpx.Client) -> None:
    job = long_job(pressing, 1)
    running(pressing, job)
    worker = small.service.dispatcher.pid
    assert pressing.delete(f"/api/jobs/{job}").status_code == 204
    until(lambda: state(pressing, job)["state"] == "cancelled")
    steps = small.service.jobs.find(job).steps
    free(pressing)
    assert small.service.jobs.find(job).steps == steps  # no more masks were scored for it
    assert small.service.dispatcher.pid == worker  # it stopped by itself
    assert pressing.delete(f"/api/jobs/{job}").status_code == 204  # once more changes nothing
    with pressing.stream("GET", f"/api/jobs/{job}/events") as stream:
        assert [name for name, _ in events(stream)][-1] == "cancelled"


def test_a_client_that_stops_waiting_takes_its_job_along(small: Served, pressing: httpx.Client) -> None:
    fields = form(sample="cat", method="rise", params={"masks": 400_000, "seed": 2})
    with pytest.raises(httpx.ReadTimeout):
        pressing.post("/api/explain", files=fields, timeout=httpx.Timeout(PATIENCE, read=0.7))
    until(lambda: not small.service.dispatcher._begun)
    free(pressing)


def test_closing_the_stream_takes_the_job_along(small: Served, pressing: httpx.Client) -> None:
    job = long_job(pressing, 3)
    with pressing.stream("GET", f"/api/jobs/{job}/events") as stream:
        next(said for name, said in events(stream) if name == "progress")
    until(lambda: state(pressing, job)["state"] == "cancelled")
    free(pressing)


def test_a_job_that_takes_too_long_ends_by_itself(small: Served, pressing: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    fields = form(sample="cat", method="rise", params={"masks": 400_000, "seed": 4})
    with hurried(small, 1.5):
        answer = pressing.post("/api/explain", files=fields)
    assert answer.status_code == 408
    assert "1.5 seconds" in answer.json()["error"]
    assert small.service.dispatcher.pid == worker
    free(pressing)


def test_work_that_does_not_listen_is_ended_with_its_process(small: Served, pressing: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    deaf = long_job(pressing, 9)
    running(pressing, deaf)
    os.kill(worker, signal.SIGSTOP)
    waiting = begin(pressing, method="random", target="1")
    pressing.delete(f"/api/jobs/{deaf}")
    until(lambda: state(pressing, deaf)["state"] == "cancelled")
    until(lambda: state(pressing, waiting)["state"] == "done")  # it was queued, and survives
    assert small.service.dispatcher.pid != worker
    free(pressing)


def test_a_worker_that_dies_is_started_again_and_only_its_job_fails(small: Served, pressing: httpx.Client) -> None:
    job = long_job(pressing, 5)
    running(pressing, job)
    waiting = begin(pressing, method="random", target="2")
    os.kill(small.service.dispatcher.pid, signal.SIGKILL)
    until(lambda: state(pressing, job)["state"] == "failed")
    assert "ended" in state(pressing, job)["error"]
    until(lambda: state(pressing, waiting)["state"] == "done")


def test_memory_beyond_the_limit_is_an_error_not_a_crash(small: Served, pressing: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    answer = pressing.post("/api/explain", files=form(sample="cat", method="rise", params={"masks": 10**13}))
    assert answer.status_code == 422
    assert small.service.dispatcher.pid == worker


def test_a_full_queue_says_when_to_come_again(pressing: httpx.Client) -> None:
    first = long_job(pressing, 6)
    running(pressing, first)
    others = [long_job(pressing, seed) for seed in (7, 8)]
    assert [state(pressing, job)["position"] for job in others] == [1, 2]  # the one that runs goes before them
    answer = pressing.post("/api/explain", files=form(sample="cat", method="rollout", target="3"))
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    quick = pressing.post("/api/predict", files=form(sample="coffee"))  # quick work has a lane of its own
    assert quick.status_code == 200
    assert state(pressing, first)["state"] == "running"
    assert pressing.get("/api/health").json()["queue"] == 2
    for job in (*others, first):
        pressing.delete(f"/api/jobs/{job}")
    assert [state(pressing, job)["state"] for job in others] == ["cancelled"] * 2
    until(lambda: state(pressing, first)["state"] == "cancelled")


def test_who_waits_hears_how_many_go_before() -> None:
    """The one that runs is one of them; they are told again when there are fewer."""

    async def wait() -> list[list[int]]:
        jobs = Jobs(8, 1000)
        first, second, third, fourth = (jobs.submit(Task("explain", "m", "p", {"n": n}), True) for n in range(4))
        running = await jobs.long.next()
        assert running is first
        fifth = jobs.submit(Task("explain", "m", "p", {"n": 4}), follow=True)
        jobs.drop(third)
        first.end("done", Answer("application/json", b"{}"))
        assert await jobs.long.next() is second
        assert jobs.long.position(fifth) == 2
        return [[json.loads(data)["position"] for name, data in job.events if name == "queued"]
                for job in (first, second, fourth, fifth)]  # fmt: skip

    assert asyncio.run(wait()) == [[0], [1], [3, 2, 1], [4, 3, 2]]


def test_a_job_that_was_cancelled_is_as_far_as_it_was() -> None:
    async def ended(state: State) -> float:
        job = Job(Task("explain", "m", "p", {}))
        job.tell("progress", b'{"done": 1, "total": 4}')
        job.end(state)
        return job.share

    assert [asyncio.run(ended(state)) for state in ("cancelled", "failed", "done")] == [0.25, 0.25, 1]


def test_each_method_of_a_comparison_has_its_own_time(small: Served, pressing: httpx.Client) -> None:
    worker = small.service.dispatcher.pid
    with hurried(small, 1.5):
        fields = form(sample="coffee", methods="random,rise,rollout", score=False)
        answer = pressing.post("/api/compare", files=fields)
    assert answer.status_code == 200, answer.text
    first, slow, last = answer.json()["results"]
    assert "values" in first
    assert "values" in last
    assert "longer than 1.5 seconds" in slow["error"]
    assert small.service.dispatcher.pid == worker


def test_a_comparison_gets_new_time_with_each_method() -> None:
    async def until_when() -> tuple[float, float]:
        dispatcher = Dispatcher(Settings(job_seconds=50), [], Jobs(4, 1000), lambda _: pytest.fail("no picture"))
        job = Job(Task("compare", "m", "p", {}))
        dispatcher._here[job.id] = job
        dispatcher._heard({"event": "started", "job": job.id}, b"")
        assert job.timer is not None
        first = job.timer
        for _ in range(2):
            dispatcher._heard({"event": "partial", "job": job.id}, b"{}")
        assert first.cancelled()
        job.timer.cancel()
        return first.when(), job.timer.when()

    first, later = asyncio.run(until_when())
    assert later > first


def test_quick_work_goes_between_the_steps_of_long_work(pressing: httpx.Client) -> None:
    job = begin(pressing, "compare", methods="random,rise,rollout,grad_cam", score=False)
    running(pressing, job)
    for patch in range(3):
        assert pressing.post("/api/mask", files=form(sample="cat", removed=[patch])).status_code == 200
        assert state(pressing, job)["state"] == "running"
    pressing.delete(f"/api/jobs/{job}")
    until(lambda: state(pressing, job)["state"] == "cancelled")


def test_answers_are_remembered(small: Served, pressing: httpx.Client) -> None:
    fields = form(sample="coffee", method="rollout")
    first = pressing.post("/api/explain", files=fields).json()
    assert pressing.post("/api/explain", files=fields).json() == first  # to the time it took
    assert small.service.jobs.answers.bytes <= small.service.jobs.answers.most


def test_memory_is_bounded_and_forgotten_pictures_are_gone(small: Served, pressing: httpx.Client) -> None:
    first = pressing.post("/api/predict", files=upload(saved(photo((70, 60)), "PNG"))).json()["picture"]
    assert pressing.post("/api/predict", files=form(picture=first)).status_code == 200
    for size in range(12):  # each of about 230 kB, of which two million bytes are kept
        noise = photo((300, 260 + size))
        assert pressing.post("/api/predict", files=upload(saved(noise, "PNG"))).status_code == 200
    assert small.service.uploads.bytes <= small.service.settings.cache_bytes // 4
    answer = pressing.post("/api/predict", files=form(picture=first))
    assert answer.status_code == 410
    assert "send it again" in answer.json()["error"]


def test_a_picture_the_worker_forgot_is_brought_again(small: Served, pressing: httpx.Client) -> None:
    picture = pressing.post("/api/predict", files=upload(saved(photo((90, 80)), "PNG"))).json()["picture"]
    shelf = small.service.dispatcher._shelf
    for size in range(3):
        pressing.post("/api/predict", files=upload(saved(photo((900, 800 + size)).quantize(8), "PNG")))
    assert picture not in shelf
    answer = pressing.post("/api/explain", files=form(picture=picture, method="rollout"))
    assert answer.status_code == 200
    assert answer.json()["image"]["size"] == [90, 80]
    assert shelf.bytes <= shelf.most


def test_many_at_once_all_get_an_answer(pressing: httpx.Client, small: Served) -> None:
    found: list[int] = []

    def ask(number: int) -> None:
        with small.client() as client:
            for patch in range(4):
                answer = client.post("/api/mask", files=form(sample="cat", removed=[patch, number]))
                found.append(answer.status_code)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 32
    assert set(found) <= {200, 429}
    assert 200 in found


def test_bounded_forgets_what_was_used_longest_ago() -> None:
    gone: list[object] = []
    store: Bounded[str] = Bounded(10, gone.append)
    for key in "abc":
        store.put(key, key.upper(), 3)
    assert store.get("a") == "A"
    store.put("d", "D", 3)
    assert gone == ["b"]
    assert store.bytes == 9
    store.put("e", "E", 100)  # the newest stays, whatever its size
    assert len(store) == 1
    assert store.get("b") is None
    store.put("e", "E", 2)
    assert store.bytes == 2


def test_finished_jobs_are_kept_within_bounds() -> None:
    async def flood() -> tuple[int, int]:
        jobs = Jobs(4, 1000)
        first = None
        for number in range(40):
            job = jobs.submit(Task("compare", "m", "p", {"n": number}), follow=True)
            first = first or job
            jobs.lane(job.task).remove(job)
            job.end("done", Answer("application/json", bytes(2**20)))
            jobs.settle(job, 0.1)
        assert first is not None
        with pytest.raises(Refused, match="no longer kept"):
            jobs.find(first.id)
        return jobs._finished.bytes, len(jobs._followed)

    held, followed = asyncio.run(flood())
    assert held <= 17 * 2**20
    assert followed == 0


def test_progress_is_not_piled_up() -> None:
    async def told() -> Job:
        job = Job(Task("explain", "m", "p", {}))
        for done in range(1000):
            job.tell("progress", b'{"done": %d, "total": 1000}' % done)
        return job

    job = asyncio.run(told())
    assert job.events == []
    assert job.share == pytest.approx(0.999)


def test_events_come_in_their_order_and_once() -> None:
    async def follow() -> list[bytes]:
        job = Job(Task("compare", "m", "p", {}))
        job.tell("queued", b"1")
        job.tell("progress", b"{}")
        job.tell("progress", b"2")
        job.tell("partial", b"3")
        heard = []
        async for line in events_of(job):
            heard.append(line.split(b"data: ")[1].strip())
            if line.startswith(b"event: partial") and len(heard) == 3:
                job.tell("partial", b"4")
                job.tell("progress", b"5")
            elif line.startswith(b"event: progress") and len(heard) == 5:
                job.end("done", Answer("application/json", b"6"))
        return heard

    assert asyncio.run(follow()) == [b"1", b"2", b"3", b"4", b"5", b"6"]
