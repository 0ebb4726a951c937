"""Waiting for a job: until its end, event by event, and no longer than the client waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vitrail.app.server.errors import Refused
from vitrail.app.server.jobs import Job, cancelled

PING_SECONDS = 15.0  # a line now and then keeps proxies from closing the stream

Cancel = Callable[[Job], None]


async def until_gone(receive: Receive) -> None:
    """Ends when the client has closed the connection, or sends more than it may."""
    with suppress(Refused):
        while (await receive())["type"] != "http.disconnect":
            pass


async def finished(job: Job, receive: Receive, cancel: Cancel) -> Job:
    """The job at its end; a client that goes away takes its job with it."""
    over, gone = asyncio.create_task(job.over.wait()), asyncio.create_task(until_gone(receive))
    try:
        await asyncio.wait((over, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        over.cancel()
        gone.cancel()
        cancel(job)  # no more than a word where it is over
    if job.error is not None:
        raise job.error
    if job.answer is None:
        raise cancelled()
    return job


async def events(job: Job) -> AsyncIterator[bytes]:
    """All events so far, then each as it comes, to the last; of progress only the latest."""
    told, steps = 0, 0
    while True:
        changed = job.changed
        while told < len(job.events) or job.steps > steps:
            if told >= job.place and job.steps > steps:
                steps = job.steps
                if job.progress is not None and not job.finished:
                    yield _line("progress", job.progress)
            else:
                told += 1
                yield _line(*job.events[told - 1])
        if job.finished:
            return
        try:
            await asyncio.wait_for(changed.wait(), PING_SECONDS)
        except TimeoutError:
            yield b": still there\n\n"


def _line(name: str, data: bytes) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class EventStream(Response):
    """Server-sent events of a job. Closing the stream before the end cancels the job."""

    media_type = "text/event-stream"

    def __init__(self, job: Job, cancel: Cancel) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.job, self.cancel = job, cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            gone.cancel()
            self.cancel(self.job)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in events(self.job):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
