"""Schedules: each firing is one batch, however many processes see it."""

from __future__ import annotations

import asyncio

import pytest
from batches.conftest import completion_lines, upload

from penstock.producer.batches.batch_service import BatchService
from penstock.producer.batches.schedules import Schedule, UnknownSchedule, next_firing
from penstock.shared.errors import InvalidRequest


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


def test_next_firing_is_after_now_in_utc() -> None:
    assert next_firing("0 2 * * *", 0) == 2 * 3600
    assert next_firing("0 2 * * *", 2 * 3600) == 26 * 3600
    assert next_firing("*/15 * * * *", 1) == 900


@pytest.mark.parametrize("cron", ["", "* * * *", "61 * * * *", "@daily", "* * * * * *", "x" * 200])
async def test_expression_that_is_none_is_refused(service: BatchService, cron: str) -> None:
    with pytest.raises(InvalidRequest, match="cron"):
        await add(service, "broken", cron)
