"""The scripts of one shard and the way to its server: the base of all typed operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

from ..keys import Keys
from ..redis.resp import Exchanger, KeyPair
from .replies import accepted
from .script_header import Value
from .script_loader import Call, Command, Pipelined, Script, load_script, run_calls

__all__ = ["ShardScripts"]

_KEY_PAIRS_KEPT = 4096
"""Requests whose keys stay encoded between two appends; some 600 bytes each."""


class ShardScripts:
    """Calls the scripts of one shard by name.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``, or a connection that takes
            encoded commands.
        keys: names of the shard.
        load: where the scripts come from; tests put altered ones in their place.
    """

    def __init__(
        self,
        redis: Pipelined | Exchanger,
        keys: Keys,
        *,
        load: Callable[[str], Script] = load_script,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._script = lru_cache(load)
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

    def _call(self, script: str, pairs: Sequence[KeyPair] = (), /, **values: Value) -> Call:
        return self._script(script).call(self._keys.prefix, pairs, **values)

    async def _one(self, script: str, **values: Value) -> Any:
        (reply,) = await self.run([self._call(script, **values)])
        accepted(script, reply)
        return reply

    async def _command(self, *words: str | bytes | int) -> Any:
        (reply,) = await self.run([Command(words)])
        accepted(str(words[0]), reply)
        return reply
