"""Dead letters: requests that were given up, kept with their payload to inspect and rerun."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from penstock.shared.errors import IdInUse, InvalidRequest, UnknownDeadLetter
from penstock.shared.protocol.states import State
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.operations import DeadLetter, Operations

__all__ = ["DeadLetters"]

_ENTRY = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_PAGE = 100


class DeadLetters:
    """The dead letters of one shard. Made by :attr:`Producer.dead_letters`.

    A request ends ``dead`` when too many workers were lost while they ran it. It is not retried,
    but its payload stays. Once the cause is fixed, :meth:`redrive` runs it again under its own id.
    About 10,000 dead letters are kept, the newest ones.

    A ``name`` is a request's id or the letter's own unique name (:attr:`DeadLetter.entry`).

    Args:
        client: the connection.
        operations: the scripts of the shard.
    """

    def __init__(self, client: RetryingClient, operations: Operations) -> None:
        self._client = client
        self._operations = operations

    async def count(self) -> int:
        """The number of dead letters.

        Raises:
            RedisUnavailable: see :class:`Producer`.
        """
        key = self._operations.keys.dead_letters

        async def send() -> int:
            length: int = await self._client.redis.xlen(key)
            return length

        return await self._client.call(send)

    async def all(self, *, until: str | None = None) -> AsyncIterator[DeadLetter]:
        """Every dead letter, oldest first.

        Args:
            until: name of the last one wanted; None includes those that arrive meanwhile.

        Raises:
            RedisUnavailable: see :class:`Producer`.
        """
        after = "-"
        while page := await self._page(after):
            for letter in page:
                if until is not None and _position(letter.entry) > _position(until):
                    return
                yield letter
            after = page[-1].entry

    async def newest(self) -> str | None:
        """Name of the newest letter; None if there is none."""
        key = self._operations.keys.dead_letters

        async def send() -> list[tuple[bytes, object]]:
            rows: list[tuple[bytes, object]] = await self._client.redis.xrevrange(key, count=1)
            return rows

        rows = await self._client.call(send)
        return rows[0][0].decode() if rows else None

    async def find(self, name: str) -> DeadLetter:
        """One dead letter.

        Raises:
            UnknownDeadLetter: there is none.
            InvalidRequest: several have that request id; name one by its own name.
            RedisUnavailable: see :class:`Producer`.
        """
        if _ENTRY.fullmatch(name):
            letter = await self._client.call(lambda: self._operations.dead_letter(name))
            if letter is not None:
                return letter
        found = [letter async for letter in self.all() if letter.id == name]
        if not found:
            raise UnknownDeadLetter(name)
        if len(found) > 1:
            names = " or ".join(letter.entry for letter in found)
            raise InvalidRequest("id", name, f"the name of one of its dead letters: {names}")
        return found[0]

    async def redrive(self, name: str) -> DeadLetter:
        """Run a dead request again: from token 0, with a new deadline of the same length.

        It keeps its id, and its readers start over. Queue bounds do not apply to it. Returns the
        letter, which no longer exists.

        Raises:
            UnknownDeadLetter, InvalidRequest: see :meth:`find`.
            IdInUse: its id was submitted again, and that request is still retained.
            RedisUnavailable: the server cannot be reached, or refuses (for example at maxmemory).
        """
        letter = await self.find(name)
        attempts = 0

        async def send() -> State | None:
            nonlocal attempts
            attempts += 1
            reply = await self._operations.redrive(letter.entry)
            if reply.done:
                return None
            if reply.state is not None:
                raise IdInUse(letter.id, reply.state.value)
            # Gone: perhaps by an earlier attempt whose reply was lost.
            state = await self._state(letter.id)
            if attempts > 1 and state is not None and state is not State.DEAD:
                return None
            raise UnknownDeadLetter(letter.entry)

        await self._client.call(send)
        return letter

    async def drop(self, name: str) -> DeadLetter:
        """Delete a dead letter with its payload, and return it.

        Raises:
            UnknownDeadLetter, InvalidRequest: see :meth:`find`.
            RedisUnavailable: see :class:`Producer`.
        """
        letter = await self.find(name)
        await self._client.call(lambda: self._operations.drop_dead_letter(letter.entry))
        return letter

    async def _page(self, after: str) -> list[DeadLetter]:
        return await self._client.call(
            lambda: self._operations.dead_letters(after=after, count=_PAGE)
        )

    async def _state(self, request_id: str) -> State | None:
        key = self._operations.keys.request(request_id)
        state: bytes | None = await self._client.redis.hget(key, "state")  # type: ignore[misc]
        return None if state is None else State(state.decode())


def _position(entry: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)
