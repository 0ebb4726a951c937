"""How a benchmark run scales with the workers of a cluster, and what its driver has to do for each shard.

Run: python benchmarks/cluster.py [--images 64] [--workers 1,2] [--repeats 2]
Starts a Ray cluster on this machine and measures the same plan with each number of workers into a new folder, from the
first shard that is stored to the last, so that starting Ray and loading models do not count. Then writes shards of the
size of a large run (16 images × 50 methods × 8 metrics with curves) into a folder, as a driver does.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import torch
from timing import seconds

from vitrail.bench import cluster
from vitrail.bench.plan import ModelSpec, Plan
from vitrail.bench.run import Step
from vitrail.bench.store import Buffer, Store

METHODS = ("decompx.skipplus", "gen_att", "tis(masks=256)", "random")
METRICS = ("insertion(steps=32)", "deletion(steps=32)", "sparseness")
CURVES = (225, 225, 21, 21, 11, 11, 0, 0)  # points of the curves of eight metrics
SHARD_IMAGES, SHARD_METHODS = 16, 50
PICTURE = 9_000  # bytes of a thumbnail


def shard() -> Buffer:
    """The results of a shard of a large run."""
    rows, maps = [], {}
    for image, method in product(range(SHARD_IMAGES), range(SHARD_METHODS)):
        name = f"n01440764/ILSVRC2012_val_{image:08d}.JPEG"
        maps[f"vit_base_patch16_224|{name}|method_{method}|predicted"] = torch.rand(14, 14).half()
        rows += [
            {
                "key": f"{image:08x}{method:08x}{metric:016x}", "model": "vit_base_patch16_224", "model_hash": "0" * 32,
                "data": "imagenet:/data/imagenet", "image": name, "image_hash": f"{image:032x}", "params": "{}",
                "method": f"method_{method}", "metric": f"metric_{metric}", "value": 0.5, "target": 7, "label": 7,
                "explained": "predicted", "curve": torch.rand(points).tolist() or None, "seconds": 0.1, "memory": 1,
                "time": datetime.now(UTC),
            }
            for metric, points in enumerate(CURVES)
        ]  # fmt: skip
    jpeg = torch.randint(256, (PICTURE,)).byte().numpy().tobytes()
    pictures = [{"image": str(image), "model": "vit_base_patch16_224", "jpeg": jpeg} for image in range(SHARD_IMAGES)]
    return Buffer(rows, maps, pictures)


def measure_driver(repeats: int) -> None:
    """Prints what a driver receives and writes for a shard."""
    content = pickle.dumps(shard())
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "run")
        spent = min(seconds(lambda: pickle.loads(content).flush(store)) for _ in range(repeats))
        written = sum(path.stat().st_size for path in Path(folder).rglob("part-*")) / repeats
    rows = SHARD_IMAGES * SHARD_METHODS * len(CURVES)
    sizes = f"{len(content) / 1e6:.1f} MB on the way and {written / 1e6:.1f} MB on the disk"
    print(f"driver: a shard of {rows} rows is {sizes}, and takes {spent:.2f} s to receive and write")


def measure_workers(workers: int, images: int) -> float:
    """Images a second, from the first shard that is stored to the last."""
    plan = Plan([ModelSpec("scenes", {"device": "cpu"})], f"scenes:{images}", METHODS, METRICS, images=images)
    steps: list[tuple[float, int]] = []

    def watch(step: Step) -> None:
        steps.append((time.perf_counter(), step.done))

    with tempfile.TemporaryDirectory() as folder:
        cluster.run_on_cluster(plan, Path(folder) / "run", "local", watch=watch, workers=workers)
    (first, before), (last, after) = steps[min(workers, len(steps)) - 1], steps[-1]
    return (after - before) / (last - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    measure_driver(max(3, options.repeats))
    cluster.SHARD = 4
    counts = [int(count) for count in options.workers.split(",")]
    rates = {count: max(measure_workers(count, options.images) for _ in range(options.repeats)) for count in counts}
    for count, rate in rates.items():
        print(f"{count} workers: {rate:.2f} images a second, {rate / rates[counts[0]]:.2f} × {counts[0]} workers")


if __name__ == "__main__":
    main()
