"""What an operator does to a shard, as typed calls: dead letters, and rebuilt counters."""

from __future__ import annotations

import re

from ..protocol import State
from ..protocol.field_types import Name
from .replies import DeadLetter, RedriveReply, accepted, read_dead_letter
from .script_loader import Call, Command
from .shard_scripts import ShardScripts

__all__ = ["OperatorOperations"]

_ENTRY = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_ENTRY_ALLOWED = "the name of a dead letter, such as 1700000000000-0"


class OperatorOperations(ShardScripts):
    """Operations of one shard that no request needs while all goes well."""

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
        """The dead letter of that name, None if there is none.

        Raises:
            RedisUnavailable: the server refuses.
        """
        found = await self._letters(entry, entry, 1)
        return found[0] if found else None

    async def _letters(self, start: str, stop: str, count: int) -> list[DeadLetter]:
        for bound in (start.removeprefix("("), stop):
            if bound not in "-+":
                Name(_ENTRY, _ENTRY_ALLOWED).check("entry", bound)
        command = ("XRANGE", self._keys.dead_letters, start, stop, "COUNT", count)
        (rows,) = await self.run([Command(command)])
        accepted("XRANGE", rows)
        return [read_dead_letter(entry, fields) for entry, fields in rows]

    async def redrive(self, entry: str) -> RedriveReply:
        """Give a dead request a new life, from token 0 and with a new deadline of the same length.

        Raises:
            RedisUnavailable: the server refuses (for example at maxmemory).
        """
        letter = await self.dead_letter(entry)
        if letter is None:
            return RedriveReply(False, None)
        keys = self._keys
        names = (
            keys.dead_letters, keys.request(letter.id), keys.log(letter.id),
            keys.queue(letter.lane, letter.tenant), keys.tenants(letter.lane), keys.lanes,
            keys.floors, keys.deadlines, keys.counters, keys.bell,
        )  # fmt: skip
        args = (keys.prefix, entry, self._retention_ms)
        reply = await self._one(Call(self._scripts["redrive"], names, args))
        state = State(reply[1].decode()) if reply[0] == b"busy" else None
        return RedriveReply(reply[0] == b"ok", state)

    async def drop_dead_letter(self, entry: str) -> bool:
        """Throw a dead letter away; False if there is none of that name.

        Raises:
            RedisUnavailable: the server refuses.
        """
        Name(_ENTRY, _ENTRY_ALLOWED).check("entry", entry)
        command = ("XDEL", self._keys.dead_letters, entry)
        (dropped,) = await self.run([Command(command)])
        accepted("XDEL", dropped)
        return bool(dropped)

    async def rebuild_counters(self) -> tuple[int, int]:
        """Set the counters of waiting work to what the records say.

        They are right by themselves; this is for an operator after commands were denied in the
        middle of scripts, or keys deleted by hand. Not bounded, see the script.

        Returns:
            Waiting requests, and how many counters were wrong.

        Raises:
            RedisUnavailable: the server refuses.
        """
        names = (self._keys.deadlines, self._keys.counters)
        waiting, wrong = await self._one(
            Call(self._scripts["rebuild_counters"], names, (self._keys.prefix,))
        )
        return waiting, wrong
