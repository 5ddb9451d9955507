"""The scripts of one shard, and the way to its server: what all typed operations build on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from ..keys import Keys
from ..redis.batch_connection import BatchConnection
from ..redis.resp import KeyPair
from .replies import RetryPolicy, accepted
from .script_loader import Call, Command, Pipelined, Script, load_script, run_calls

__all__ = ["SCRIPTS", "ShardScripts"]

SCRIPTS = (
    "append", "audit", "cancel", "claim", "reader_heartbeat", "rebuild_counters", "redrive",
    "release", "submit", "sweep",
)  # fmt: skip
"""Names of the scripts: those of ``scripts/`` that are not included by others."""

_KEY_PAIRS_KEPT = 4096
"""Requests whose keys stay encoded between two appends; some 300 bytes each."""


class ShardScripts:
    """The scripts of one shard, loaded, and what their calls have in common.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``, or a connection that takes
            encoded commands.
        keys: names of the shard.
        retention_ms: how long the record and the log of an ended request are kept.
        retry: when a request that keeps losing its worker is given up.
        load: where the scripts come from; tests put altered ones in their place.
    """

    def __init__(
        self,
        redis: Pipelined | BatchConnection,
        keys: Keys,
        *,
        retention_ms: int = 600_000,
        retry: RetryPolicy | None = None,
        load: Callable[[str], Script] = load_script,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._retention_ms = retention_ms
        self._retry = retry or RetryPolicy()
        self._scripts = {name: load(name) for name in SCRIPTS}
        self._key_pair = lru_cache(_KEY_PAIRS_KEPT)(
            partial(KeyPair.of, keys.request(""), keys.log(""))
        )

    @property
    def keys(self) -> Keys:
        """Names of the shard."""
        return self._keys

    async def run(self, calls: Sequence[Call | Command]) -> list[Any]:
        """Run calls in one round trip; replies are raw, see :func:`run_calls`."""
        return await run_calls(self._redis, calls)

    async def _one(self, call: Call) -> Any:
        (reply,) = await self.run([call])
        accepted(call.script.name, reply)
        return reply
