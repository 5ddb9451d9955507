"""Who can reach an address."""

from __future__ import annotations

import ipaddress

__all__ = ["is_loopback", "names_loopback"]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def names_loopback(header: str) -> bool:
    """Whether a ``Host`` header, with or without a port, names this machine."""
    if header.startswith("["):
        address, _, port = header[1:].partition("]")
        return is_loopback(address) and port[:1] in ("", ":")
    return is_loopback(header.partition(":")[0].lower())
