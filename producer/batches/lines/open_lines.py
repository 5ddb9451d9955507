"""Lines that are in hand: read from the input in the plan's order, and kept until they end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cached_property

from ..stores.file_store import FileStore
from ..stores.records import Batch, batch_folder
from ..stores.storage import Storage
from .input_lines import InputLine, parse_line
from .line_endpoints import LineEndpoint, Translation, line_endpoint
from .line_order import Plan

__all__ = ["OpenLine", "OpenLines", "plan_name"]


class OpenLine:
    """A line of a batch, parsed; its body is translated when somebody needs that.

    Attributes:
        custom_id: the caller's name for it.
    """

    def __init__(self, line: InputLine, endpoint: LineEndpoint) -> None:
        self.custom_id = line.custom_id
        self._body = line.body
        self._endpoint = endpoint

    @cached_property
    def translation(self) -> Translation:
        """What its body asks for."""
        return self._endpoint.translate(self._body)


class _Kept:
    """What is in memory of one batch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.lines: dict[int, OpenLine] = {}
        self.num_bytes = 0


class OpenLines:
    """The plans of batches, and their lines between submission and end.

    A line is needed twice: to submit it, and to write its answer. Those in flight are kept, so that
    the second time costs no read, which for an object store is a request.

    Args:
        storage: where inputs and plans are.
        keep_bytes: lines of one batch that are kept at most, by their length in the input.
    """

    def __init__(self, storage: Storage, *, keep_bytes: int) -> None:
        self._storage = storage
        self._keep_bytes = keep_bytes
        self._batches: dict[str, _Kept] = {}

    async def plan(self, batch: Batch) -> Plan:
        """The order of a batch's lines.

        Raises:
            FileNotFoundError: it is gone.
        """
        return (await self._kept(batch)).plan

    async def read(self, batch: Batch, places: Sequence[int]) -> list[OpenLine]:
        """The lines at these places of the plan.

        Raises:
            FileNotFoundError: the input is gone.
        """
        kept = await self._kept(batch)
        missing = [place for place in places if place not in kept.lines]
        read = await asyncio.to_thread(self._read, batch, kept.plan, missing) if missing else {}
        return [kept.lines.get(place) or read[place] for place in places]

    async def keep(self, batch: Batch, lines: Iterable[tuple[int, OpenLine]]) -> None:
        """Keep lines that were submitted, as far as there is room."""
        kept = await self._kept(batch)
        for place, line in lines:
            length = kept.plan[place].length
            if place not in kept.lines and kept.num_bytes + length <= self._keep_bytes:
                kept.lines[place] = line
                kept.num_bytes += length

    async def drop(self, batch: Batch, places: Iterable[int]) -> None:
        """Keep lines no longer, since they have ended."""
        kept = await self._kept(batch)
        for place in places:
            if kept.lines.pop(place, None) is not None:
                kept.num_bytes -= kept.plan[place].length

    def forget(self, batch_id: str) -> None:
        """Drop all that is in memory of a batch."""
        self._batches.pop(batch_id, None)

    async def _kept(self, batch: Batch) -> _Kept:
        if batch.id not in self._batches:
            data = await asyncio.to_thread(self._storage.read, plan_name(batch))
            self._batches[batch.id] = _Kept(Plan(data))
        return self._batches[batch.id]

    def _read(self, batch: Batch, plan: Plan, places: Sequence[int]) -> dict[int, OpenLine]:
        endpoint, found = line_endpoint(batch.endpoint), {}
        with self._storage.open(FileStore.body(batch.input_file_id)) as body:
            for place in places:
                body.seek(plan[place].offset)
                line = parse_line(body.read(plan[place].length), batch.endpoint)
                found[place] = OpenLine(line, endpoint)
        return found


def plan_name(batch: Batch) -> str:
    """Name of a batch's plan in the storage."""
    return f"{batch_folder(batch.id)}/plan/whole"
