"""Settings of the server: addresses, timeouts, sizes."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 2**20

# Addresses reserved for documentation: nobody has them, and connecting a datagram socket sends nothing.
REMOTE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def spare_cores() -> int:
    """All cores but one, which is left to the web server."""
    return max(1, (os.cpu_count() or 2) - 1)


@dataclass(frozen=True)
class Settings:
    """Limits of a server; ``cache_bytes`` is split into uploads (1/4), answers and results (1/4) and pixels (1/2)."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    queue: int = 16  # maximum number of waiting jobs, for quick and long jobs each
    job_seconds: float = 120.0
    stop_seconds: float = 15.0  # after which the process of a cancelled job is killed; a new one loads its models again
    threads: int = field(default_factory=spare_cores)
    upload_bytes: int = 20 * MIB
    receiving_bytes: int = 160 * MIB  # of all uploads in transit
    body_seconds: float = 60.0  # for a request body to arrive
    max_pixels: int = 40_000_000
    decode_seconds: float = 10.0
    decode_bytes: int = 2048 * MIB  # address space of the decoding process
    cache_bytes: int = 256 * MIB
    work_bytes: int = 4096 * MIB  # memory of the worker beyond its models
    load_options: Mapping[str, Any] = field(default_factory=dict)  # of vitrail.load, for a single model
    plugins: tuple[Path, ...] = ()  # Python files with methods and metrics of users

    @property
    def body_bytes(self) -> int:
        """An upload and the fields around it."""
        return self.upload_bytes + MIB


def is_loopback(host: str) -> bool:
    """localhost, 127.0.0.0/8 and ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """0.0.0.0 and ::, which a server can listen on but no browser can open."""
    return ipaddress.ip_address(host).is_unspecified


def network_address(family: int) -> str:
    """The address at which the network reaches this machine; its host name if there is no network."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((REMOTE[socket.AddressFamily(family)], 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
