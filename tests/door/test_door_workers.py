"""Several workers at one door: each entry is acted on once, whoever dies or comes beside."""

from __future__ import annotations

import asyncio

from door.plain import PlainDoor
from redis.asyncio import Redis

from penstock.shared.keys import GROUP
from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Reason


async def test_an_entry_is_acted_on_once(door: PlainDoor) -> None:
    """Two workers hold the same entries, one of them long dead to the others."""
    await door.lease("a")
    await door.poll("a")
    for i in range(3):
        await door.add(id=f"x{i}", prompt="Hi", max_tokens=("x" if i == 2 else 8))
    held = await door.read("a")
    assert await door.read("b") == []
    assert await door.resolve_all(held) == ["ok", "ok", "refused"]
    assert await door.resolve_all(held) == ["gone"] * 3
    assert await door.shard.counter("requests") == 2
    assert len(await door.shard.log("x2")) == 1
    await door.shard.check()


async def test_a_worker_killed_between_reading_and_acting(door: PlainDoor) -> None:
    await door.lease("live")
    await door.poll("live")
    for i in range(100):
        await door.add(id=f"x{i}", prompt="Hi")
    await door.shard.worker("dies", lease_ms=1).claim(0)
    held = await door.read("dies", count=90)
    assert len(held) == 90
    await door.shard.wait_ms(2)
    first = await door.poll("live")
    assert [entry.name for entry in first.entries] == [entry.name for entry in held[:64]]
    assert await door.resolve_all(first.entries) == ["ok"] * 64
    second = await door.poll("live")
    assert len(second.entries) == 26
    assert await door.resolve_all(second.entries) == ["ok"] * 26
    assert await door.resolve_all(held) == ["gone"] * 90, "it was only stopped, and goes on"
    assert await door.resolve_all(await door.read("live")) == ["ok"] * 10
    assert (await door.poll("live")).entries == ()
    consumers = await door.redis.xinfo_consumers(door.keys.ingress(), GROUP)
    assert [consumer["name"] for consumer in consumers] == [b"live"], "the dead are forgotten"
    assert await door.shard.counter("requests") == 100
    await door.shard.check()


async def test_entries_of_a_living_worker_are_left_to_it(door: PlainDoor) -> None:
    await door.lease("a")
    await door.poll("a")
    await door.add(id="x", prompt="Hi")
    held = await door.read("a")
    await door.lease("b")
    assert (await door.poll("b")).entries == ()
    again = (await door.poll("a")).entries
    assert [entry.name for entry in again] == [held[0].name], "its connection broke as it read"


async def test_two_workers_at_once_with_duplicates(door: PlainDoor) -> None:
    """Two streams, while connections are cut and scripts are forgotten."""
    await door.ops.add_tenant("acme")
    async with door.loop("a"), door.loop("b"), Redis(**_address(door.redis)) as other:
        for i in range(150):
            tenant = "acme" if i % 3 == 0 else None
            id = f"acme.{i}" if tenant else f"x{i}"
            for _ in range(2):
                await door.add(tenant, id=id, prompt="Hi", max_tokens=8)
            if i % 25 == 0:
                await other.script_flush()
                await door.redis.client_kill_filter(_type="normal", skipme=True)
        await door.until(lambda: _empty(door), "both streams are empty")
    assert await door.shard.counter("requests") == 150
    claimed = [claim.id for claim in await door.shard.worker("w").claim(200)]
    assert len(claimed) == len(set(claimed)) == 150
    await door.shard.check()


async def _empty(door: PlainDoor) -> bool:
    return await door.left() == (0, 0) and await door.left("acme") == (0, 0)


def _address(redis: Redis) -> dict[str, object]:
    kwargs = redis.connection_pool.connection_kwargs
    return {"host": kwargs["host"], "port": kwargs["port"]}


async def test_bounds_are_never_exceeded_by_one_with_two_workers(newest_door: PlainDoor) -> None:
    door = newest_door.with_bounds(requests=20)
    for i in range(60):
        await door.add(id=f"x{i}", prompt="Hi")
    async with door.loop("a"), door.loop("b"):

        async def empty() -> bool:
            return await door.redis.xlen(door.keys.ingress()) == 0

        await door.until(empty, "the stream is empty")
    assert await door.shard.counter("requests") == 20
    ends = [await door.shard.log(f"x{i}") for i in range(60)]
    reasons = [log[0].reason for log in ends if log and isinstance(log[0], End)]
    assert reasons == [Reason.QUEUE_FULL] * 40
    await door.shard.check()


async def test_the_loop_outlives_a_deleted_stream(door: PlainDoor) -> None:
    async with door.loop("a"):

        async def is_open() -> bool:
            return bool(await door.redis.exists(door.keys.ingress()))

        await door.until(is_open, "the door is open")
        await door.redis.delete(door.keys.ingress())
        await door.add(id="x", prompt="Hi")

        async def queued() -> bool:
            return bool(await door.redis.exists(door.keys.request("x")))

        await door.until(queued, "an entry of the new stream is taken in")


async def test_a_tenant_added_while_it_runs_is_heard_soon(door: PlainDoor) -> None:
    async with door.loop("a"):
        await door.ops.add_tenant("acme")
        await door.add("acme", id="acme.x", prompt="Hi")

        async def queued() -> bool:
            return bool(await door.redis.exists(door.keys.request("acme.x")))

        await door.until(queued, "the tenant's entry is taken in")


async def test_a_flood_of_one_tenant_does_not_hide_another(newest_door: PlainDoor) -> None:
    """Every door gives its share to each look, however many entries lie before others."""
    door = newest_door
    for tenant in ("flood", "small"):
        await door.ops.add_tenant(tenant)
    for _ in range(500):
        await door.add("flood", prompt="Hi")
    await door.add("small", id="small.1", prompt="Hi")
    async with door.loop("a"):

        async def queued() -> bool:
            return bool(await door.redis.exists(door.keys.request("small.1")))

        await door.until(queued, "the small tenant's entry is taken in")
        left = await door.redis.xlen(door.keys.ingress("flood"))
    assert left > 400


async def test_concurrent_settling_of_one_entry(newest_door: PlainDoor) -> None:
    door = newest_door
    await door.poll("w")
    await door.add(id="x", prompt="Hi")
    (held,) = await door.read("w")
    verdicts = await asyncio.gather(*(door.resolve(held) for _ in range(20)))
    assert sorted(v.verdict for v in verdicts) == ["gone"] * 19 + ["ok"]
