"""Inboxes: the output of many requests in one channel, one message per call of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from delivery.fleet import NO_BOUNDS, FakeWorker, Shard, chunk, request, token
from redis.asyncio import Redis
from redis.asyncio.client import PubSub

from penstock.producer import Producer, State
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.event_reader import unpack_event, unpack_letter
from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.states import Answer, Reason


async def submit(shard: Shard, name: str, inbox: str, **fields: object) -> None:
    await shard.ops.submit(
        request(name, **fields), bounds=NO_BOUNDS, default_deadline_ms=60_000, inbox=inbox
    )


async def listen(shard: Shard, *names: str) -> PubSub:
    channel = shard.redis.pubsub()
    await channel.subscribe(*names)
    for _ in names:
        assert (await channel.get_message(timeout=60))["type"] == "subscribe"
    return channel


async def drain(channel: PubSub) -> list[tuple[str, list[tuple[str, Chunk | End]]]]:
    """Everything that was published, up to a mark that is published now."""
    mark = channel.connection_pool
    async with Redis(connection_pool=mark) as redis:
        await redis.publish(next(iter(channel.channels)), b"mark")
    found = []
    while (message := await channel.get_message(timeout=60))["data"] != b"mark":
        name = message["channel"].decode()
        if ":inbox:" in name:
            pairs = unpack_letter(message["data"])
            found.append((name, [(rid.decode(), unpack_event(event)) for rid, event in pairs]))
        else:
            found.append((name, [("", unpack_event(message["data"]))]))
    return found


async def test_one_message_per_call_and_inbox(shard: Shard) -> None:
    worker, keys = shard.worker("w"), shard.keys
    for name in ("a", "b", "c"):
        await submit(shard, name, "g1")
    await submit(shard, "d", "g2")
    await submit(shard, "e", "")
    claims = {claim.id: claim for claim in await worker.claim(9)}
    channel = await listen(
        shard, keys.inbox("g1"), keys.inbox("g2"), *(keys.channel(name) for name in "abcde")
    )
    await worker.send(*(worker.tokens(claims[name], 0, 2) for name in "abcd"),
                      worker.ending(claims["e"], 0, 1))  # fmt: skip
    found = await drain(channel)
    letters = {name: pairs for name, pairs in found if ":inbox:" in name}
    assert letters[keys.inbox("g1")] == [(name, chunk(name, 0, 2)) for name in "abc"]
    assert letters[keys.inbox("g2")] == [("d", chunk("d", 0, 2))]
    others = [(name, pairs[0][1]) for name, pairs in found if ":inbox:" not in name]
    assert others == [
        (keys.channel("e"), chunk("e", 0, 1)),
        (keys.channel("e"), await shard.end("e")),
    ]
    assert len(found) == 4

    # The ends of a call go with its chunks and after them.
    await worker.send(worker.ending(claims["a"], 2, 1), worker.ending(claims["b"], 2))
    ((name, pairs),) = await drain(channel)
    assert [(rid, type(event)) for rid, event in pairs] == [("a", Chunk), ("a", End), ("b", End)]

    # Other scripts publish ends one by one.
    await shard.ops.cancel("c")
    ((name, pairs),) = await drain(channel)
    assert (name, pairs) == (keys.inbox("g1"), [("c", await shard.end("c"))])
    await channel.aclose()
    await shard.ops.cancel("d")
    await shard.check(ended=True)


async def test_guards_hold_with_an_inbox(shard: Shard) -> None:
    worker = shard.worker("w")
    await submit(shard, "x", "g")
    claim = await worker.claim_one()
    channel = await listen(shard, shard.keys.inbox("g"))
    assert await worker.send_one(worker.tokens(claim, 1, 1)) == (3, 0)
    assert await worker.send_one(worker.tokens(claim, 0, 2)) == (0, 2)
    assert await worker.send_one(worker.tokens(claim, 0, 2)) == (0, 2)
    await shard.ops.release_all("w", blame=False)
    assert await worker.send_one(worker.tokens(claim, 2, 2)) == (2, 2)
    assert len(await drain(channel)) == 1
    await channel.aclose()
    await shard.check()


async def test_answers_in_json_and_bytes_of_any_kind(shard: Shard) -> None:
    worker = shard.worker("w")
    await submit(shard, "x", "g", answer=Answer.JSON)
    claim = await worker.claim_one()
    channel = await listen(shard, shard.keys.inbox("g"))
    item = worker.tokens(claim, 0, 1)
    await worker.send(type(item)(item.id, item.epoch, 0, 1, chunk("x", 0, 1).pack(Answer.JSON)))
    await shard.ops.cancel("x")
    assert [pairs[0][1] for _, pairs in await drain(channel)] == [
        chunk("x", 0, 1), await shard.end("x"),
    ]  # fmt: skip
    await channel.aclose()


def test_what_is_no_letter() -> None:
    for message in (b"", b"\x93\xa1a\xa1b\xa1c", b"\x92\xa1a\x05", b"\x81\xa1a\xa1b", b"\x92\xa1a"):
        with pytest.raises(ProtocolError):
            unpack_letter(message)


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[Producer]:
    async with Producer(redis_url, inbox=True) as client:
        yield client


async def play(worker: FakeWorker, steps: int) -> None:
    """Two tokens for every claimed request in each step, then their ends."""
    claims = list(worker.claims.values())
    for step in range(steps):
        await worker.send(*(worker.tokens(claim, 2 * step, 2) for claim in claims))
        await asyncio.sleep(0)
    await worker.send(*(worker.ending(claim, 2 * steps) for claim in claims))


async def test_streams_of_a_gateway(
    newest_shard: Shard, gateway: Producer, redis_url: str, redis_client: Redis
) -> None:
    shard, worker, steps = newest_shard, newest_shard.worker("w"), 20
    names = [f"x{i}" for i in range(50)]
    for name in names:
        await gateway.submit("hi", id=name)
    assert len(await worker.claim(60)) == 50
    results = [asyncio.create_task(gateway.result(name)) for name in names]

    async def subscribed() -> int:
        channels = await redis_client.pubsub_channels(f"{shard.keys.prefix}*".replace("{", "\\{"))
        return len(channels)

    while not await subscribed():
        await asyncio.sleep(0.005)
    assert await subscribed() == 1
    # A late reader, and one in another process that has no inbox.
    async with Producer(redis_url) as other:
        elsewhere = asyncio.create_task(other.result("x7"))
        await play(worker, steps)
        found = [*(await asyncio.gather(*results)), await elsewhere]
    for result in found:
        assert result.state is State.COMPLETED
        assert list(result.token_ids) == [token(result.id, i) for i in range(2 * steps)]
    assert (await gateway.result("x3")).token_ids == found[3].token_ids
    await shard.check(ended=True)


async def test_an_inbox_with_garbage_in_it(newest_shard: Shard, gateway: Producer) -> None:
    shard, worker = newest_shard, newest_shard.worker("w")
    await gateway.submit("hi", id="x")
    claim = await worker.claim_one()
    result = asyncio.create_task(gateway.result("x"))
    inbox = shard.keys.inbox((await shard.record("x"))["inbox"])
    while not await shard.redis.publish(inbox, b"\xff\x00 garbage"):
        await asyncio.sleep(0.005)
    await worker.send(worker.tokens(claim, 0, 2))
    await shard.redis.publish(inbox, b"\x92\xa1x\xa7garbage")
    await worker.send(worker.ending(claim, 2, 1, reason=Reason.STOP))
    assert len((await result).token_ids) == 3


async def test_a_second_gateway_submits_the_same(
    newest_shard: Shard, gateway: Producer, redis_url: str
) -> None:
    """The first submit decides where it is published; both read it."""
    await gateway.submit("hi", id="x")
    async with Producer(redis_url, inbox=True) as second:
        assert (await second.submit("hi", id="x")).duplicate
        worker = newest_shard.worker("w")
        await worker.claim_one()
        results = [asyncio.create_task(client.result("x")) for client in (gateway, second)]
        await play(worker, 3)
        assert [len((await result).token_ids) for result in results] == [6, 6]
