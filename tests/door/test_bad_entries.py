"""Whatever stands in an entry, it gets its end, and those behind it are served."""

from __future__ import annotations

import asyncio
import threading

import pytest
from door.plain import PlainDoor

from penstock.gpu_worker.edge import ingress
from penstock.shared.protocol.events import End
from penstock.shared.protocol.plain_entry import Admission, Entry, Refusal, read_entry
from penstock.shared.protocol.states import Answer, Reason

BAD = "bad"


async def ends(door: PlainDoor, *ids: str) -> list[End]:
    """The ends of entries that a worker's own loop has refused, and that of no other."""

    async def all_are_there() -> bool:
        return all([await door.redis.exists(door.keys.log(id)) for id in ids])

    async with door.loop("w"):
        await door.until(all_are_there, "each has its end")

        async def nothing_is_left() -> bool:
            return await door.left() == (0, 0)

        await door.until(nothing_is_left, "the entries behind were taken in")
    return [await door.shard.end(id) for id in ids]


async def test_half_a_surrogate_in_a_name_of_a_map(door: PlainDoor) -> None:
    await door.add(id=BAD, prompt="x", logit_bias='{"\\ud800":1}')
    await door.add(id="behind", prompt="x")
    (end,) = await ends(door, BAD)
    assert end.reason is Reason.INVALID
    assert "\\ud800" in end.message
    assert await door.shard.state("behind") == "queued"


@pytest.mark.parametrize(
    "outcome",
    [
        RecursionError("maximum recursion depth exceeded"),
        MemoryError(),
        UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
        Refusal(BAD, Answer.MSGPACK, Reason.INVALID, "got '\ud800\n' and " + "x" * 100_000),
        Refusal("\ud800", Answer.MSGPACK, Reason.INVALID, "its id cannot be sent"),
    ],
    ids=["deep", "memory", "encoding", "message", "id"],
)
async def test_whatever_reading_it_brings(
    door: PlainDoor, monkeypatch: pytest.MonkeyPatch, outcome: Exception | Refusal
) -> None:
    def read(entry: Entry) -> Admission | Refusal:
        if b"poison" not in entry.fields:
            return read_entry(entry)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(ingress, "read_entry", read)
    await door.add(id=BAD, prompt="poison")
    for number in range(3):
        await door.add(id=f"behind{number}", prompt="x")
    (end,) = await ends(door, BAD)
    assert end.reason in (Reason.ENGINE_ERROR, Reason.INVALID)
    assert end.message.isprintable()
    assert len(end.message) < 2000
    assert [await door.shard.state(f"behind{number}") for number in range(3)] == ["queued"] * 3


async def test_large_entries_are_not_parsed_on_the_event_loop(
    door: PlainDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsing waits here for a turn of the event loop: on that loop it would wait for ever."""
    asked, answered = threading.Event(), threading.Event()

    def read(entry: Entry) -> Admission | Refusal:
        asked.set()
        assert answered.wait(30)
        return read_entry(entry)

    async def neighbour() -> None:
        while not asked.is_set():
            await asyncio.sleep(0.001)
        answered.set()

    monkeypatch.setattr(ingress, "read_entry", read)
    await door.add(id="large", prompt_ids=str([1] * 10_000))

    async def is_queued() -> int:
        return await door.redis.exists(door.keys.request("large"))

    async with door.loop("w"):
        await asyncio.wait_for(neighbour(), 60)
        await door.until(is_queued, "it is a request")
