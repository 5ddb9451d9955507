"""Batches as callers see them: create, look, cancel, and what comes out."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from penstock.shared.errors import ConfigurationError, InvalidRequest
from penstock.shared.protocol.parsing import find_half_surrogate
from penstock.shared.protocol.request import check_tenant
from penstock.shared.protocol.states import Lane
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings

from .batch_metrics import BatchMetrics
from .clients import Clients
from .driver import Driver
from .lines.line_endpoints import line_endpoint
from .schedules import Schedule, ScheduleStore, check_cron, check_schedule_name, next_firing
from .stores.batch_store import BatchChanged, BatchStore
from .stores.file_store import FileStore, UnknownFile
from .stores.leftovers import Leftovers
from .stores.records import Batch, BatchState, FilePurpose, new_batch_id
from .stores.storage import Storage
from .webhooks.delivery_store import DeliveryStore
from .webhooks.request_ends import RequestEnds
from .webhooks.webhook_url import check_webhook_url

__all__ = ["BatchService"]

_log = logging.getLogger(__name__)

_MAX_METADATA = 16
_MAX_KEY_CHARS = 64
_MAX_VALUE_CHARS = 512
_WINDOW_S = (60, 7 * 24 * 3600)


class BatchService:
    """Everything about batches on one Redis server and storage.

    Args:
        client: the connection.
        settings: the whole tree.

    Raises:
        ConfigurationError: the storage cannot be used.
    """

    def __init__(self, client: RetryingClient, settings: Settings) -> None:
        self._settings = settings
        own = settings.batches
        self._storage = Storage(own.storage)
        self._clients = Clients(settings)
        self.leftovers = Leftovers(client, self._storage)
        self.files = FileStore(client, self._storage, self.leftovers, max_bytes=own.max_file_bytes)
        self.batches = BatchStore(client, keep_s=own.file_expiry_s)
        self.schedules = ScheduleStore(client)
        self.deliveries = DeliveryStore(client)
        self.request_ends = RequestEnds(client, self._clients)

    def driver(self, metrics: BatchMetrics) -> Driver:
        """What moves these batches on, and counts that."""
        return Driver(
            self.batches,
            self.files,
            self._storage,
            self.leftovers,
            self._clients,
            self._settings.batches,
            metrics,
        )

    async def aclose(self) -> None:
        """Close the clients of the queue."""
        await self._clients.aclose()

    async def create(
        self,
        *,
        input_file_id: str,
        endpoint: str,
        tenant: str,
        lane: Lane = Lane.BATCH,
        window_s: int = 24 * 3600,
        metadata: Mapping[str, str] | None = None,
        webhook: str | None = None,
        output_expires_after_s: int | None = None,
        models: frozenset[str] | None = None,
        batch_id: str | None = None,
    ) -> Batch:
        """Start a batch over a file of lines.

        Args:
            input_file_id: its lines.
            endpoint: the URL that they name.
            tenant: who pays; the file must be this tenant's.
            lane: urgency.
            window_s: what has not ended then is given up.
            metadata: at most 16 pairs of the caller's own.
            webhook: URL to call at its end.
            output_expires_after_s: life of its output files; None for the setting's.
            models: the models that lines may name; None for all.
            batch_id: the same id starts one batch; None makes one.

        Raises:
            InvalidRequest: an argument is wrong.
            UnknownFile: this tenant has no such file.
        """
        _check_batch(endpoint, tenant, window_s, webhook)
        file = await self.files.get(input_file_id, tenant)
        if file.purpose is not FilePurpose.BATCH:
            raise InvalidRequest("input_file_id", input_file_id, "a file of purpose batch")
        now = int(time.time())
        batch = Batch(
            id=batch_id or new_batch_id(),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            lane=lane,
            window_s=window_s,
            metadata=_check_metadata(metadata),
            webhook=webhook,
            output_expires_after_s=output_expires_after_s,
            models=None if models is None else tuple(sorted(models)),
            times={BatchState.VALIDATING: now},
            expires_at=now + window_s,
        )
        return await self.batches.create(batch)

    async def cancel(self, batch_id: str, tenant: str | None) -> Batch:
        """Stop a batch; one that has ended, or ends anyway, stays as it is.

        Raises:
            UnknownBatch: there is none of this tenant.
        """
        while True:
            batch = await self.batches.get(batch_id, tenant)
            if batch.state not in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
                return batch
            after = batch.into(BatchState.CANCELLING, int(time.time()))
            try:
                return await self.batches.change(batch, after)
            except BatchChanged:
                continue  # its driver moved it on meanwhile

    def check_schedule(
        self,
        name: str,
        cron: str,
        *,
        endpoint: str,
        tenant: str,
        window_s: int,
        webhook: str | None,
    ) -> None:
        """Refuse what :meth:`schedule` would, before its file is stored.

        Raises:
            InvalidRequest: an argument is wrong.
        """
        check_schedule_name(name)
        check_cron(cron)
        _check_batch(endpoint, tenant, window_s, webhook)

    async def schedule(
        self,
        name: str,
        cron: str,
        *,
        file_id: str,
        endpoint: str,
        tenant: str,
        lane: Lane = Lane.BATCH,
        window_s: int = 24 * 3600,
        webhook: str | None = None,
    ) -> Schedule:
        """Start a batch by the clock, again and again.

        Raises:
            InvalidRequest: an argument is wrong, or the file will expire.
            UnknownFile: this tenant has no such file.
        """
        self.check_schedule(
            name, cron, endpoint=endpoint, tenant=tenant, window_s=window_s, webhook=webhook
        )
        file = await self.files.get(file_id, tenant)
        if file.expires_at is not None:
            raise InvalidRequest("file", file_id, "a file that does not expire")
        schedule = Schedule(
            name=name,
            cron=cron,
            file_id=file_id,
            endpoint=endpoint,
            tenant=tenant,
            lane=lane.value,
            window_s=window_s,
            webhook=webhook,
            next_at=next_firing(cron, int(time.time())),
        )
        replaced = await self.schedules.get(name)
        await self.schedules.put(schedule)
        if replaced is not None and replaced.file_id != file_id:
            await self._release(replaced.file_id)
        return schedule

    async def unschedule(self, name: str) -> None:
        """Forget a schedule; batches that it started go on. Its file is kept as long as outputs.

        Raises:
            UnknownSchedule: there is none of this name.
        """
        removed = await self.schedules.get(name) if name.isascii() else None
        await self.schedules.remove(name)
        if removed is not None:
            await self._release(removed.file_id)

    async def fire_schedules(self) -> None:
        """Start the batches whose time has come. One that cannot be started says so in its record.

        The batch's id follows from the schedule and the firing's time. So a firing is one batch,
        even if several processes see it or one sees it twice.
        """
        now = int(time.time())
        for schedule in await self.schedules.all():
            if schedule.next_at > now:
                continue
            try:
                batch = await self.create(
                    input_file_id=schedule.file_id,
                    endpoint=schedule.endpoint,
                    tenant=schedule.tenant,
                    lane=Lane(schedule.lane),
                    window_s=schedule.window_s,
                    webhook=schedule.webhook,
                    batch_id=schedule.batch_id,
                )
                after = schedule.after(now, batch_id=batch.id)
            except (InvalidRequest, UnknownFile) as error:
                _log.warning("schedule %s made no batch: %s", schedule.name, error)
                after = schedule.after(now, error=str(error))
            await self.schedules.replace(schedule, after)

    async def _release(self, file_id: str) -> None:
        """Let the file of a schedule that is gone expire, unless another one needs it."""
        if file_id not in {other.file_id for other in await self.schedules.all()}:
            await self.files.expire(file_id, self._settings.batches.file_expiry_s)

    def webhook_secrets(self) -> list[str]:
        """The secrets that calls are signed with, from the settings' file.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        path = self._settings.batches.webhook_secrets
        if path is None:
            return []
        try:
            return path.read_text().split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"batches.webhook_secrets: {path}: {error}") from None


def _check_batch(endpoint: str, tenant: str, window_s: int, webhook: str | None) -> None:
    line_endpoint(endpoint)
    check_tenant(tenant)
    low, high = _WINDOW_S
    if not low <= window_s <= high:
        raise InvalidRequest("window", window_s, f"{low} to {high} seconds")
    if webhook is not None:
        check_webhook_url(webhook)


def _check_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    allowed = (
        f"at most {_MAX_METADATA} pairs of text: names of at most {_MAX_KEY_CHARS} characters, "
        f"values of at most {_MAX_VALUE_CHARS}, without lone surrogates"
    )
    right = len(metadata) <= _MAX_METADATA and all(
        isinstance(name, str)
        and len(name) <= _MAX_KEY_CHARS
        and isinstance(value, str)
        and len(value) <= _MAX_VALUE_CHARS
        for name, value in metadata.items()
    )
    if not right or find_half_surrogate(dict(metadata)) is not None:
        raise InvalidRequest("metadata", metadata, allowed)
    return dict(metadata)
