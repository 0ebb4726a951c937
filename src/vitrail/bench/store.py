"""A run folder: append-only parts, each written completely or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from vitrail.bench.plan import Plan
from vitrail.errors import VitrailError
from vitrail.files import save_atomically
from vitrail.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

LOCK = ".lock"


def schema() -> pa.Schema:
    """The columns of ``rows``."""
    import pyarrow as pa

    text, number = pa.string(), pa.float64()
    return pa.schema([
        ("key", text), ("model", text), ("model_hash", text), ("data", text), ("image", text), ("image_hash", text),
        ("method", text), ("params", text), ("metric", text), ("value", number), ("target", pa.int64()),
        ("explained", text), ("label", pa.int64()), ("curve", pa.list_(number)), ("parts", pa.list_(number)),
        ("ties", number), ("seconds", number), ("memory", pa.int64()), ("error", text),
        ("time", pa.timestamp("us", tz="UTC")),
    ])  # fmt: skip


class Keeper(Protocol):
    """Who takes what a run found."""

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def add_maps(self, maps: Mapping[str, Tensor]) -> None: ...
    def add_pictures(self, pictures: Sequence[Mapping[str, Any]]) -> None: ...


def _claimed(file: IO[str]) -> bool:
    """Whether the lock is ours; a process that was just killed may leave a child that holds it for a moment."""
    for pause in (0, 0.1, 0.3, 0.6):
        time.sleep(pause)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


class Store:
    """The results of a run. Any number may read; one writes at a time (see ``locked``)."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from this run; the system lets go of the lock however this process ends."""
        made = not self.folder.exists()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = open(self.folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise VitrailError(f"cannot write into the run folder {self.folder}: {error.strerror or error}.") from None
        with file:
            if not _claimed(file):
                file.seek(0)
                who = file.read().strip() or "another process"
                raise VitrailError(
                    f"{self.folder} is being worked on by {who}: wait for it, or watch it with vitrail bench --watch "
                    f"{self.folder}."
                )
            with suppress(OSError):  # a full disk: who has the lock is only for others to read
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
            try:
                yield
            except BaseException:
                if made and [path.name for path in self.folder.iterdir()] == [LOCK]:  # the run never began
                    (self.folder / LOCK).unlink()
                    self.folder.rmdir()
                raise

    def plan(self) -> Plan:
        return Plan.read(self.folder / "plan.toml")

    def environment(self) -> dict[str, Any]:
        path = self.folder / "environment.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def begin(self, plan: Plan, about: Mapping[str, Any]) -> None:
        """Notes the plan, and where and with what it runs (see ``environment``)."""
        plan.write(self.folder / "plan.toml")
        text = json.dumps(about, indent=1).encode()
        save_atomically(self.folder / "environment.json", lambda file: file.write(text))

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a part; all of its rows or none."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = schema()
        table = pa.Table.from_pylist([{name: row.get(name) for name in columns.names} for row in rows], columns)
        save_atomically(self._part("rows", "parquet"), lambda file: pq.write_table(table, file))

    def add_maps(self, maps: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        content = save({name: one.detach().to("cpu", torch.float16).contiguous() for name, one in maps.items()})
        save_atomically(self._part("maps", "safetensors"), lambda file: file.write(content))

    def add_pictures(self, pictures: Sequence[Mapping[str, Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist(list(pictures))
        save_atomically(self._part("pictures", "parquet"), lambda file: pq.write_table(table, file))

    def rows(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """All rows; of a key that is there twice the last.

        A row without method and error says that an image can be read again: it takes away the error, and itself.
        """
        import pandas as pd
        import pyarrow as pa
        import pyarrow.parquet as pq

        wanted = None if columns is None else list(dict.fromkeys([*columns, "key", "time", "method", "error"]))
        tables = [pq.read_table(path, columns=wanted) for path in self._parts("rows", "parquet")]
        tables = tables or [schema().empty_table().select(wanted or schema().names)]
        whole = pa.concat_tables(tables, promote_options="default")  # parts of an older version may lack a column
        frame = whole.to_pandas(timestamp_as_object=False)
        assert isinstance(frame, pd.DataFrame)
        last = frame.sort_values("time", kind="stable").drop_duplicates("key", keep="last")
        return last[(last["method"] != "") | last["error"].notna()].reset_index(drop=True)

    def done(self) -> dict[str, str | None]:
        """The keys of all rows, and of those that failed why."""
        rows = self.rows([])
        failed = rows["error"].notna()
        return {
            **dict.fromkeys(rows["key"][~failed]),
            **dict(zip(rows["key"][failed], rows["error"][failed], strict=True)),
        }

    def maps(self) -> dict[str, np.ndarray[Any, Any]]:
        from safetensors.numpy import load_file

        found: dict[str, np.ndarray[Any, Any]] = {}
        for path in self._parts("maps", "safetensors"):
            found |= load_file(path)
        return found

    def pictures(self) -> pd.DataFrame:
        import pandas as pd

        parts = [pd.read_parquet(path) for path in self._parts("pictures", "parquet")]
        whole = pd.concat(parts) if parts else pd.DataFrame(columns=["model", "image"])
        return whole.drop_duplicates(["model", "image"], keep="last").reset_index(drop=True)

    def _part(self, kind: str, suffix: str) -> Path:
        return self.folder / kind / f"part-{time.time_ns():020d}-{uuid4().hex[:8]}.{suffix}"

    def _parts(self, kind: str, suffix: str) -> list[Path]:
        return sorted((self.folder / kind).glob(f"part-*.{suffix}"))


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and state of the code."""
    names = ("torch", "torchvision", "timm", "captum", "numpy", "scipy", "torchmetrics", "transformers", "ray")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "vitrail": __version__,
        "python": platform.python_version(),
        "versions": versions,
        "device": gpu or f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "platform": platform.platform(),
        "git": _git(),
        "started": datetime.now(UTC).isoformat(),
    }


def _git() -> dict[str, Any] | None:
    """Commit and whether anything is changed, where vitrail runs from a checkout."""
    where = Path(__file__).parent

    def ask(*words: str) -> str:
        command = ["git", "-C", str(where), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if not ask("ls-files", "--error-unmatch", __file__):
            return None
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
