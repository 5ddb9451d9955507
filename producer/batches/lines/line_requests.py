"""Requests of a batch's lines: submitted, looked after, collected and cancelled.

A line's request has the line's own id, so that submitting it again changes nothing. Its answer is
retained for the batch's window, so that a driver which returns late still finds it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Sequence

from penstock.shared.errors import IdConflict, QueueFull, UnknownRequest
from penstock.shared.protocol.states import TERMINAL_STATES, State

from ...client import Producer
from ...gateway.openai.token_logprobs import TokenNames
from ..clients import Clients
from ..stores.records import Batch
from ..stores.storage import Storage
from .look_pace import LookPace
from .open_lines import OpenLine, OpenLines
from .parts import FinishedLines

__all__ = ["LineRequests", "groups"]

_AT_ONCE = 32
_KEPT_BYTES = 16 << 20
_LONGEST_WAIT_S = 1.5


class LineRequests:
    """The requests of all batches that one process drives.

    Args:
        storage: where inputs and plans are.
        clients: one for each shard.

    Attributes:
        lines: the lines themselves.
    """

    def __init__(self, storage: Storage, clients: Clients) -> None:
        self._clients = clients
        self._names: dict[str, TokenNames] = {}
        self._paces: dict[str, LookPace] = {}
        self.lines = OpenLines(storage, keep_bytes=_KEPT_BYTES)

    def forget(self, batch_id: str) -> None:
        """Drop what is kept in memory for a batch."""
        self.lines.forget(batch_id)
        self._paces.pop(batch_id, None)

    async def submit(self, batch: Batch, places: Iterable[int]) -> list[int]:
        """Submit lines in order, as far as the queue has room; returns the accepted places."""
        accepted: list[int] = []
        for group in groups(places):
            lines = list(zip(group, await self.lines.read(batch, group), strict=True))
            outcomes = await asyncio.gather(*(self._submit(batch, *pair) for pair in lines))
            fitting = sum(1 for _ in itertools.takewhile(bool, outcomes))
            accepted += group[:fitting]
            await self.lines.keep(batch, lines[:fitting])
            if fitting < len(group):
                break
        return accepted

    async def wait_for_ends(self, batch: Batch) -> list[int]:
        """Wait until requests in flight have ended, or for some seconds; returns their places."""
        pace, waited_s = self._paces.setdefault(batch.id, LookPace()), 0.0
        while waited_s < _LONGEST_WAIT_S:
            pause_s = pace.pause_s
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            places = await self.ended(batch)
            pace.saw(len(places), len(batch.in_flight))
            if places:
                return places
        return []

    async def collect(self, batch: Batch, places: list[int], finished: FinishedLines) -> None:
        """Add the lines at these places, whose requests have ended."""
        for group in groups(places):
            lines = zip(group, await self.lines.read(batch, group), strict=True)
            await asyncio.gather(*(self._collect(batch, *pair, finished) for pair in lines))
            await self.lines.drop(batch, finished.places.intersection(group))

    async def recover(self, batch: Batch, places: Sequence[int]) -> Batch:
        """The batch with those places in flight that were submitted and not recorded.

        A driver leaves such lines if it dies between a submission and its record, or another driver
        changes the record first. So does a full queue that takes a later line of a group.

        Args:
            batch: which.
            places: where they may be: those that follow ``next_line``.
        """
        states = await self._states(batch, places)
        end = max((place + 1 for place, state in states if state is not None), default=0)
        submitted = [place for place in places if place < end]
        return batch.model_copy(
            update={
                "next_line": max(batch.next_line, end),
                "in_flight": (*batch.in_flight, *submitted),
            }
        )

    async def cancel(self, batch: Batch) -> None:
        """End what is in flight."""
        for group in groups(batch.in_flight):
            await asyncio.gather(*(self._cancel(batch, place) for place in group))

    async def _submit(self, batch: Batch, place: int, line: OpenLine) -> bool:
        """Submit a line; returns False if the queue has no room."""
        producer, request_id = await self._find(batch, place)
        try:
            await producer.submit(
                id=request_id,
                lane=batch.lane,
                tenant=batch.tenant,
                deadline_ms=batch.window_s * 1000,
                retention_ms=batch.window_s * 1000,
                **line.translation.fields,
            )
        except QueueFull:
            return False
        except IdConflict:
            pass  # a version that translated the line differently submitted it: that answer counts
        return True

    async def ended(self, batch: Batch) -> list[int]:
        """Places in flight whose requests have ended, or are not known any more."""
        states = await self._states(batch, batch.in_flight)
        return [place for place, state in states if state is None or state in TERMINAL_STATES]

    async def _states(self, batch: Batch, places: Sequence[int]) -> list[tuple[int, State | None]]:
        """Each place with its request's state; None if the request is not known."""
        plan = await self.lines.plan(batch)
        by_shard: dict[int, list[int]] = {}
        for place in places:
            by_shard.setdefault(_shard(batch, plan[place].number), []).append(place)
        found: list[tuple[int, State | None]] = []
        for shard, there in by_shard.items():
            producer = await self._clients.get(batch.model, shard)
            ids = [batch.request_id(plan[place].number) for place in there]
            found += zip(there, await producer.states(ids), strict=True)
        return found

    async def _collect(
        self, batch: Batch, place: int, line: OpenLine, finished: FinishedLines
    ) -> None:
        producer, request_id = await self._find(batch, place)
        try:
            result = await producer.result(request_id, check=False)
        except UnknownRequest:  # Redis lost it: the line has no answer, so it runs again
            if batch.outcome is None:
                await self._submit(batch, place, line)
            return
        if result.state is State.CANCELLED and batch.outcome is not None:
            return  # by the end of the batch, which gives it an error of its own
        names = await self._token_names(producer, "logprobs" in line.translation.fields)
        response = line.translation.respond(request_id, result, names)
        output = {
            "id": f"batch_req_{request_id}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        finished.add(place, output, result)

    async def _token_names(self, producer: Producer, wanted: bool) -> TokenNames:
        if not wanted:
            return TokenNames(())
        model = producer.keys.model
        if model not in self._names:
            self._names[model] = TokenNames((await producer.model_card()).vocabulary)
        return self._names[model]

    async def _cancel(self, batch: Batch, place: int) -> None:
        producer, request_id = await self._find(batch, place)
        try:
            await producer.cancel(request_id)
        except UnknownRequest:
            return

    async def _find(self, batch: Batch, place: int) -> tuple[Producer, str]:
        number = (await self.lines.plan(batch))[place].number
        producer = await self._clients.get(batch.model, _shard(batch, number))
        return producer, batch.request_id(number)


def groups(places: Iterable[int]) -> Iterator[list[int]]:
    """The places in groups of which each is handled at once."""
    rest = iter(places)
    while group := list(itertools.islice(rest, _AT_ONCE)):
        yield group


def _shard(batch: Batch, number: int) -> int:
    return batch.shards[number % len(batch.shards)]
