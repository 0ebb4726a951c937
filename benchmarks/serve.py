"""Latency of the first heatmap, and a load test with many clients.

Run: python benchmarks/serve.py [--clients 32] [--seconds 60] [--model photo --model scenes] [--cache-mb 64]
Starts ``vitrail serve`` on a free port. A single client first measures the time from an upload to the default heatmap.
Then many clients predict, explain, mask, score, compare, send invalid files and disconnect early, all at once; each
requests ``/api/models`` before every action. Prints the latency of that request, the answers, and the memory of the
server's processes.
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

SAMPLES = files("vitrail.data") / "samples"
DROPS = 10
PICTURES = 400
MAX_PAUSE = 5.0


@dataclass
class Observations:
    """What the clients observed."""

    models: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--cache-mb", type=int, default=64, help="small, so that it fills up early")
    options = parser.parse_args()
    pictures = list(photographs(PICTURES))
    with server(options.model, "--cache-mb", str(options.cache_mb)) as (url, process):
        drops = [first_heatmap(url, pictures[i]) for i in range(DROPS)]
        shown = f"median {statistics.median(drops):.2f} s, worst {max(drops):.2f} s"
        print(f"from drop to first heatmap ({DROPS} photographs, {os.cpu_count()} cores): {shown}")
        observations, memory = asyncio.run(crowd(url, process.pid, options.clients, options.seconds, pictures[DROPS:]))
    report(observations, memory, options.clients, options.seconds)


def photographs(count: int) -> Iterator[bytes]:
    """Different photographs of 1024 × 683 pixels, so that nothing is cached."""
    source = Image.open(io.BytesIO((SAMPLES / "coffee.jpg").read_bytes())).resize((1024, 683))
    for number in range(count):
        buffer = io.BytesIO()
        ImageEnhance.Brightness(source).enhance(0.7 + 0.6 * number / count).save(buffer, "JPEG", quality=80)
        yield buffer.getvalue()


@contextmanager
def server(models: list[str], *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """``vitrail serve`` on a free port: its URL and process."""
    options += tuple(part for name in models for part in ("--model", name))
    command = [sys.executable, "-m", "vitrail.cli.program", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        try:
            yield line[line.index("http://") :].strip().rstrip("/"), process
        finally:
            process.terminate()


def first_heatmap(url: str, photograph: bytes) -> float:
    """Like the page after a drop: predicts, then explains the most probable class."""
    with httpx.Client(base_url=url, timeout=60) as client:
        begin = time.perf_counter()
        prediction = client.post("/api/predict", files={"image": photograph}).raise_for_status().json()
        fields = {"picture": prediction["picture"], "target": str(prediction["classes"][0]["index"])}
        client.post("/api/explain", files=form(fields)).raise_for_status().json()
        return time.perf_counter() - begin


async def crowd(
    url: str, pid: int, clients: int, seconds: float, pictures: list[bytes]
) -> tuple[Observations, list[tuple[str, list[int]]]]:
    """Runs all clients for so many seconds; memory is measured four times."""
    observations, until = Observations(), time.monotonic() + seconds
    tasks = [asyncio.create_task(Client(url, number, observations, pictures).run(until)) for number in range(clients)]
    memory = []
    for name, share in (("the beginning", 0.0), ("a quarter", 0.25), ("the middle", 0.5), ("the end", 1.0)):
        await asyncio.sleep(max(0.0, until - seconds * (1 - share) - time.monotonic()))
        memory.append((name, [resident(process) for process in family(pid)]))
    await asyncio.gather(*tasks)
    return observations, memory


class Client:
    """Sends random requests, one after another."""

    def __init__(self, url: str, number: int, observations: Observations, pictures: list[bytes]) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=60)
        self.draw, self.observations, self.pictures = random.Random(number), observations, pictures

    async def run(self, until: float) -> None:
        acts = (self.drop, self.explain, self.mask, self.score, self.compare, self.invalid, self.disconnect)
        async with self.http:
            while time.monotonic() < until:
                (act,) = self.draw.choices(acts, weights=(6, 6, 6, 2, 1, 1, 1))
                try:
                    await self.models()
                    await act()
                except httpx.TransportError as error:
                    self.observations.broken[f"{act.__name__}: {type(error).__name__}"] += 1

    async def models(self) -> None:
        begin = time.perf_counter()
        answer = await self.http.get("/api/models")
        self.observations.models.append(time.perf_counter() - begin)
        await self.note("models", answer)

    async def note(self, what: str, answer: httpx.Response) -> None:
        self.observations.statuses[f"{what} {answer.status_code}"] += 1
        if answer.status_code == 429:
            await asyncio.sleep(min(MAX_PAUSE, float(answer.headers["retry-after"])))

    async def post(self, what: str, fields: dict[str, str]) -> httpx.Response:
        form_fields = {"sample": self.draw.choice(("cat", "coffee", "rocket")), **fields}
        answer = await self.http.post(f"/api/{what}", files=form(form_fields))
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

    async def invalid(self) -> None:
        answer = await self.http.post("/api/predict", files={"image": self.draw.randbytes(5000)})
        await self.note("invalid", answer)

    async def disconnect(self) -> None:
        fields = {"sample": "cat", "method": "rise", "params": json.dumps({"seed": self.draw.randrange(10**9)})}
        try:
            answer = await self.http.post("/api/explain", files=form(fields), timeout=httpx.Timeout(60, read=0.5))
            await self.note("left", answer)
        except httpx.ReadTimeout:
            self.observations.statuses["left early"] += 1


def form(fields: dict[str, str]) -> dict[str, Any]:
    return {name: (None, value) for name, value in fields.items()}


def family(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(observations: Observations, memory: list[tuple[str, list[int]]], clients: int, seconds: float) -> None:
    times = sorted(observations.models)
    quantiles = {name: times[min(len(times) - 1, int(share * len(times)))] * 1000
            for name, share in (("p50", 0.5), ("p95", 0.95), ("max", 1.0))}  # fmt: skip
    print(f"{clients} clients, {seconds:g} s: {sum(observations.statuses.values())} requests")
    print(f"/api/models ({len(times)}): " + ", ".join(f"{name} {value:.0f} ms" for name, value in quantiles.items()))
    print("answers: " + ", ".join(f"{name} × {count}" for name, count in sorted(observations.statuses.items())))
    print("broken connections: " + (", ".join(f"{n} × {c}" for n, c in observations.broken.items()) or "none"))
    for name, parts in memory:
        each = " + ".join(f"{part / 2**20:.0f}" for part in parts)
        print(f"memory at {name}: {sum(parts) / 2**20:.0f} MiB ({each})")


if __name__ == "__main__":
    main()
