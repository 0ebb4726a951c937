"""A run folder: append-only parts, each written atomically; damaged parts are skipped."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitrail.bench.folders import Place, is_remote, open_folder
from vitrail.bench.plan import Plan
from vitrail.calls import split_call
from vitrail.errors import VitrailError
from vitrail.files import parse_json
from vitrail.models.view import View
from vitrail.plugins import plugin_versions
from vitrail.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

PLAN, ENVIRONMENT = "plan.toml", "environment.json"
SUFFIXES = {"rows": "parquet", "maps": "safetensors", "pictures": "parquet"}
DAMAGED = ".damaged"  # suffix of a part that was set aside
REQUIRED = ["key", "time", "method", "error"]  # columns that identify a row
NAME = re.compile(r"part-\d+-([0-9a-f]{16})\.\w+")  # with a digest of the content; names of older parts have none

T = TypeVar("T")


def schema() -> pa.Schema:
    """The columns of ``rows``."""
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    return pa.schema([
        ("key", text), ("model", text), ("model_hash", text), ("data", text), ("image", text), ("image_hash", text),
        ("method", text), ("params", text), ("metric", text), ("value", number), ("target", pa.int64()),
        ("explained", text), ("label", pa.int64()), ("curve", pa.list_(number)), ("parts", pa.list_(number)),
        ("ties", number), ("seconds", number), ("memory", pa.int64()), ("error", text),
        ("time", pa.timestamp("us", tz="UTC")), ("scale", pa.list_(number)),
    ])  # fmt: skip


@dataclass
class Buffer:
    """Results that are not written yet."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    maps: dict[str, Tensor] = field(default_factory=dict)
    pictures: list[Mapping[str, Any]] = field(default_factory=list)

    def flush(self, store: Store) -> None:
        """Moves everything to a store; rows last, so that their maps and pictures are there.

        If interrupted, the rest stays for the next call; at worst the last part is written twice.
        """
        if self.maps:
            store.add_maps(self.maps)
            self.maps = {}
        if self.pictures:
            store.add_pictures(self.pictures)
            self.pictures = []
        if self.rows:
            store.add_rows(self.rows)
            self.rows = []


