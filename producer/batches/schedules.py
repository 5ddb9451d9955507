"""Schedules: batches that start by the clock, each firing once however many processes look."""

from __future__ import annotations

import datetime
import hashlib
import logging
import re
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from redis.exceptions import WatchError

from penstock.shared.errors import InvalidRequest, PenstockError
from penstock.shared.keys import BatchKeys
from penstock.shared.quoting import quote
from penstock.shared.redis.retrying_client import RetryingClient

__all__ = ["Schedule", "ScheduleStore", "UnknownSchedule", "check_cron"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class UnknownSchedule(PenstockError):
    """No schedule of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no schedule {name!r}; `penstock schedule list` shows them")


class Schedule(BaseModel):
    """What starts when.

    Attributes:
        name: its name.
        cron: five fields: minute, hour, day of the month, month, day of the week. In UTC.
        file_id: the input; it must not expire.
        endpoint: see :class:`.stores.records.Batch`, as for the fields below.
        tenant: who pays.
        lane: urgency.
        window_s: time of each batch.
        webhook: URL to call at the end of each.
        next_at: when it fires next, in seconds of the Unix epoch.
        last_batch_id: the batch of its last firing; empty if that made none.
        error: why the last firing made no batch; empty if it made one.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    cron: str
    file_id: str
    endpoint: str
    tenant: str
    lane: str = "batch"
    window_s: int
    webhook: str | None = None
    next_at: int
    last_batch_id: str = ""
    error: str = ""

    @property
    def batch_id(self) -> str:
        """Id of the batch of the next firing: the same for all who see it due."""
        seed = f"{self.name} {self.cron} {self.file_id} {self.next_at}"
        return f"batch_{hashlib.sha256(seed.encode()).hexdigest()[:24]}"

    def after(self, now: int, *, batch_id: str = "", error: str = "") -> Schedule:
        """The schedule with its next firing after ``now``, and what became of this one.

        Firings that were missed are skipped.
        """
        next_at = next_firing(self.cron, now)
        return self.model_copy(
            update={"next_at": next_at, "last_batch_id": batch_id, "error": error}
        )


class ScheduleStore:
    """The schedules of one Redis server.

    Args:
        client: the connection.
    """

    def __init__(self, client: RetryingClient) -> None:
        self._client = client
        self._redis: Any = client.redis
        self._key = BatchKeys().schedules

    async def put(self, schedule: Schedule) -> None:
        """Store a schedule in place of one of its name."""
        data = schedule.model_dump_json()
        await self._client.call(lambda: self._redis.hset(self._key, schedule.name, data))

    async def replace(self, before: Schedule, after: Schedule) -> bool:
        """Store a schedule unless it was changed or removed meanwhile; returns whether it was.

        A second time, because the reply to the first was lost, changes nothing.
        """
        name = before.name

        async def send() -> bool | None:
            async with self._redis.pipeline(transaction=True) as pipe:
                await pipe.watch(self._key)
                data = await pipe.hget(self._key, name)
                if data is None or Schedule.model_validate_json(data) != before:
                    return False
                pipe.multi()
                pipe.hset(self._key, name, after.model_dump_json())
                try:
                    await pipe.execute()
                except WatchError:  # of another schedule, perhaps
                    return None
                return True

        while (replaced := await self._client.call(send)) is None:
            pass
        return replaced

    async def get(self, name: str) -> Schedule | None:
        """A schedule; None if there is none of this name."""
        data = await self._client.call(lambda: self._redis.hget(self._key, name))
        return None if data is None else Schedule.model_validate_json(data)

    async def remove(self, name: str) -> None:
        """Forget a schedule; batches that it started go on.

        Raises:
            UnknownSchedule: there is none of this name.
        """
        known = name.isascii()  # else it may not even have bytes
        if not known or not await self._client.call(lambda: self._redis.hdel(self._key, name)):
            raise UnknownSchedule(name)

    async def all(self) -> list[Schedule]:
        """All of them, by name, but for records that cannot be read; those are logged."""
        found = await self._client.call(lambda: self._redis.hgetall(self._key))
        schedules = []
        for name, data in found.items():
            try:
                schedules.append(Schedule.model_validate_json(data))
            except ValidationError:
                shown = quote(name.decode(errors="replace"))
                _log.warning("schedule %s cannot be read; remove it and add it again", shown)
        return sorted(schedules, key=lambda schedule: schedule.name)


def check_cron(cron: str) -> str:
    """Return a cron expression of five fields.

    Raises:
        InvalidRequest: it is none.
    """
    from croniter import CroniterBadDateError, croniter

    allowed = "five fields: minute, hour, day of the month, month, day of the week"
    if len(cron) > 100 or len(cron.split()) != 5 or not croniter.is_valid(cron):
        raise InvalidRequest("cron", cron, f"{allowed}, as in '0 2 * * *'")
    try:
        next_firing(cron, int(time.time()))
    except CroniterBadDateError:
        raise InvalidRequest("cron", cron, f"{allowed}, of a day that comes") from None
    return cron


def check_schedule_name(name: str) -> str:
    """Return a schedule's name.

    Raises:
        InvalidRequest: it is none.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequest("name", name, "1 to 64 characters of A-Z a-z 0-9 _ . -")
    return name


def next_firing(cron: str, now: int) -> int:
    """When an expression fires next after ``now``, in seconds of the Unix epoch, by UTC."""
    from croniter import croniter

    start = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return int(croniter(cron, start).get_next(float))
