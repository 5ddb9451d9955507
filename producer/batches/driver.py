"""Drives a batch from one state to the next, a bounded stretch at a time.

Every step reads the record, does something that may be done twice, and then writes the next
version of the record. A driver that dies between the two leaves nothing that matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.exceptions import RedisError

from penstock.shared.errors import RedisUnavailable
from penstock.shared.quoting import one_line
from penstock.shared.settings import BatchesSettings

from .batch_metrics import BatchMetrics
from .clients import Clients
from .lines.input_lines import Slice, read_slice
from .lines.line_endpoints import line_endpoint
from .lines.line_order import Plan, make_plan
from .lines.line_requests import LineRequests, groups
from .lines.open_lines import plan_name
from .lines.parts import FinishedLines, write_parts
from .stores.batch_store import BatchChanged, BatchStore, UnknownBatch
from .stores.file_store import FileStore, UnknownFile
from .stores.leftovers import Leftovers
from .stores.records import Batch, BatchState, FilePurpose, LineError, StoredFile, batch_folder
from .stores.storage import Storage, StorageError

__all__ = ["Driver"]

_KEPT_ERRORS = 100
_PATIENCE_S = 3600
_PAUSE_S = 5.0
_OPEN_STATES = (BatchState.VALIDATING, BatchState.IN_PROGRESS)
_GIVEN_UP = {
    BatchState.EXPIRED: ("batch_expired", "the batch's window ended before this line did"),
    BatchState.CANCELLED: ("batch_cancelled", "the batch was cancelled before this line ended"),
}
"""Code and message of lines without an answer."""

_log = logging.getLogger(__name__)


class Driver:
    """Moves batches on.

    Args:
        batches: their records.
        files: their inputs and outputs.
        storage: where bodies are.
        leftovers: what it is to be rid of.
        clients: one for each shard.
        settings: limits.
        metrics: what is counted.
    """

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        storage: Storage,
        leftovers: Leftovers,
        clients: Clients,
        settings: BatchesSettings,
        metrics: BatchMetrics,
    ) -> None:
        self._batches = batches
        self._files = files
        self._storage = storage
        self._leftovers = leftovers
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
                try:
                    more = await self._drive(batch_id, time.monotonic() + budget_s)
                except UnknownBatch:
                    await self._batches.retire(batch_id)
                    raise
                if not more:
                    await self._batches.retire(batch_id)
                return more

    async def _drive(self, batch_id: str, stop: float) -> bool:
        while time.monotonic() < stop:
            batch = await self._batches.get(batch_id)
            step = self._step(batch)
            if step is None:
                self._requests.forget(batch_id)
                return False
            try:
                await self._take(step, batch)
            except BatchChanged:
                continue  # by a cancellation: go on from there
            except (RedisUnavailable, RedisError):
                raise
            except Exception as error:  # of the storage, or a bug: one batch waits, and says why
                await self._wait_out(batch, error, stop)
        return True

    async def _take(self, step: Callable[[Batch], Awaitable[None]], batch: Batch) -> None:
        try:
            await step(batch)
        except (UnknownFile, FileNotFoundError) as error:
            if await self._files.is_known(batch.input_file_id):
                raise StorageError(f"missing in batches.storage: {error}") from error
            message = f"the input file {batch.input_file_id} was deleted"
            lacking = LineError(code="input_file_deleted", message=message, param="input_file_id")
            await self._fail(batch, lacking)

    async def _wait_out(self, batch: Batch, error: Exception, stop: float) -> None:
        """Say in the record what is wrong, and pause; a batch long past its window fails."""
        text = one_line(f"{error}" or type(error).__name__, 300)
        since = batch.trouble_since or _now()
        with contextlib.suppress(BatchChanged):
            if _now() >= max(since, batch.expires_at) + _PATIENCE_S:
                await self._fail(batch, LineError(code="storage_unavailable", message=text))
                return
            if text != batch.trouble:
                bug = None if isinstance(error, StorageError | OSError) else error
                _log.warning("batch %s waits: %s", batch.id, text, exc_info=bug)
                troubled = {"trouble": text, "trouble_since": since}
                await self._batches.change(batch, batch.model_copy(update=troubled))
        await asyncio.sleep(max(0.0, min(_PAUSE_S, stop - time.monotonic())))

    async def _change(self, before: Batch, after: Batch) -> Batch:
        if before.trouble:  # it is over
            after = after.model_copy(update={"trouble": "", "trouble_since": None})
        stored = await self._batches.change(before, after)
        self._metrics.changed(before, stored)
        return stored

    def _step(self, batch: Batch) -> Callable[[Batch], Awaitable[None]] | None:
        if batch.state in _OPEN_STATES and _now() >= batch.expires_at:
            return self._expire
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
        name = f"{batch_folder(batch.id)}/plan/{len(batch.pieces):06d}-{secrets.token_hex(4)}"

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

    async def _expire(self, batch: Batch) -> None:
        await self._change(batch, await self._stop(batch, BatchState.EXPIRED))

    async def _wind_down(self, batch: Batch) -> None:
        await self._change(batch, await self._stop(batch, BatchState.CANCELLED))

    async def _stop(self, batch: Batch, outcome: BatchState) -> Batch:
        """Cancel what is in flight; lines that ended before keep their answers."""
        batch = await self._recovered(batch)
        await self._requests.cancel(batch)
        return batch.into(BatchState.FINALIZING, _now(), outcome=outcome)

    async def _recovered(self, batch: Batch) -> Batch:
        """The batch with what was submitted last, which its record may lack."""
        end = min(batch.next_line + self._settings.in_flight, batch.total)
        if end <= batch.next_line:
            return batch
        return await self._requests.recover(batch, range(batch.next_line, end))

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
        await self._leftovers.clear(batch_folder(batch.id))

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
        await self._files.expect(file_id)
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

    async def _fail(self, batch: Batch, error: LineError) -> None:
        """End a batch with what can still be handed out."""
        broken = (StorageError, OSError)
        with contextlib.suppress(*broken):
            await self._requests.cancel(await self._recovered(batch))
        changes: dict[str, Any] = _more_errors(batch, [error])
        for field, parts in (("output", batch.parts), ("error", batch.error_parts)):
            try:
                changes[f"{field}_file_id"] = await self._publish(batch, parts, field)
            except broken:
                if error.code != "storage_unavailable":
                    raise  # they may be readable in a while
        await self._change(batch, batch.into(BatchState.FAILED, _now(), **changes))
        await self._leftovers.clear(batch_folder(batch.id))


def _more_errors(batch: Batch, errors: Sequence[LineError]) -> dict[str, Any]:
    """Changes that add errors: all are counted, the first are kept."""
    return {
        "errors": (*batch.errors, *errors)[:_KEPT_ERRORS],
        "num_errors": batch.num_errors + len(errors),
    }


def _now() -> int:
    return int(time.time())
