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
from ..file_store import FileStore
from ..records import Batch
from ..storage import Storage
from .input_lines import InputLine, parse_line
from .line_endpoints import line_endpoint
from .line_order import Plan
from .parts import FinishedLines

__all__ = ["LineRequests", "groups", "plan_name"]

_AT_ONCE = 32
_POLL_S = (0.05, 1.0)


class LineRequests:
    """The requests of all batches that one process drives.

    Args:
        storage: where inputs and plans are.
        clients: one for each shard.
    """

    def __init__(self, storage: Storage, clients: Clients) -> None:
        self._storage = storage
        self._clients = clients
        self._plans: dict[str, Plan] = {}
        self._names: dict[str, TokenNames] = {}

    async def plan(self, batch: Batch) -> Plan:
        """The order of a batch's lines.

        Raises:
            FileNotFoundError: it is gone.
        """
        if batch.id not in self._plans:
            data = await asyncio.to_thread(self._storage.read, plan_name(batch))
            self._plans[batch.id] = Plan(data)
        return self._plans[batch.id]

    def forget(self, batch_id: str) -> None:
        """Drop what is kept in memory for a batch."""
        self._plans.pop(batch_id, None)

    async def read(self, batch: Batch, places: Sequence[int]) -> list[InputLine]:
        """The input lines at these places of the plan.

        Raises:
            FileNotFoundError: the input is gone.
        """
        plan = await self.plan(batch)

        def read() -> list[InputLine]:
            found = []
            with self._storage.open(FileStore.body(batch.input_file_id)) as body:
                for place in places:
                    body.seek(plan[place].offset)
                    found.append(parse_line(body.read(plan[place].length), batch.endpoint))
            return found

        return await asyncio.to_thread(read)

    async def submit(self, batch: Batch, places: Iterable[int]) -> list[int]:
        """Submit lines in order, as far as the queue has room; returns the accepted places."""
        accepted: list[int] = []
        for group in groups(places):
            lines = await self.read(batch, group)
            outcomes = await asyncio.gather(
                *(self._submit(batch, *pair) for pair in zip(group, lines, strict=True))
            )
            fitting = sum(1 for _ in itertools.takewhile(bool, outcomes))
            accepted += group[:fitting]
            if fitting < len(group):
                break
        return accepted

    async def wait_for_ends(self, batch: Batch) -> list[int]:
        """Wait until requests in flight have ended, or for some seconds; returns their places."""
        pause_s, longest_s = _POLL_S
        while not (places := await self.ended(batch)) and pause_s <= longest_s:
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return places

    async def collect(self, batch: Batch, places: list[int], finished: FinishedLines) -> None:
        """Add the lines at these places, whose requests have ended."""
        for group in groups(places):
            lines = await self.read(batch, group)
            await asyncio.gather(
                *(
                    self._collect(batch, place, line, finished)
                    for place, line in zip(group, lines, strict=True)
                )
            )

    async def cancel(self, batch: Batch) -> None:
        """End what is in flight."""
        for group in groups(batch.in_flight):
            await asyncio.gather(*(self._cancel(batch, place) for place in group))

    async def _submit(self, batch: Batch, place: int, line: InputLine) -> bool:
        """Submit a line; returns False if the queue has no room."""
        translation = line_endpoint(batch.endpoint).translate(line.body)
        producer, request_id = await self._find(batch, place)
        try:
            await producer.submit(
                id=request_id,
                lane=batch.lane,
                tenant=batch.tenant,
                deadline_ms=batch.window_s * 1000,
                retention_ms=batch.window_s * 1000,
                **translation.fields,
            )
        except QueueFull:
            return False
        except IdConflict:
            pass  # a version that translated the line differently submitted it: that answer counts
        return True

    async def ended(self, batch: Batch) -> list[int]:
        """Places in flight whose requests have ended, or are not known any more."""
        plan = await self.plan(batch)
        by_shard: dict[int, list[int]] = {}
        for place in batch.in_flight:
            by_shard.setdefault(_shard(batch, plan[place].number), []).append(place)
        ended: list[int] = []
        for shard, places in by_shard.items():
            producer = await self._clients.get(batch.model, shard)
            ids = [batch.request_id(plan[place].number) for place in places]
            states = await producer.states(ids)
            for place, state in zip(places, states, strict=True):
                if state is None or state in TERMINAL_STATES:
                    ended.append(place)
        return ended

    async def _collect(
        self, batch: Batch, place: int, line: InputLine, finished: FinishedLines
    ) -> None:
        producer, request_id = await self._find(batch, place)
        try:
            result = await producer.result(request_id, check=False)
        except UnknownRequest:  # Redis lost it: the line has no answer, so it runs again
            await self._submit(batch, place, line)
            return
        if result.state is State.CANCELLED and batch.outcome is not None:
            return  # by the end of the batch, which gives it an error of its own
        translation = line_endpoint(batch.endpoint).translate(line.body)
        names = await self._token_names(producer, "logprobs" in translation.fields)
        response = translation.respond(request_id, result, names)
        output = {
            "id": f"batch_req_{request_id}",
            "custom_id": line.custom_id,
            "response": response,
            "error": None,
        }
        finished.add(place, output, result.usage)

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
        number = (await self.plan(batch))[place].number
        producer = await self._clients.get(batch.model, _shard(batch, number))
        return producer, batch.request_id(number)


def plan_name(batch: Batch) -> str:
    """Name of a batch's plan in the storage."""
    return f"batches/{batch.id}/plan/whole"


def groups(places: Iterable[int]) -> Iterator[list[int]]:
    """The places in groups of which each is handled at once."""
    rest = iter(places)
    while group := list(itertools.islice(rest, _AT_ONCE)):
        yield group


def _shard(batch: Batch, number: int) -> int:
    return batch.shards[number % len(batch.shards)]
