"""Which addresses are this machine."""

from __future__ import annotations

import ipaddress
import socket

# Reserved for documentation: nothing is there, and a datagram socket that is connected sends nothing.
FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def is_loopback(host: str) -> bool:
    """localhost, 127.0.0.0/8 and ::1: only this machine can ask there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_every_address(host: str) -> bool:
    """0.0.0.0 and ::, which can be listened on but not opened."""
    return ipaddress.ip_address(host).is_unspecified


def own_address(family: int) -> str:
    """Where others in the network find this machine: the address it would call them from, else its name."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as line:
            line.connect((FAR[socket.AddressFamily(family)], 9))
            return str(line.getsockname()[0])
    except OSError:  # no network
        return socket.gethostname()
