"""What the commands about batches share: the service, and how a batch is shown."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from penstock.shared.keys import BatchKeys
from penstock.shared.local.embedded import require_url
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.settings import Settings

if TYPE_CHECKING:
    from ...batches.batch_service import BatchService
    from ...batches.stores.records import Batch
    from ...batches.webhooks.request_ends import RequestWatch

__all__ = ["batch_facts", "open_client", "open_service", "open_watch", "when", "when_utc"]


@contextlib.asynccontextmanager
async def open_client(settings: Settings) -> AsyncIterator[RetryingClient]:
    """A connection to the server of the settings.

    Raises:
        RedisUnavailable: it cannot be reached.
    """
    client = RetryingClient(
        require_url(settings.redis), socket_timeout_s=settings.redis.socket_timeout_s
    )
    try:
        await client.connect(BatchKeys().active)
        yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def open_service(settings: Settings) -> AsyncIterator[BatchService]:
    """The batches of the settings.

    Raises:
        RedisUnavailable: the server cannot be reached.
        ConfigurationError: the storage cannot be used.
    """
    from ...batches.batch_service import BatchService  # its packages are an extra of their own

    async with open_client(settings) as client:
        service = BatchService(client, settings)
        try:
            yield service
        finally:
            await service.aclose()


@contextlib.asynccontextmanager
async def open_watch(settings: Settings, url: str | None) -> AsyncIterator[RequestWatch | None]:
    """What keeps the webhook of a request that is about to be submitted; None without a URL.

    Raises:
        InvalidRequest: the URL is wrong.
        QueueFull: too many requests are watched.
        RedisUnavailable: the server cannot be reached.
    """
    if url is None:
        yield None
        return
    from ...batches.webhooks.request_ends import RequestWatch  # loads what few requests need

    async with open_client(settings) as client:
        watch = RequestWatch(client)
        await watch.check(url)
        yield watch


def batch_facts(batch: Batch) -> dict[str, Any]:
    """A batch for ``--json``."""
    return {
        "id": batch.id,
        "state": batch.state.value,
        "endpoint": batch.endpoint,
        "model": batch.model,
        "tenant": batch.tenant,
        "lane": batch.lane.value,
        "total": batch.total,
        "completed": batch.completed,
        "failed": batch.failed,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "errors": [error.model_dump() for error in batch.errors],
        "num_errors": batch.num_errors,
        "trouble": batch.trouble,
        "usage": batch.usage.model_dump(),
    }


def when(seconds: int | None) -> str:
    """A time of the Unix epoch for people."""
    if seconds is None:
        return "never"
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def when_utc(seconds: int) -> str:
    """The same in the time zone of cron expressions, which it names."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
