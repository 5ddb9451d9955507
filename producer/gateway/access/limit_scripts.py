"""The scripts that enforce limits, as typed calls; what each does stands in its header."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from penstock.shared.keys import GatewayKeys
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.replies import accepted
from penstock.shared.scripts.script_header import Value
from penstock.shared.scripts.script_loader import Call, Script, read_script, run_calls

__all__ = ["LimitScripts", "Verdict", "load_limit_script"]

_LEASES_PER_CALL = 256


@cache
def load_limit_script(name: str) -> Script:
    """Read ``lua/<name>.lua`` of this package.

    Raises:
        FileNotFoundError: there is none.
    """
    return read_script(resources.files(__package__) / "lua", name)


class Verdict(NamedTuple):
    """What ``admit`` answered.

    Attributes:
        verdict: ``ok``, ``full``, ``unknown``, ``revoked`` or ``expired``.
        bound: which limit is reached, if one is.
        retry_ms: when there is room again.
        requests: the limit per minute; 0 for none.
        requests_left: what is left of it.
        requests_reset_ms: until all of it is free.
        tokens: as for requests.
        tokens_left: as for requests.
        tokens_reset_ms: as for requests.
        lapsed: how many running requests of the key have a gateway that counts as dead.
    """

    verdict: str
    bound: str
    retry_ms: int
    requests: int
    requests_left: int
    requests_reset_ms: int
    tokens: int
    tokens_left: int
    tokens_reset_ms: int
    lapsed: int


class LimitScripts:
    """Calls the scripts; a call whose reply was lost is repeated, which changes nothing.

    Args:
        client: the connection.
        load: where the scripts come from; tests put altered ones in their place.
    """

    def __init__(
        self, client: RetryingClient, load: Callable[[str], Script] = load_limit_script
    ) -> None:
        self._client = client
        self._load = load
        self._prefix = GatewayKeys.prefix

    async def admit(
        self,
        digest: str,
        key_id: str,
        lease: str,
        *,
        cost: int,
        lease_ms: int,
        charge: bool = True,
    ) -> Verdict:
        """Let a request in, or say which limit is reached.

        Args:
            digest: of the key's secret.
            key_id: the key.
            lease: a name of this request.
            cost: estimated tokens.
            lease_ms: how long it counts as running unless it is renewed.
            charge: False: it joins one that was charged; no limit holds it back, and none is used.

        Raises:
            RedisUnavailable: the server is away or refuses.
        """  # fmt: skip
        (reply,) = await self._run(
            "admit", digest=digest, key_id=key_id, lease=lease, cost=cost, lease_ms=lease_ms,
            charge=int(charge),
        )  # fmt: skip
        return Verdict(reply[0].decode(), reply[1].decode(), *reply[2:])

    async def settle(self, key_id: str, lease: str, *, submitted: bool, used: int) -> bool:
        """Say that a request has ended; whether it was not settled before.

        Raises:
            RedisUnavailable: the server is away or refuses.
        """
        (reply,) = await self._run(
            "settle", key_id=key_id, lease=lease, requests=int(submitted), used=used
        )
        return bool(reply)

    async def claim(self, key_id: str, *, lease_ms: int) -> list[tuple[str, int]]:
        """Take over requests whose gateway counts as dead: their leases, and estimated tokens.

        Raises:
            RedisUnavailable: the server is away or refuses.
        """
        (reply,) = await self._run("claim", key_id=key_id, lease_ms=lease_ms)
        return [(name.decode(), cost) for name, cost in zip(reply[::2], reply[1::2], strict=True)]

    async def renew(self, leases: Mapping[str, Sequence[str]], *, lease_ms: int) -> int:
        """Say that requests still run; how many of them still counted as running.

        Args:
            leases: by key.
            lease_ms: how long they count as running from now on.

        Raises:
            RedisUnavailable: the server is away or refuses.
        """
        script = self._load("renew")
        calls = [
            script.call(
                self._prefix, key_id=key_id, lease_ms=lease_ms,
                leases=names[at : at + _LEASES_PER_CALL],
            )
            for key_id, names in leases.items()
            for at in range(0, len(names), _LEASES_PER_CALL)
        ]  # fmt: skip
        return sum(await self._send("renew", calls))

    async def _run(self, name: str, **values: Value) -> list[Any]:
        return await self._send(name, [self._load(name).call(self._prefix, **values)])

    async def _send(self, name: str, calls: Sequence[Call]) -> list[Any]:
        async def send() -> list[Any]:
            replies = await run_calls(self._client.shared, calls)
            for reply in replies:
                accepted(name, reply)
            return replies

        return await self._client.call(send)
