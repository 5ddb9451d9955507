"""The plain door's operations as typed calls of their Lua scripts; see :mod:`.plain_entry`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..keys import Keys
from ..protocol.field_types import Name
from ..protocol.plain_entry import Admission, Entry, Refusal
from .replies import Bounds, accepted
from .script_loader import Call, Pipelined, Script, load_script, run_commands

__all__ = ["INGRESS_SCRIPTS", "IngressOperations", "IngressPoll", "IngressReply"]

INGRESS_SCRIPTS = ("accept_ingress", "poll_ingress", "refuse_ingress")
"""Names of the plain door's scripts."""

MAX_INGRESS_TENANTS = 1000
"""Workers look at every door once a second."""

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_TENANT_ALLOWED = (
    "1 to 64 characters of A-Z a-z 0-9 _ -, starting with a letter or digit; no dot, because "
    "request ids of the tenant a begin with a. and those of a.b would begin so, too"
)


@dataclass(frozen=True, slots=True)
class IngressPoll:
    """What :meth:`IngressOperations.poll` found.

    Attributes:
        tenants: tenants whose intake streams may be read; None stands for the shared one.
        broken: those that may not: the stream's name is taken by a key of another type, or the
            tenant's name is none for a door.
        entries: entries read before and not acted on.
    """

    tenants: tuple[str | None, ...]
    broken: tuple[str | None, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class IngressReply:
    """What became of an entry.

    Attributes:
        verdict: ``ok``, ``dup``, ``conflict``, ``full``, ``late``, ``broken``, ``refused``, or
            ``gone`` if another worker was first; see the scripts ``accept_ingress`` and
            ``refuse_ingress``.
        id: where its answer is.
    """

    verdict: str
    id: str


class IngressOperations:
    """The plain door of one shard.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``.
        keys: names of the shard.
        retention_ms: how long an answer to a refused entry, and an ended request, is kept.
        bounds: what may wait at the door.
        default_deadline_ms: for entries that bring none, from when they were added.
        load: where the scripts come from; tests put altered ones in their place.
    """

    def __init__(
        self,
        redis: Pipelined,
        keys: Keys,
        *,
        retention_ms: int = 600_000,
        bounds: Bounds | None = None,
        default_deadline_ms: int = 600_000,
        load: Callable[[str], Script] = load_script,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._retention_ms = retention_ms
        self._bounds = bounds or Bounds()
        self._default_deadline_ms = default_deadline_ms
        self._scripts = {name: load(name) for name in INGRESS_SCRIPTS}

    @property
    def keys(self) -> Keys:
        """Names of the shard."""
        return self._keys

    def poll(self, worker_id: str, *, entries: int) -> Call:
        """Look which doors there are, and take over up to so many entries left by others."""
        keys = self._keys
        names = (keys.ingress_tenants, keys.leases, keys.ingress())
        return Call(self._scripts["poll_ingress"], names, (keys.prefix, worker_id, entries))

    @staticmethod
    def read_poll(reply: Any) -> IngressPoll:
        """The typed form of a poll's reply.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("poll_ingress", reply)
        tenants = [_tenant(name) for name in reply[0]]
        doors = tuple(tenant for tenant in tenants if _may_have_ingress(tenant))
        broken = tuple(tenant for tenant in tenants if not _may_have_ingress(tenant))
        found = (Entry(_tenant(tenant), name.decode(), rest) for tenant, name, rest in reply[2])
        return IngressPoll(
            doors,
            broken + tuple(_tenant(name) for name in reply[1]),
            tuple(entry for entry in found if _may_have_ingress(entry.tenant)),
        )

    def resolve(self, entry: Entry, verdict: Admission | Refusal) -> Call:
        """Act on an entry: it becomes a request or gets its answer, and is gone."""
        if isinstance(verdict, Admission):
            return self._accept(entry, verdict)
        return self._refuse(entry, verdict)

    def _accept(self, entry: Entry, admission: Admission) -> Call:
        keys, request, payload = self._keys, admission.request, admission.payload
        lane, bounds = request.lane, self._bounds
        names = (
            keys.ingress(entry.tenant), keys.request(request.id), keys.log(request.id),
            keys.queue(lane, request.tenant), keys.tenants(lane), keys.lanes, keys.floors,
            keys.deadlines, keys.counters, keys.bell, keys.request(entry.own_id),
            keys.log(entry.own_id),
        )  # fmt: skip
        args = (
            keys.prefix, entry.name, request.id, entry.own_id, lane.value, request.tenant, payload,
            hashlib.sha256(payload).digest()[:16], request.cost_estimate,
            request.output_estimate, request.deadline_ms or self._default_deadline_ms,
            request.max_queue_ms or 0, self._retention_ms, request.answer.value, bounds.requests,
            bounds.tokens, bounds.bytes, bounds.tenant_requests, request.on_disconnect.value,
        )  # fmt: skip
        return Call(self._scripts["accept_ingress"], names, args)

    def _refuse(self, entry: Entry, refusal: Refusal) -> Call:
        keys = self._keys
        names = (
            keys.ingress(entry.tenant), keys.request(refusal.id), keys.log(refusal.id),
            keys.request(entry.own_id), keys.log(entry.own_id), keys.counters,
        )  # fmt: skip
        args = (
            keys.prefix, entry.name, refusal.id, entry.own_id, refusal.reason.state.value,
            refusal.reason.value, refusal.message, refusal.answer.value, self._retention_ms,
        )  # fmt: skip
        return Call(self._scripts["refuse_ingress"], names, args)

    @staticmethod
    def read_resolved(reply: Any) -> IngressReply:
        """The typed form of the reply to :meth:`resolve`.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("accept_ingress", reply)
        return IngressReply(reply[0].decode(), reply[1].decode())

    async def tenants(self) -> tuple[str, ...]:
        """Tenants with an intake stream of their own.

        Raises:
            RedisUnavailable: the server refuses.
        """
        names: set[bytes] = await self._one("SMEMBERS")
        return tuple(sorted(name.decode(errors="replace") for name in names))

    async def add_tenant(self, tenant: str) -> bool:
        """Give a tenant an intake stream of its own; False if it has one.

        Raises:
            InvalidRequest: no name for such a tenant.
            ConfigurationError: there are a thousand already.
            RedisUnavailable: the server refuses.
        """
        Name(_TENANT, _TENANT_ALLOWED).check("tenant", tenant)
        if await self._one("SCARD") >= MAX_INGRESS_TENANTS:
            raise ConfigurationError(
                f"this shard has {MAX_INGRESS_TENANTS} doors already; remove some, or use "
                "another shard"
            )
        return bool(await self._one("SADD", tenant))

    async def remove_tenant(self, tenant: str) -> bool:
        """Have a tenant's intake stream read no more; False if there is none. Entries stay in it.

        Raises:
            RedisUnavailable: the server refuses.
        """
        return bool(await self._one("SREM", tenant))

    async def _one(self, command: str, *args: str) -> Any:
        (reply,) = await run_commands(self._redis, [(command, self._keys.ingress_tenants, *args)])
        accepted(command, reply)
        return reply


def _tenant(name: bytes) -> str | None:
    return name.decode("latin-1") or None


def _may_have_ingress(tenant: str | None) -> bool:
    return tenant is None or _TENANT.fullmatch(tenant) is not None
