"""The tables of docs/cluster.md: what a large run costs on many GPUs, computed from rates that were measured.

Run: python tools/cluster_costs.py
The rates of a GPU are those of docs/cluster.md (one NVIDIA H200), those of the driver are printed by
`python benchmarks/cluster.py`. Replace them by your own.
"""

from __future__ import annotations

import math

IMAGES, METRICS, SHARD = 50_000, 8, 16
WHITE_BOX, PASSES = 46, 4  # methods, forward passes of each
MASKS = {"rise": 4000, "posterior": 256}  # forward passes of an explanation
PER_SECOND = {"tis": 16.0, "vit_cx": 52.0}  # images a second
CURVE_PASSES = 502  # forward passes that the metrics of one map take
BF16, FP32 = 7_800.0, 1_250.0  # forward passes a second
GPUS = (8, 64, 512)

IMAGE_BYTES, WEIGHT_BYTES = 110e3, 346e6  # a photograph; ViT-B/16 in fp32
SHARD_SENT, SHARD_STORED = 5.6e6, 3.3e6  # bytes of a shard of 50 methods
SHARD_SECONDS = 0.17  # of the driver
LOADING = 60.0  # seconds until a worker has its model


def gpu_seconds() -> dict[str, float]:
    """Seconds of one GPU, by part."""
    methods = WHITE_BOX + len(MASKS) + len(PER_SECOND)
    parts = {f"curves of {methods} methods": IMAGES * methods * CURVE_PASSES / BF16}
    parts[f"{WHITE_BOX} white-box methods"] = IMAGES * WHITE_BOX * PASSES / FP32
    parts |= {f"`{name}`": IMAGES / rate for name, rate in PER_SECOND.items()}
    return parts | {f"`{name}`, {masks} masks": IMAGES * masks / BF16 for name, masks in MASKS.items()}


def duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.1f} min"


def main() -> None:
    parts, shards = gpu_seconds(), math.ceil(IMAGES / SHARD)
    total, driver = sum(parts.values()), shards * SHARD_SECONDS
    print("| part | 1 GPU |\n|---|---|")
    for name, seconds in parts.items():
        print(f"| {name} | {duration(seconds)} |")
    print(f"| all | **{duration(total)}** |\n")
    header = ["", *(f"{count} GPUs" for count in GPUS)]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    rounds = {count: math.ceil(shards / count) for count in GPUS}
    busy = {count: LOADING + rounds[count] * total / shards for count in GPUS}
    lines = {
        "work, evenly divided": [duration(total / count) for count in GPUS],
        f"{shards} shards of {duration(total / shards)} in whole rounds, after {LOADING:.0f} s of loading": [
            duration(busy[count]) for count in GPUS
        ],
        "the driver's own work": [duration(driver)] * len(GPUS),
        "**the run**": [f"**{duration(max(busy[count], driver))}**" for count in GPUS],
        "share of the GPUs' time that is used": [
            f"{total / count / max(busy[count], driver):.0%}" for count in GPUS
        ],
        "images read, once": [f"{IMAGES * IMAGE_BYTES / 1e9:.1f} GB"] * len(GPUS),
        "weights read, once per worker": [f"{count * WEIGHT_BYTES / 1e9:.1f} GB" for count in GPUS],
        "results sent to the driver": [f"{shards * SHARD_SENT / 1e9:.1f} GB"] * len(GPUS),
        "at": [f"{shards * SHARD_SENT / max(busy[count], driver) / 1e6:.1f} MB/s" for count in GPUS],
        "results in the run folder": [f"{shards * SHARD_STORED / 1e9:.1f} GB"] * len(GPUS),
    }  # fmt: skip
    for name, cells in lines.items():
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\nThe driver is the bound from {total / driver:.0f} GPUs on.")


if __name__ == "__main__":
    main()
