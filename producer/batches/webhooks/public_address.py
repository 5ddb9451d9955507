"""Which addresses a webhook may have: public ones, whatever way they are written.

An IPv6 address may embed an IPv4 address that a translator or tunnel of the network unpacks. Then
the embedded address decides: ``64:ff9b::7f00:1`` is 127.0.0.1 to a NAT64 gateway.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

__all__ = ["is_public"]

_UNICAST = IPv6Network("2000::/3")
"""All that is assigned to the public internet, but for NAT64."""

_NAT64 = IPv6Network("64:ff9b::/96")
_DOCUMENTATION = IPv6Network("3fff::/20")
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})
_LOW_32_BITS = 0xFFFF_FFFF


def is_public(address: str) -> bool:
    """Whether an address, as the resolver gives it, belongs to the public internet."""
    parsed = ip_address(address.partition("%")[0])
    if isinstance(parsed, IPv6Address):
        if parsed.ipv4_mapped is None:
            return _is_public_v6(parsed)
        parsed = parsed.ipv4_mapped
    return _is_public_v4(parsed)


def _is_public_v4(address: IPv4Address) -> bool:
    return address.is_global and not address.is_multicast and not address.is_reserved


def _is_public_v6(address: IPv6Address) -> bool:
    if address in _NAT64:
        return _is_public_v4(_low_v4(address))
    if address not in _UNICAST or address in _DOCUMENTATION or not address.is_global:
        return False
    if address.teredo is not None:  # a relay would send the call on to the address inside
        return False
    if address.sixtofour is not None and not _is_public_v4(address.sixtofour):
        return False
    return not _is_isatap(address) or _is_public_v4(_low_v4(address))


def _is_isatap(address: IPv6Address) -> bool:
    return int(address) >> 32 & _LOW_32_BITS in _ISATAP


def _low_v4(address: IPv6Address) -> IPv4Address:
    return IPv4Address(int(address) & _LOW_32_BITS)
