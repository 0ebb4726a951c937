"""How a server bears many clients, and how soon the first heatmap is there.

Run: python benchmarks/serve.py [--clients 32] [--seconds 60] [--model photo --model scenes] [--cache-mb 64]
Starts ``vitrail serve`` on a free port. First one client drops a photograph: the time until the default heatmap is
there. Then many clients at once predict, explain, mask, score, compare, send nonsense and go away in the middle;
each asks for ``/api/models`` before everything else it does. Prints how long that took, what was answered, and the
memory of the server's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
from PIL import Image, ImageEnhance

SAMPLES = files("vitrail.app") / "samples"
DROPS = 10
PICTURES = 400
MOST_PAUSE = 5.0


@dataclass
class Seen:
    """What the clients saw."""

    models: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--cache-mb", type=int, default=64, help="small, so that it is full before the first look")
    options = parser.parse_args()
    pictures = list(photographs(PICTURES))
    with server(options.model, options.cache_mb) as (url, process):
        drops = [first_heatmap(url, pictures[i]) for i in range(DROPS)]
        shown = f"median {statistics.median(drops):.2f} s, worst {max(drops):.2f} s"
        print(f"from drop to first heatmap ({DROPS} photographs, {os.cpu_count()} cores): {shown}")
        seen, memory = asyncio.run(crowd(url, process.pid, options.clients, options.seconds, pictures[DROPS:]))
    report(seen, memory, options.clients, options.seconds)


def photographs(count: int) -> Iterator[bytes]:
    """Different photographs of 1024 × 683 pixels, so that nothing is known before."""
    source = Image.open(io.BytesIO((SAMPLES / "coffee.jpg").read_bytes())).resize((1024, 683))
    for number in range(count):
        buffer = io.BytesIO()
        ImageEnhance.Brightness(source).enhance(0.7 + 0.6 * number / count).save(buffer, "JPEG", quality=80)
        yield buffer.getvalue()


@contextmanager
def server(models: list[str], cache: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    named = [part for name in models for part in ("--model", name)]
    command = [sys.executable, "-m", "vitrail.cli.program", "serve", "--port", "0", "--cache-mb", str(cache), *named]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        try:
            yield line[line.index("http://") :].strip().rstrip("/"), process
        finally:
            process.terminate()


def first_heatmap(url: str, photograph: bytes) -> float:
    """What the page does with a drop: predict, then explain the likeliest class."""
    with httpx.Client(base_url=url, timeout=60) as client:
        begin = time.perf_counter()
        found = client.post("/api/predict", files={"image": photograph}).raise_for_status().json()
        fields = {"picture": found["picture"], "target": str(found["classes"][0]["index"])}
        client.post("/api/explain", files=form(fields)).raise_for_status().json()
        return time.perf_counter() - begin


async def crowd(
    url: str, pid: int, clients: int, seconds: float, pictures: list[bytes]
) -> tuple[Seen, list[tuple[str, list[int]]]]:
    """All clients until the time is over; the memory at four points of it."""
    seen, until = Seen(), time.monotonic() + seconds
    tasks = [asyncio.create_task(Client(url, number, seen, pictures).live(until)) for number in range(clients)]
    memory = []
    for name, share in (("the beginning", 0.0), ("a quarter", 0.25), ("the middle", 0.5), ("the end", 1.0)):
        await asyncio.sleep(max(0.0, until - seconds * (1 - share) - time.monotonic()))
        memory.append((name, [resident(one) for one in family(pid)]))
    await asyncio.gather(*tasks)
    return seen, memory


class Client:
    """One visitor."""

    def __init__(self, url: str, number: int, seen: Seen, pictures: list[bytes]) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=60)
        self.draw, self.seen, self.pictures = random.Random(number), seen, pictures

    async def live(self, until: float) -> None:
        acts = (self.drop, self.explain, self.mask, self.score, self.compare, self.nonsense, self.go_away)
        async with self.http:
            while time.monotonic() < until:
                (act,) = self.draw.choices(acts, weights=(6, 6, 6, 2, 1, 1, 1))
                try:
                    await self.models()
                    await act()
                except httpx.TransportError as error:
                    self.seen.broken[f"{act.__name__}: {type(error).__name__}"] += 1

    async def models(self) -> None:
        begin = time.perf_counter()
        answer = await self.http.get("/api/models")
        self.seen.models.append(time.perf_counter() - begin)
        await self.note("models", answer)

    async def note(self, what: str, answer: httpx.Response) -> None:
        self.seen.statuses[f"{what} {answer.status_code}"] += 1
        if answer.status_code == 429:
            await asyncio.sleep(min(MOST_PAUSE, float(answer.headers["retry-after"])))

    async def post(self, what: str, fields: dict[str, str]) -> httpx.Response:
        given = {"sample": self.draw.choice(("cat", "coffee", "rocket")), **fields}
        answer = await self.http.post(f"/api/{what}", files=form(given))
        await self.note(what, answer)
        return answer

    async def drop(self) -> None:
        answer = await self.http.post("/api/predict", files={"image": self.draw.choice(self.pictures)})
        await self.note("predict", answer)

    async def explain(self) -> None:
        await self.post("explain", {"target": str(self.draw.randrange(10))})

    async def mask(self) -> None:
        await self.post("mask", {"removed": json.dumps(self.draw.sample(range(64), 20))})

    async def score(self) -> None:
        await self.post("score", {"steps": "8", "target": str(self.draw.randrange(10))})

    async def compare(self) -> None:
        answer = await self.post("compare", {"methods": "rollout,grad_cam,gen_att", "steps": "8", "wait": "false"})
        if answer.status_code == 202:
            stop = self.draw.random() < 0.5
            async with self.http.stream("GET", answer.json()["events"]) as stream:
                async for line in stream.aiter_lines():
                    if stop and line.startswith("event: partial"):
                        break

    async def nonsense(self) -> None:
        answer = await self.http.post("/api/predict", files={"image": self.draw.randbytes(5000)})
        await self.note("nonsense", answer)

    async def go_away(self) -> None:
        fields = {"sample": "cat", "method": "rise", "params": json.dumps({"seed": self.draw.randrange(10**9)})}
        try:
            answer = await self.http.post("/api/explain", files=form(fields), timeout=httpx.Timeout(60, read=0.5))
            await self.note("left", answer)
        except httpx.ReadTimeout:
            self.seen.statuses["left early"] += 1


def form(fields: dict[str, str]) -> dict[str, Any]:
    return {name: (None, value) for name, value in fields.items()}


def family(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(seen: Seen, memory: list[tuple[str, list[int]]], clients: int, seconds: float) -> None:
    times = sorted(seen.models)
    told = {name: times[min(len(times) - 1, int(share * len(times)))] * 1000
            for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}  # fmt: skip
    print(f"{clients} clients, {seconds:g} s: {sum(seen.statuses.values())} requests")
    print(f"/api/models ({len(times)}): " + ", ".join(f"{name} {value:.0f} ms" for name, value in told.items()))
    print("answers: " + ", ".join(f"{name} × {count}" for name, count in sorted(seen.statuses.items())))
    print("broken connections: " + (", ".join(f"{n} × {c}" for n, c in seen.broken.items()) or "none"))
    for name, parts in memory:
        each = " + ".join(f"{one / 2**20:.0f}" for one in parts)
        print(f"memory at {name}: {sum(parts) / 2**20:.0f} MiB ({each})")


if __name__ == "__main__":
    main()