class Store:
    """The results of a run; any number of processes may read, one writes at a time, or one per shard."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder if is_remote(folder) else Path(folder)
        self.files = open_folder(folder)
        self.damaged: dict[str, str] = {}  # skipped parts → reason
        self._number = 0  # of the last part

    @contextmanager
    def locked(self, shard: str | None = None) -> Iterator[None]:
        """Locks the run for this process, however it ends.

        Shards of a run exclude equal ones and whole runs, but not each other: every part has a name of its own.
        """
        with self.files.locked(shard):
            for kind in SUFFIXES if shard is None else ():
                self.files.tidy(kind)
            self._set_damaged_aside()
            yield

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return PLAN in self.files.names()

    @property
    def has_rows(self) -> bool:
        return bool(self._parts("rows"))

    def plan(self) -> Plan:
        name = f"{self.files}/{PLAN}"
        try:
            return Plan.parse(self.files.read(PLAN), name)
        except FileNotFoundError:
            raise VitrailError(f"cannot read the plan {name}: {os.strerror(errno.ENOENT)}.") from None

    def environment(self) -> dict[str, Any]:
        """Versions and device of the run; empty if not recorded, or damaged."""
        try:
            about = parse_json(self.files.read(ENVIRONMENT))
        except FileNotFoundError:
            return {}
        except (VitrailError, ValueError) as error:
            reason = str(error).rstrip(".")
            warnings.warn(f"{self.files}/{ENVIRONMENT} is skipped because it cannot be read: {reason}.", stacklevel=2)
            return {}
        return about if isinstance(about, dict) else {}

    def begin(self, plan: Plan, about: Mapping[str, Any]) -> None:
        """Records the plan and the environment (see ``environment``)."""
        self.files.write(PLAN, plan.content())
        earlier, parts = self.environment(), ("preprocessing", "models", "commits")
        by_model = {name: _table(earlier.get(name)) | _table(about.get(name)) for name in parts}
        self.files.write(ENVIRONMENT, json.dumps({**about, **by_model}, indent=1).encode())

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a part, all of its rows or none."""
        import pyarrow as pa

        columns = schema()
        table = pa.Table.from_pylist([{name: row.get(name) for name in columns.names} for row in rows], columns)
        self._add("rows", _as_parquet(table))

    def add_maps(self, maps: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        half = {name: values.detach().to("cpu", torch.float16).contiguous() for name, values in maps.items()}
        self._add("maps", save(half))

    def add_pictures(self, pictures: Sequence[Mapping[str, Any]]) -> None:
        import pyarrow as pa

        self._add("pictures", _as_parquet(pa.Table.from_pylist(list(pictures))))

    def rows(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """All rows, part by part in the order of writing; of equal keys the last. A damaged part is skipped with a
        warning.

        A row without method and error marks an image as readable again: it removes the earlier error and itself.
        """
        import pandas as pd
        import pyarrow as pa

        selected = None if columns is None else list(dict.fromkeys([*columns, *REQUIRED]))
        none = schema().empty_table().select(selected or schema().names)  # parts of an older version may lack a column
        tables = [none, *self._read("rows", lambda content: _rows(content, selected))]
        table = pa.concat_tables(tables, promote_options="default")
        frame = table.to_pandas(timestamp_as_object=False)
        assert isinstance(frame, pd.DataFrame)
        last = frame.drop_duplicates("key", keep="last")
        return last[(last["method"] != "") | last["error"].notna()].reset_index(drop=True)

    def done(self, maps: bool = False) -> dict[str, str | None]:
        """Key → error (None where the row has a value) of all rows.

        Args:
            maps: if maps or pictures were set aside as damaged, leave out rows that lack theirs.
        """
        rows = self.rows(["model", "image", "params", "explained"])
        errors = [error if isinstance(error, str) else None for error in rows["error"]]
        known = dict(zip(rows["key"], errors, strict=True))
        if maps and self._lacks("maps"):
            stored = {_map_key(name) for part in self.map_parts() for name in part}
            columns = ("key", "model", "image", "method", "params", "explained")
            names = zip(*(rows[column] for column in columns), strict=True)
            with_map = {key for key, model, image, *rest in names if (f"{model}|{image}", *rest) in stored}
            known = {key: error for key, error in known.items() if error is not None or key in with_map}
        if maps and self._lacks("pictures"):
            pictures = self.pictures()
            pairs = set(zip(pictures["model"], pictures["image"], strict=True))
            images = zip(rows["key"], rows["model"], rows["image"], strict=True)
            with_picture = {key for key, *pair in images if tuple(pair) in pairs}
            known = {key: error for key, error in known.items() if error is not None or key in with_picture}
        return known

    def maps(self) -> dict[str, np.ndarray[Any, Any]]:
        """Maps by name: model|image|method|explained class."""
        return {name: values for part in self.map_parts() for name, values in part.items()}

    def map_parts(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """The same, part by part: all maps may not fit in memory."""
        return self._read("maps", _maps)

    def pictures(self) -> pd.DataFrame:
        import pandas as pd

        parts = list(self._read("pictures", _pictures))
        pictures = pd.concat(parts) if parts else pd.DataFrame(columns=["model", "image"])
        return pictures.drop_duplicates(["model", "image"], keep="last").reset_index(drop=True)

    def _lacks(self, kind: str) -> bool:
        """Whether parts of a kind were set aside."""
        return any(name.endswith(DAMAGED) for name in self.files.names(kind))

    def _add(self, kind: str, content: bytes) -> None:
        """Writes a part, whose name is later than those of all parts that this process has seen.

        Names decide which of two equal rows is the last, and the clock of a machine may go back.
        """
        if not self._number:
            names = [name for known in SUFFIXES for name in self._parts(known)[-1:]]
            self._number = max((int(number[0]) for name in names if (number := re.search(r"\d+", name))), default=0)
        self._number = max(time.time_ns(), self._number + 1)
        self.files.write(f"{kind}/part-{self._number:020d}-{_digest(content)}.{SUFFIXES[kind]}", content)

    def _parts(self, kind: str) -> list[str]:
        return [name for name in self.files.names(kind) if fnmatch(name, f"part-*.{SUFFIXES[kind]}")]

    def _read(self, kind: str, parse: Callable[[bytes], T]) -> Iterator[T]:
        """The content of the undamaged parts of a kind."""
        for name in self._parts(kind):
            with suppress(DamagedError, FileNotFoundError):  # or the writing process has just set it aside
                yield self._read_part(f"{kind}/{name}", parse)

    def _set_damaged_aside(self) -> None:
        """Renames every damaged part, so that its rows are measured again."""
        for kind, parse in (("rows", _rows), ("maps", _maps), ("pictures", _pictures)):
            for part in self._parts(kind):
                try:
                    self._read_part(f"{kind}/{part}", parse)
                except DamagedError:
                    self.files.rename(f"{kind}/{part}", f"{kind}/{part}{DAMAGED}")  # unless another shard was faster
                except FileNotFoundError:
                    pass

    def _read_part(self, name: str, parse: Callable[[bytes], T]) -> T:
        content, part = self.files.read(name), name.rpartition("/")[2]
        try:
            digest = NAME.fullmatch(part)
            if digest is not None and digest[1] != _digest(content):
                raise ValueError("its checksum does not match")
            return parse(content)
        except MemoryError:
            raise
        except Exception as error:  # pyarrow and safetensors raise almost anything
            reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            self.damaged[name] = reason
            warnings.warn(
                f"{self.files}/{name} is damaged ({reason}) and skipped: vitrail bench renames it to {part}{DAMAGED} "
                "and measures its rows again.",
                stacklevel=2,
            )
            raise DamagedError from error


def _table(value: Any) -> dict[str, Any]:
    """A part of the environment by model; empty where an older version did not write it, or where it is damaged."""
    return dict(value) if isinstance(value, Mapping) else {}


class DamagedError(Exception):
    """A part whose content is not what was written."""


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _as_parquet(table: pa.Table) -> bytes:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _rows(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content), columns=columns)
    missing = [name for name in REQUIRED if name not in table.column_names]
    if missing:
        raise ValueError(f"no column {missing[0]}")
    known = schema()
    fields = [known.field(column.name) if column.name in known.names else column for column in table.schema]
    return table.cast(pa.schema(fields)).sort_by("time")


def _maps(content: bytes) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load

    return load(content)


def _pictures(content: bytes) -> pd.DataFrame:
    import pandas as pd

    pictures = pd.read_parquet(io.BytesIO(content))
    if not {"model", "image", "jpeg"} <= set(pictures.columns):
        raise ValueError("no pictures of images")
    return pictures


def _map_key(name: str) -> tuple[str, ...]:
    """The name of a map as in its rows: model and image, method, parameters, explained class."""
    image, call, explained = name.rsplit("|", 2)
    method, params = split_call(call)
    return image, method, json.dumps(params, sort_keys=True), explained


def environment(view: View) -> dict[str, Any]:
    """Versions, device and git state; of the model: preprocessing, fingerprint, precisions and commit on the hub."""
    versions = {}
    for name in ("torch", "torchvision", "timm", "captum", "numpy", "scipy", "torchmetrics", "transformers", "ray"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    gpu = torch.cuda.get_device_name(view.device) if view.device.type == "cuda" else None
    return {
        "vitrail": __version__,
        "python": platform.python_version(),
        "versions": versions,
        "plugins": plugin_versions(),
        "device": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "platform": platform.platform(),
        "git": _git(),
        "started": datetime.now(UTC).isoformat(),
        "preprocessing": {view.name: view.preprocessing.to_dict()},
        "models": {
            view.name: {
                "fingerprint": view.fingerprint(),
                "precision": str(view.dtype).removeprefix("torch."),
                "half_precision": "float16" if view.gains_from_half else "bfloat16" if view.gains_from_bf16 else None,
            }
        },
        "commits": {} if view.commit is None else {view.name: view.commit},
    }


def _git() -> dict[str, Any] | None:
    """Commit and whether the tree is dirty, if vitrail runs from a checkout."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not git("ls-files", "--error-unmatch", __file__):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
