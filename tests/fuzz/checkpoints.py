"""Checkpoints: safetensors with a wrong header, torch files with damaged records; none may run code."""

from __future__ import annotations

import functools
import io
import json
import random
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from tests import families
from tests.fuzz.harness import Input, Use
from tests.fuzz.mutation import VALUES, altered, damaged

import vitrail

TINY = {"img_size": 32, "patch_size": 16, "embed_dim": 8, "depth": 1, "num_heads": 2, "mlp_ratio": 1.0}
DTYPES = ("F32", "F64", "F16", "BF16", "I8", "U8", "I64", "BOOL", "F8_E4M3", "X", "")
VARIANTS = (*VALUES, *DTYPES, [0, 4], [4, 0], [0, 2**62], [2**33, 2**33], [1] * 70)


@contextmanager
def target(place: Path) -> Iterator[Use]:
    def use(path: Path, out: Path) -> None:
        view = vitrail.load("vit_tiny_patch16_224", checkpoint=path, device="cpu", **TINY)
        assert all(parameter.isfinite().all() for parameter in view.module.parameters())

    yield use


@functools.cache
def state() -> dict[str, torch.Tensor]:
    import timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = timm.create_model("vit_tiny_patch16_224", pretrained=False, num_classes=families.CLASSES, **TINY)
    return module.state_dict()


@functools.cache
def stored(kind: str) -> bytes:
    if kind == "safetensors":
        return safetensors.torch.save(state())
    buffer = io.BytesIO()
    values = {"plain": state(), "wrapped": {"state_dict": state(), "epoch": 3}}.get(kind, state())
    torch.save(values, buffer, _use_new_zipfile_serialization=kind != "legacy")
    return buffer.getvalue()


def generate(draw: random.Random) -> Input:
    kind = draw.choice(("header", "header", "safetensors", "plain", "wrapped", "legacy", "record", "record"))
    if kind == "header":
        return Input("weights.safetensors", with_header(draw))
    if kind == "record":
        return Input(draw.choice(("weights.pth", "weights.bin")), with_record(draw))
    suffix = ".safetensors" if kind == "safetensors" else draw.choice((".pth", ".pt", ".bin", ".safetensors"))
    return Input(f"weights{suffix}", damaged(stored(kind), draw))


def with_header(draw: random.Random) -> bytes:
    """A safetensors file whose header says something else, with its length right or wrong."""
    data = stored("safetensors")
    (length,) = struct.unpack_from("<Q", data)
    header = json.dumps(altered(json.loads(data[8 : 8 + length]), draw, VARIANTS)).encode("utf-8", "surrogatepass")
    stated = draw.choice((len(header), len(header), len(header), 0, 2**40, 2**64 - 1, len(header) + 1))
    return struct.pack("<Q", stated) + header + data[8 + length :]


def with_record(draw: random.Random) -> bytes:
    """A torch file with one record damaged, whose checksum is right, so that the unpickler sees it."""
    buffer, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(stored("plain")))
    names = source.namelist()
    chosen = draw.choice([name for name in names if name.endswith("data.pkl")] * len(names) + names)
    with zipfile.ZipFile(
        buffer, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    ) as zipped:
        for name in names:
            content = source.read(name)
            if name == chosen and draw.random() < 0.1:
                continue
            renamed = (
                draw.choice(("../../evil", "archive/../x", name)) if name == chosen and draw.random() < 0.1 else name
            )
            zipped.writestr(renamed, damaged(content, draw) if name == chosen else content)
    return buffer.getvalue()
