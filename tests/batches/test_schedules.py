"""Schedules: each firing is one batch, however many processes see it."""

from __future__ import annotations

import asyncio
import time

import pytest
from batches.conftest import completion_lines, drive, upload

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.schedules import Schedule, UnknownSchedule, next_firing
from penstock.producer.batches.stores.records import BatchState
from penstock.shared.errors import InvalidRequest
from penstock.shared.keys import BatchKeys
from penstock.shared.redis.retrying_client import RetryingClient


async def add(service: BatchService, name: str, cron: str = "0 2 * * *") -> Schedule:
    name_of_file = await upload(service, completion_lines(2), "clock")
    return await service.schedule(
        name, cron, file_id=name_of_file, endpoint="/v1/completions", tenant="clock"
    )


async def test_a_firing_that_many_see_is_one_batch(service: BatchService) -> None:
    schedule = await add(service, "nightly")
    due = schedule.model_copy(update={"next_at": 1_700_000_000})
    await service.schedules.put(due)
    await asyncio.gather(*(service.fire_schedules() for _ in range(8)))
    found, _ = await service.batches.page("clock", limit=100)
    assert [batch.id for batch in found] == [due.batch_id]
    [after] = await service.schedules.all()
    assert after.next_at > 1_700_000_000
    await service.schedules.remove("nightly")
    with pytest.raises(UnknownSchedule):
        await service.schedules.remove("nightly")


async def test_schedule_that_cannot_fire_says_so_and_holds_up_no_other(
    service: BatchService,
) -> None:
    lost, good = await add(service, "a-lost"), await add(service, "b-good")
    await service.files.delete(await service.files.get(lost.file_id))
    for schedule in (lost, good):
        await service.schedules.put(schedule.model_copy(update={"next_at": 1_700_000_000}))
    before = int(time.time())
    await service.fire_schedules()
    lost, good = await service.schedules.all()
    assert "no file" in lost.error
    assert not lost.last_batch_id
    assert min(lost.next_at, good.next_at) > before
    assert (await service.batches.get(good.last_batch_id)).input_file_id == good.file_id
    for name in ("a-lost", "b-good"):
        await service.unschedule(name)


async def test_record_that_cannot_be_read_hides_no_other(
    service: BatchService, client: RetryingClient, caplog: pytest.LogCaptureFixture
) -> None:
    good = await add(service, "good")
    await client.redis.hset(BatchKeys().schedules, "odd", "{}")  # type: ignore[misc]
    assert await service.schedules.all() == [good]
    assert "schedule 'odd' cannot be read" in caplog.text
    for name in ("odd", "good"):
        await service.schedules.remove(name)


async def test_schedule_removed_or_changed_while_it_fires_stays_so(service: BatchService) -> None:
    seen = await add(service, "nightly")
    changed = await add(service, "nightly", "0 3 * * *")
    assert not await service.schedules.replace(seen, seen.after(seen.next_at))
    assert await service.schedules.all() == [changed]
    assert await service.schedules.replace(changed, changed.after(changed.next_at))
    await service.unschedule("nightly")
    assert not await service.schedules.replace(changed, changed.after(changed.next_at))
    assert await service.schedules.all() == []


async def test_file_of_a_schedule_that_is_gone_expires_once_no_other_needs_it(
    service: BatchService,
) -> None:
    first = await add(service, "first")
    options = {"file_id": first.file_id, "endpoint": first.endpoint, "tenant": "clock"}
    await service.schedule("second", "0 4 * * *", **options)
    await service.unschedule("first")
    assert (await service.files.get(first.file_id)).expires_at is None
    await add(service, "second")  # in its place, with a file of its own
    assert (await service.files.get(first.file_id)).expires_at is not None
    await service.unschedule("second")


async def test_firing_that_is_seen_late_does_not_revive_its_batch(service: BatchService) -> None:
    file_id = await upload(service, b"{}\n", "clock")
    options = {"input_file_id": file_id, "endpoint": "/v1/completions", "tenant": "clock"}
    batch = await service.create(**options, batch_id="batch_late")
    ended = await drive(service, batch)
    assert ended.state is BatchState.FAILED
    assert await service.create(**options, batch_id="batch_late") == ended
    assert batch.id not in await service.batches.active()


def test_next_firing_is_after_now_in_utc() -> None:
    assert next_firing("0 2 * * *", 0) == 2 * 3600
    assert next_firing("0 2 * * *", 2 * 3600) == 26 * 3600
    assert next_firing("*/15 * * * *", 1) == 900


@pytest.mark.parametrize(
    "cron",
    [
        "",
        "* * * *",
        "61 * * * *",
        "@daily",
        "* * * * * *",
        "x" * 200,
        "0 0 30 2 *",
        "\udcff 2 * * *",
    ],
)
async def test_expression_that_is_none_is_refused(service: BatchService, cron: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cron: got .*; allowed: five fields"):
        await add(service, "broken", cron)
