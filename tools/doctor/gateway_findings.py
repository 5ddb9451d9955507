"""Who may use the gateway: its address and its API keys."""

from __future__ import annotations

from redis.exceptions import ResponseError

from penstock.producer.gateway.access.addresses import is_loopback
from penstock.shared.errors import RedisUnavailable
from penstock.shared.keys import GatewayKeys

from .findings import Finding, Level
from .redis_probe import RedisProbe

__all__ = ["look_at_api_keys"]


async def look_at_api_keys(probe: RedisProbe, host: str) -> Finding | None:
    """How many API keys there are; None where no gateway needs any, or this user cannot look.

    Args:
        probe: the server.
        host: the setting ``gateway.host``.
    """
    try:
        (count,) = await probe.commands(("HLEN", GatewayKeys().index))
    except RedisUnavailable:  # in a cluster, perhaps a slot that nobody serves
        return None
    if isinstance(count, ResponseError):
        return None
    if count:
        return Finding("api_keys", Level.OK, f"{count}, revoked ones included")
    if is_loopback(host):
        return None
    return Finding(
        "api_keys",
        Level.ERROR,
        f"none, and gateway.host is {host}",
        "the gateway does not start: anybody who reaches it could use everything",
        "`penstock keys create --tenant NAME`, or a loopback address",
    )
