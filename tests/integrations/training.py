"""What the tests of training loops share: images, and what must not change about a model and the random numbers."""

from __future__ import annotations

import io
import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.common import noise
from torch import nn


def image_files(folder: Path, count: int = 2) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(count)]
    for seed, path in enumerate(paths):
        noise(32, 32, seed).save(path)
    return paths


def state_of(module: nn.Module) -> dict[str, Any]:
    """Everything about a module and the process that a panel must leave alone."""
    parts = dict(module.named_modules())
    return {
        "modes": {name: part.training for name, part in parts.items()},
        "hooks": {name: (len(part._forward_hooks), len(part._forward_pre_hooks)) for name, part in parts.items()},
        "attributes": {name: sorted(vars(part)) for name, part in parts.items()},
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        "trained": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def equal(before: Any, after: Any) -> bool:
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(equal(before[key], after[key]) for key in before)
    if isinstance(before, torch.Tensor):
        return isinstance(after, torch.Tensor) and torch.equal(before, after)
    return bool(before == after)


# What trackers wrote, read back by their own libraries


def events(folder: Path) -> tuple[dict[str, list[tuple[int, Any]]], dict[str, list[tuple[int, float]]]]:
    """The images and the scalars of TensorBoard's event files: (step, pixels or value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    read.Reload()
    images = {
        tag: [(each.step, np.asarray(Image.open(io.BytesIO(each.encoded_image_string)))) for each in read.Images(tag)]
        for tag in read.Tags()["images"]
    }
    scalars = {tag: [(each.step, each.value) for each in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    return images, scalars


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """The rows that an offline run logged."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    wandb.teardown()  # the process that writes the file ends, and has written all of it
    (path,) = folder.rglob("*.wandb")
    rows = []
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                *outer, last = item.nested_key or [item.key]
                (row.setdefault(outer[0], {}) if outer else row)[last] = json.loads(item.value_json)
            rows.append(row)
    return rows


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, as Weights & Biases writes it: parts in blocks of 32 KiB."""
    place, parts = 7, b""  # after a header of the file
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:  # no room for another header in the block
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)  # checksum, length, whole or part
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
