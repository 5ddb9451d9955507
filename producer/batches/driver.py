"""Drives a batch from one state to the next, a bounded stretch at a time.

Every step reads the record, does something that may be done twice, and then writes the next
version of the record. A driver that dies between the two leaves nothing that matters.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.shared.settings import BatchesSettings

from .batch_metrics import BatchMetrics
from .batch_store import BatchChanged, BatchStore
from .clients import Clients
from .file_store import FileStore, UnknownFile
from .lines.input_lines import Slice, read_slice
from .lines.line_endpoints import line_endpoint
from .lines.line_order import Plan, make_plan
from .lines.line_requests import LineRequests, groups
from .lines.open_lines import plan_name
from .lines.parts import FinishedLines, write_parts
from .records import Batch, BatchState, FilePurpose, LineError, StoredFile
from .storage import Storage

__all__ = ["Driver"]

_KEPT_ERRORS = 100
_GIVEN_UP = {
    BatchState.EXPIRED: ("batch_expired", "the batch's window ended before this line did"),
    BatchState.CANCELLED: ("batch_cancelled", "the batch was cancelled before this line ended"),
}
"""Code and message of lines without an answer."""


class Driver:
    """Moves batches on.

    Args:
        batches: their records.
        files: their inputs and outputs.
        storage: where bodies are.
        clients: one for each shard.
        settings: limits.
        metrics: what is counted.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        storage: Storage,
        clients: Clients,
        settings: BatchesSettings,
        metrics: BatchMetrics,
    ) -> None:
        self._batches = batches
        self._files = files
        self._storage = storage
        self._clients = clients
        self._settings = settings
        self._metrics = metrics
        self._requests = LineRequests(storage, clients)

    async def tick(self, batch_id: str, *, budget_s: float) -> bool:
        """Drive a batch for at most about this long; returns whether more is to be done.

        Returns at once if another driver has it.

        Raises:
            UnknownBatch: there is none of this id.
        """
        async with self._batches.drive(batch_id) as held:
            if not held:
                return False
            with self._metrics.driven.track_inprogress():
                return await self._drive(batch_id, time.monotonic() + budget_s)

    async def _drive(self, batch_id: str, stop: float) -> bool:
        while time.monotonic() < stop:
            batch = await self._batches.get(batch_id)
            step = self._step(batch)
            if step is None:
                self._requests.forget(batch_id)
                return False
            try:
                await step(batch)
            except BatchChanged:
                continue  # by a cancellation: go on from there
            except (UnknownFile, FileNotFoundError):
                await self._fail_without_input(batch)
        return True

    async def _change(self, before: Batch, after: Batch) -> Batch:
        stored = await self._batches.change(before, after)
        self._metrics.changed(before, stored)
        return stored

    def _step(self, batch: Batch) -> Callable[[Batch], Awaitable[None]] | None:
        if batch.state is BatchState.VALIDATING:
            return self._validate
        if batch.state is BatchState.IN_PROGRESS:
            return self._progress
        if batch.state is BatchState.CANCELLING:
            return self._wind_down
        if batch.state is BatchState.FINALIZING:
            return self._finalize
        return None

    async def _validate(self, batch: Batch) -> None:
        """Check the next slice of the input."""
        file = await self._files.get(batch.input_file_id)
        endpoint = line_endpoint(batch.endpoint)
        name = f"batches/{batch.id}/plan/{len(batch.pieces):06d}-{secrets.token_hex(4)}"

        def read() -> Slice:
            with self._storage.open(FileStore.body(file.id)) as body:
                found = read_slice(
                    body,
                    batch,
                    endpoint.translate,
                    max_lines=self._settings.max_lines,
                    max_line_bytes=self._settings.max_line_bytes,
                )
            self._storage.write(name, [found.pack()])
            return found

        found = await asyncio.to_thread(read)
        changes = {
            "read_bytes": found.end,
            "read_lines": found.lines,
            "model": found.model,
            "pieces": (*batch.pieces, name),
            **_more_errors(batch, found.errors),
        }
        after = batch.model_copy(update=changes)
        if found.last:
            after = await self._finish_validation(after)
        await self._change(batch, after)

    async def _finish_validation(self, batch: Batch) -> Batch:
        def merge() -> tuple[bytes, list[LineError]]:
            plan, errors = make_plan(self._storage.read(piece) for piece in batch.pieces)
            self._storage.write(plan_name(batch), [plan])
            return plan, errors

        plan, errors = await asyncio.to_thread(merge)
        total = len(Plan(plan))
        if not total and not batch.num_errors:
            errors = [LineError(code="empty_file", message="the file has no line")]
        batch = batch.model_copy(update={"total": total, **_more_errors(batch, errors)})
        if batch.num_errors:
            return batch.into(BatchState.FAILED, _now())
        shards = await self._clients.shards(batch.model)
        return batch.into(BatchState.IN_PROGRESS, _now(), shards=shards)

    async def _progress(self, batch: Batch) -> None:
        """Submit what there is room for, wait until something ends, and record it."""
        if _now() >= batch.expires_at:
            await self._change(batch, await self._stop(batch, BatchState.EXPIRED))
            return
        if batch.next_line == batch.total and not batch.in_flight:
            after = batch.into(BatchState.FINALIZING, _now(), outcome=BatchState.COMPLETED)
            await self._change(batch, after)
            return
        room = self._settings.in_flight - len(batch.in_flight)
        places = range(batch.next_line, min(batch.next_line + room, batch.total))
        accepted = await self._requests.submit(batch, places)
        if accepted:  # recorded at once: a stop has to know what is in flight
            changes = {
                "next_line": batch.next_line + len(accepted),
                "in_flight": (*batch.in_flight, *accepted),
            }
            batch = await self._change(batch, batch.model_copy(update=changes))
        finished = FinishedLines()
        await self._requests.collect(batch, await self._requests.wait_for_ends(batch), finished)
        if finished.places:
            after = await asyncio.to_thread(write_parts, self._storage, batch, finished)
            await self._change(batch, after)

    async def _wind_down(self, batch: Batch) -> None:
        await self._change(batch, await self._stop(batch, BatchState.CANCELLED))

    async def _stop(self, batch: Batch, outcome: BatchState) -> Batch:
        """Cancel what is in flight; lines that ended before keep their answers."""
        await self._requests.cancel(batch)
        return batch.into(BatchState.FINALIZING, _now(), outcome=outcome)

    async def _finalize(self, batch: Batch) -> None:
        """Put the parts together, and end the batch."""
        assert batch.outcome is not None
        whole = batch
        if batch.outcome in _GIVEN_UP and batch.total:
            whole = await self._give_up(batch)
        output = await self._publish(whole, whole.parts, "output")
        errors = await self._publish(whole, whole.error_parts, "error")
        after = whole.into(batch.outcome, _now(), output_file_id=output, error_file_id=errors)
        await self._change(batch, after)
        await asyncio.to_thread(self._storage.delete, f"batches/{batch.id}")

    async def _give_up(self, batch: Batch) -> Batch:
        """The batch with what ended before it was stopped, and an error for every other line."""
        assert batch.outcome is not None
        ended = FinishedLines()
        await self._requests.collect(batch, await self._requests.ended(batch), ended)
        code, message = _GIVEN_UP[batch.outcome]
        open_places = [p for p in batch.in_flight if p not in ended.places]
        lines = self._requests.lines
        plan = await lines.plan(batch)
        for group in groups([*open_places, *range(batch.next_line, batch.total)]):
            for place, line in zip(group, await lines.read(batch, group), strict=True):
                output = {
                    "id": f"batch_req_{batch.request_id(plan[place].number)}",
                    "custom_id": line.custom_id,
                    "response": None,
                    "error": {"code": code, "message": message},
                }
                ended.add(place, output, None)
        return await asyncio.to_thread(write_parts, self._storage, batch, ended)

    async def _publish(self, batch: Batch, parts: Sequence[str], kind: str) -> str | None:
        """Make one file of part files; the same file if it is made twice."""
        if not parts:
            return None
        file_id = f"file-{batch.id.removeprefix('batch_')}-{kind}"
        size = await asyncio.to_thread(
            self._storage.write, FileStore.body(file_id), self._storage.chunks(parts)
        )
        life_s = batch.output_expires_after_s or self._settings.file_expiry_s
        now = _now()
        await self._files.register(
            StoredFile(
                id=file_id,
                tenant=batch.tenant,
                filename=f"{batch.id}_{kind}.jsonl",
                purpose=FilePurpose.BATCH_OUTPUT,
                size=size,
                created_at=now,
                expires_at=now + life_s,
            )
        )
        return file_id

    async def _fail_without_input(self, batch: Batch) -> None:
        await self._requests.cancel(batch)
        message = f"the input file {batch.input_file_id} was deleted"
        error = LineError(code="input_file_deleted", message=message, param="input_file_id")
        changes = {
            "output_file_id": await self._publish(batch, batch.parts, "output"),
            "error_file_id": await self._publish(batch, batch.error_parts, "error"),
            **_more_errors(batch, [error]),
        }
        await self._change(batch, batch.into(BatchState.FAILED, _now(), **changes))


def _more_errors(batch: Batch, errors: Sequence[LineError]) -> dict[str, Any]:
    """Changes that add errors: all are counted, the first are kept."""
    return {
        "errors": (*batch.errors, *errors)[:_KEPT_ERRORS],
        "num_errors": batch.num_errors + len(errors),
    }


def _now() -> int:
    return int(time.time())
