"""The ingress: typed calls of its Lua scripts; see :mod:`..protocol.plain_entry`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError
from ..keys import Keys
from ..protocol.fields.field_types import Name
from ..protocol.plain_entry import Admission, Entry, Refusal
from .operations import request_arguments
from .replies import Bounds, accepted
from .script_header import Value
from .script_loader import Call, Pipelined, Script, load_script
from .shard_scripts import ShardScripts

__all__ = ["IngressOperations", "IngressPoll", "IngressReply"]

MAX_INGRESS_TENANTS = 1000
"""Workers look at every ingress stream once a second."""

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_TENANT_ALLOWED = (
    "1 to 64 characters of A-Z a-z 0-9 _ -, starting with a letter or digit; no dot, because "
    "request ids of the tenant a begin with a. and those of a.b would begin so, too"
)


@dataclass(frozen=True, slots=True)
class IngressPoll:
    """The ingress streams that :meth:`IngressOperations.poll` found.

    Attributes:
        tenants: tenants whose ingress streams may be read; None stands for the shared one.
        broken: tenants whose streams may not be read: a key of another type holds the stream's
            name, or the tenant's name is not allowed.
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


class IngressOperations(ShardScripts):
    """The ingress of one shard.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``.
        keys: names of the shard.
        retention_ms: how long an answer to a refused entry, and an ended request, is kept.
        bounds: what may wait.
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
        super().__init__(redis, keys, load=load)
        self._retention_ms = retention_ms
        self._bounds = bounds or Bounds()
        self._default_deadline_ms = default_deadline_ms

    def poll(self, worker_id: str, *, entries: int) -> Call:
        """Look which ingress streams there are, and take over up to so many unfinished entries."""
        return self._call("poll_ingress", worker=worker_id, entries=entries)

    @staticmethod
    def read_poll(reply: Any) -> IngressPoll:
        """The typed form of a poll's reply.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("poll_ingress", reply)
        tenants = [_tenant(name) for name in reply[0]]
        readable = tuple(tenant for tenant in tenants if _may_have_ingress(tenant))
        broken = tuple(tenant for tenant in tenants if not _may_have_ingress(tenant))
        found = (Entry(_tenant(tenant), name.decode(), rest) for tenant, name, rest in reply[2])
        return IngressPoll(
            readable,
            broken + tuple(_tenant(name) for name in reply[1]),
            tuple(entry for entry in found if _may_have_ingress(entry.tenant)),
        )

    def resolve(self, entry: Entry, verdict: Admission | Refusal) -> Call:
        """Act on an entry: it becomes a request or gets its answer, and is gone."""
        if isinstance(verdict, Admission):
            return self._accept(entry, verdict)
        return self._refuse(entry, verdict)

    def _accept(self, entry: Entry, admission: Admission) -> Call:
        values = request_arguments(
            admission.request, admission.payload, self._bounds, self._default_deadline_ms
        )
        values.update(self._answer_to(entry))
        if admission.request.retention_ms is not None:
            values["retention_ms"] = admission.request.retention_ms
        return self._call("accept_ingress", **values)

    def _refuse(self, entry: Entry, refusal: Refusal) -> Call:
        return self._call(
            "refuse_ingress", id=refusal.id, state=refusal.reason.state.value,
            reason=refusal.reason.value, message=refusal.message, answer=refusal.answer.value,
            **self._answer_to(entry),
        )  # fmt: skip

    def _answer_to(self, entry: Entry) -> dict[str, Value]:
        return {
            "ingress": self._keys.ingress(entry.tenant).removeprefix(self._keys.prefix),
            "entry": entry.name,
            "own_id": entry.own_id,
            "retention_ms": self._retention_ms,
        }

    @staticmethod
    def read_resolved(reply: Any) -> IngressReply:
        """The typed form of the reply to :meth:`resolve`.

        Raises:
            RedisUnavailable: the reply is the server's refusal.
        """
        accepted("accept_ingress", reply)
        return IngressReply(reply[0].decode(), reply[1].decode())

    async def tenants(self) -> tuple[str, ...]:
        """Tenants with an ingress stream of their own.

        Raises:
            RedisUnavailable: the server refuses.
        """
        names: set[bytes] = await self._command("SMEMBERS", self._keys.ingress_tenants)
        return tuple(sorted(name.decode(errors="replace") for name in names))

    async def add_tenant(self, tenant: str) -> bool:
        """Give a tenant an ingress stream of its own; False if it has one.

        Raises:
            InvalidRequest: the name is not allowed for such a tenant.
            ConfigurationError: there are a thousand already.
            RedisUnavailable: the server refuses.
        """
        Name(_TENANT, _TENANT_ALLOWED).check("tenant", tenant)
        if await self._command("SCARD", self._keys.ingress_tenants) >= MAX_INGRESS_TENANTS:
            raise ConfigurationError(
                f"this shard has {MAX_INGRESS_TENANTS} ingress tenants already; remove some, or "
                "use another shard"
            )
        return bool(await self._command("SADD", self._keys.ingress_tenants, tenant))

    async def remove_tenant(self, tenant: str) -> bool:
        """Stop the reading of a tenant's ingress stream; False if there is none.

        Entries stay in it.

        Raises:
            RedisUnavailable: the server refuses.
        """
        return bool(await self._command("SREM", self._keys.ingress_tenants, tenant))


def _tenant(name: bytes) -> str | None:
    return name.decode("latin-1") or None


def _may_have_ingress(tenant: str | None) -> bool:
    return tenant is None or _TENANT.fullmatch(tenant) is not None
