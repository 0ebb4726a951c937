"""Memory is bounded: 64 clients, hostile uploads and cancelled jobs included, and the server stays within its bound."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tests.app.server.hostile import all_uploads
from tests.app.serving import Served, form, subprocess_server, upload
from tests.soak.outcome import Outcome

SHARE = 4.0
CLIENTS = 64
MIB = 2**20
BOUND = 1536 * MIB  # beyond what it holds when idle: uploads in transit, caches, one picture being decoded, one job
REST = 512 * MIB  # of it, what may stay when all is done: caches and what the allocators keep
BUSY = (429, 503)


def soak(seconds: float) -> list[Outcome]:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess_server(Path(folder) / "log", "--model", "scenes") as server,
    ):
        return [serve(server, seconds)]


def serve(server: Served, seconds: float) -> Outcome:
    idle, outcome, lock = server.rss(), Outcome("memory of the server, 64 clients"), threading.Lock()
    end, peak, done = time.monotonic() + seconds, [idle], threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            peak[0] = max(peak[0], server.rss())

    def use(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            # a connection each: one that the server closes for being idle would be no fault of its
            with server.client(headers={"Connection": "close"}) as client:
                kind, status = request(client, draw)
                with lock:
                    outcome.inputs += 1
                    outcome.faults += kind != "explain"
                    if status >= 500 and status not in BUSY:
                        outcome.broken.append(f"{kind}: status {status}")

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(use, range(CLIENTS)))
    done.set()
    watcher.join()
    rest = server.rss()
    outcome.peak = peak[0]
    outcome.note = f"idle {idle / MIB:.0f} MiB, peak {peak[0] / MIB:.0f} MiB, afterwards {rest / MIB:.0f} MiB"
    if peak[0] - idle > BOUND or rest - idle > REST:
        outcome.broken.append(f"more memory than promised: {outcome.note}")
    return outcome


def request(client: httpx.Client, draw: random.Random) -> tuple[str, int]:
    """A request and its status, 599 for none: an explanation, a hostile upload, or a job that is cancelled at once."""
    choice = draw.random()
    if choice < 0.3:
        chosen = draw.choice(all_uploads())
        files = upload(chosen.data, chosen.filename, chosen.kind)
        try:
            return f"hostile upload {chosen.name}", client.post("/api/predict", files=files).status_code
        except httpx.HTTPError:
            return f"hostile upload {chosen.name}", 599
    if choice < 0.5:
        fields = form(sample="cat", method="rise", params={"masks": 512, "seed": draw.randrange(10**6)}, wait=False)
        answer = client.post("/api/explain", files=fields)
        if answer.status_code == 202:
            client.delete(f"/api/jobs/{answer.json()['job']}")
        return "cancelled job", answer.status_code
    seed = draw.randrange(10**6)
    fields = form(sample="cat", method="tis", params={"masks": 32, "seed": seed}, trust=False)
    return "explain", client.post("/api/explain", files=fields).status_code
