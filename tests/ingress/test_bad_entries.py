"""Whatever stands in an entry, it gets its end, and those behind it are served."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ingress.shard_ingress import ShardIngress

from penstock.gpu_worker.edge import ingress as ingress_module
from penstock.shared.protocol.events import End
from penstock.shared.protocol.plain_entry import Admission, Entry, Refusal, read_entry
from penstock.shared.protocol.states import Answer, Reason

BAD = "bad"


async def ends(ingress: ShardIngress, *ids: str) -> list[End]:
    """The ends of entries that a worker's own loop has refused, and that of no other."""

    async def all_are_there() -> bool:
        return all([await ingress.redis.exists(ingress.keys.log(id)) for id in ids])

    async with ingress.loop("w"):
        await ingress.until(all_are_there, "each has its end")

        async def nothing_is_left() -> bool:
            return await ingress.left() == (0, 0)

        await ingress.until(nothing_is_left, "the entries behind were taken in")
    return [await ingress.shard.end(id) for id in ids]


async def test_half_a_surrogate_in_a_name_of_a_map(ingress: ShardIngress) -> None:
    await ingress.add(id=BAD, prompt="x", logit_bias='{"\\ud800":1}')
    await ingress.add(id="behind", prompt="x")
    (end,) = await ends(ingress, BAD)
    assert end.reason is Reason.INVALID
    assert "\\ud800" in end.message
    assert await ingress.shard.state("behind") == "queued"


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
    ingress: ShardIngress, monkeypatch: pytest.MonkeyPatch, outcome: Exception | Refusal
) -> None:
    def read(entry: Entry) -> Admission | Refusal:
        if b"poison" not in entry.fields:
            return read_entry(entry)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(ingress_module, "read_entry", read)
    await ingress.add(id=BAD, prompt="poison")
    for number in range(3):
        await ingress.add(id=f"behind{number}", prompt="x")
    (end,) = await ends(ingress, BAD)
    assert end.reason in (Reason.ENGINE_ERROR, Reason.INVALID)
    assert end.message.isprintable()
    assert len(end.message) < 2000
    assert [await ingress.shard.state(f"behind{number}") for number in range(3)] == ["queued"] * 3


async def test_large_entries_are_not_parsed_on_the_event_loop(
    ingress: ShardIngress, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(ingress_module, "read_entry", read)
    await ingress.add(id="large", prompt_ids=str([1] * 10_000))

    async def is_queued() -> int:
        return await ingress.redis.exists(ingress.keys.request("large"))

    async with ingress.loop("w"):
        await asyncio.wait_for(neighbour(), 60)
        await ingress.until(is_queued, "it is a request")
