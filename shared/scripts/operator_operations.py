"""The operations of operators, as typed calls: dead letters, and rebuilt counters."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..keys import Keys
from ..protocol.fields.field_types import Name
from ..protocol.states import State
from ..redis.resp import Exchanger
from .replies import DeadLetter, RedriveReply, read_dead_letter
from .script_loader import Pipelined, Script, load_script
from .shard_scripts import ShardScripts

__all__ = ["OperatorOperations"]

_ENTRY = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_ENTRY_ALLOWED = "the entry of a dead letter, such as 1700000000000-0"


class OperatorOperations(ShardScripts):
    """Operations of one shard that no request needs while all goes well.

    Args:
        redis: a ``redis.asyncio.Redis`` without ``decode_responses``, or a connection that takes
            encoded commands.
        keys: names of the shard.
        retention_ms: how long the record and the log of an ended request are kept.
        load: where the scripts come from; tests put altered ones in their place.
    """

    def __init__(
        self,
        redis: Pipelined | Exchanger,
        keys: Keys,
        *,
        retention_ms: int = 600_000,
        load: Callable[[str], Script] = load_script,
    ) -> None:
        super().__init__(redis, keys, load=load)
        self._retention_ms = retention_ms

    async def dead_letters(self, *, after: str = "-", count: int = 100) -> list[DeadLetter]:
        """Dead letters, oldest first.

        Args:
            after: entry of the last one already seen; ``-`` begins at the oldest.
            count: how many at most.

        Raises:
            RedisUnavailable: the server refuses.
        """
        start = after if after == "-" else f"({after}"
        return await self._letters(start, "+", count)

    async def dead_letter(self, entry: str) -> DeadLetter | None:
        """The dead letter of that entry, None if there is none.

        Raises:
            RedisUnavailable: the server refuses.
        """
        found = await self._letters(entry, entry, 1)
        return found[0] if found else None

    async def _letters(self, start: str, stop: str, count: int) -> list[DeadLetter]:
        for bound in (start.removeprefix("("), stop):
            if bound not in "-+":
                Name(_ENTRY, _ENTRY_ALLOWED).check("entry", bound)
        rows = await self._command("XRANGE", self._keys.dead_letters, start, stop, "COUNT", count)
        return [read_dead_letter(entry, fields) for entry, fields in rows]

    async def redrive(self, entry: str) -> RedriveReply:
        """Give a dead request a new life, from token 0 and with a new deadline of the same length.

        Raises:
            RedisUnavailable: the server refuses (for example at maxmemory).
        """
        letter = await self.dead_letter(entry)
        if letter is None:
            return RedriveReply(False, None)
        reply = await self._one(
            "redrive", entry=entry, retention_ms=self._retention_ms, id=letter.id,
            lane=letter.lane.value, tenant=letter.tenant,
        )  # fmt: skip
        state = State(reply[1].decode()) if reply[0] == b"busy" else None
        return RedriveReply(reply[0] == b"ok", state)

    async def drop_dead_letter(self, entry: str) -> bool:
        """Throw a dead letter away; False if there is none of that entry.

        Raises:
            RedisUnavailable: the server refuses.
        """
        Name(_ENTRY, _ENTRY_ALLOWED).check("entry", entry)
        return bool(await self._command("XDEL", self._keys.dead_letters, entry))

    async def rebuild_counters(self) -> tuple[int, int]:
        """Set the counters of waiting work to what the records say.

        The scripts keep them right. An operator runs this after commands were denied in the middle
        of scripts, or keys deleted by hand. Not bounded, see the script.

        Returns:
            Waiting requests, and how many counters were wrong.

        Raises:
            RedisUnavailable: the server refuses.
        """
        waiting, wrong = await self._one("rebuild_counters", mode="repair")
        return waiting, wrong
