"""What the server may use: addresses, times, bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 2**20


def spare_cores() -> int:
    """All cores but one, which is the web server's."""
    return max(1, (os.cpu_count() or 2) - 1)


@dataclass(frozen=True)
class Settings:
    """Limits of one server. ``cache_bytes`` is for uploads (a quarter), answers (a quarter), pictures (half)."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    queue: int = 16  # jobs that may wait, of each of the two kinds (quick and long)
    job_seconds: float = 120.0
    stop_seconds: float = 2.0  # a cancelled job that goes on for longer is ended with its process
    threads: int = field(default_factory=spare_cores)
    upload_bytes: int = 20 * MIB
    receiving_bytes: int = 160 * MIB  # of all uploads that are on their way at one time
    body_seconds: float = 60.0  # for one upload to arrive
    max_pixels: int = 40_000_000
    decode_seconds: float = 10.0
    decode_bytes: int = 2048 * MIB  # address space of the process that decodes
    cache_bytes: int = 256 * MIB
    work_bytes: int = 4096 * MIB  # what the computing process may hold beyond its models
    load_options: Mapping[str, Any] = field(default_factory=dict)  # of vitrail.load, for the only model

    @property
    def body_bytes(self) -> int:
        """An upload and the fields around it."""
        return self.upload_bytes + MIB
