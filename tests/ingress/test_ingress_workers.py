"""Several workers at one ingress: each entry is acted on once, whoever dies or comes beside."""

from __future__ import annotations

import asyncio

from ingress.shard_ingress import ShardIngress
from redis.asyncio import Redis

from penstock.shared.keys import GROUP
from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Reason


async def test_an_entry_is_acted_on_once(ingress: ShardIngress) -> None:
    """Two workers hold the same entries, one of them long dead to the others."""
    await ingress.lease("a")
    await ingress.poll("a")
    for i in range(3):
        await ingress.add(id=f"x{i}", prompt="Hi", max_tokens=("x" if i == 2 else 8))
    held = await ingress.read("a")
    assert await ingress.read("b") == []
    assert await ingress.resolve_all(held) == ["ok", "ok", "refused"]
    assert await ingress.resolve_all(held) == ["gone"] * 3
    assert await ingress.shard.counter("requests") == 2
    assert len(await ingress.shard.log("x2")) == 1
    await ingress.shard.check()


async def test_a_worker_killed_between_reading_and_acting(ingress: ShardIngress) -> None:
    await ingress.lease("live")
    await ingress.poll("live")
    for i in range(100):
        await ingress.add(id=f"x{i}", prompt="Hi")
    await ingress.shard.worker("dies", lease_ms=1).claim(0)
    held = await ingress.read("dies", count=90)
    assert len(held) == 90
    await ingress.shard.wait_ms(2)
    first = await ingress.poll("live")
    assert [entry.name for entry in first.entries] == [entry.name for entry in held[:64]]
    assert await ingress.resolve_all(first.entries) == ["ok"] * 64
    second = await ingress.poll("live")
    assert len(second.entries) == 26
    assert await ingress.resolve_all(second.entries) == ["ok"] * 26
    assert await ingress.resolve_all(held) == ["gone"] * 90, "it was only stopped, and goes on"
    assert await ingress.resolve_all(await ingress.read("live")) == ["ok"] * 10
    assert (await ingress.poll("live")).entries == ()
    consumers = await ingress.redis.xinfo_consumers(ingress.keys.ingress(), GROUP)
    assert [consumer["name"] for consumer in consumers] == [b"live"], "the dead are forgotten"
    assert await ingress.shard.counter("requests") == 100
    await ingress.shard.check()


async def test_entries_of_a_living_worker_are_left_to_it(ingress: ShardIngress) -> None:
    await ingress.lease("a")
    await ingress.poll("a")
    await ingress.add(id="x", prompt="Hi")
    held = await ingress.read("a")
    await ingress.lease("b")
    assert (await ingress.poll("b")).entries == ()
    again = (await ingress.poll("a")).entries
    assert [entry.name for entry in again] == [held[0].name], "its connection broke as it read"


async def test_two_workers_at_once_with_duplicates(ingress: ShardIngress) -> None:
    """Two streams, while connections are cut and scripts are forgotten."""
    await ingress.ops.add_tenant("acme")
    async with (
        ingress.loop("a"),
        ingress.loop("b"),
        Redis(**_address(ingress.redis)) as other,
    ):
        for i in range(150):
            tenant = "acme" if i % 3 == 0 else None
            id = f"acme.{i}" if tenant else f"x{i}"
            for _ in range(2):
                await ingress.add(tenant, id=id, prompt="Hi", max_tokens=8)
            if i % 25 == 0:
                await other.script_flush()
                await ingress.redis.client_kill_filter(_type="normal", skipme=True)
        await ingress.until(lambda: _empty(ingress), "both streams are empty")
    assert await ingress.shard.counter("requests") == 150
    claimed = [claim.id for claim in await ingress.shard.worker("w").claim(200)]
    assert len(claimed) == len(set(claimed)) == 150
    await ingress.shard.check()


async def _empty(ingress: ShardIngress) -> bool:
    return await ingress.left() == (0, 0) and await ingress.left("acme") == (0, 0)


def _address(redis: Redis) -> dict[str, object]:
    kwargs = redis.connection_pool.connection_kwargs
    return {"host": kwargs["host"], "port": kwargs["port"]}


async def test_bounds_are_never_exceeded_by_one_with_two_workers(
    newest_ingress: ShardIngress,
) -> None:
    ingress = newest_ingress.with_bounds(requests=20)
    for i in range(60):
        await ingress.add(id=f"x{i}", prompt="Hi")
    async with ingress.loop("a"), ingress.loop("b"):

        async def empty() -> bool:
            return await ingress.redis.xlen(ingress.keys.ingress()) == 0

        await ingress.until(empty, "the stream is empty")
    assert await ingress.shard.counter("requests") == 20
    ends = [await ingress.shard.log(f"x{i}") for i in range(60)]
    reasons = [log[0].reason for log in ends if log and isinstance(log[0], End)]
    assert reasons == [Reason.QUEUE_FULL] * 40
    await ingress.shard.check()


async def test_the_loop_outlives_a_deleted_stream(ingress: ShardIngress) -> None:
    async with ingress.loop("a"):

        async def is_open() -> bool:
            return bool(await ingress.redis.exists(ingress.keys.ingress()))

        await ingress.until(is_open, "the ingress is open")
        await ingress.redis.delete(ingress.keys.ingress())
        await ingress.add(id="x", prompt="Hi")

        async def queued() -> bool:
            return bool(await ingress.redis.exists(ingress.keys.request("x")))

        await ingress.until(queued, "an entry of the new stream is taken in")


async def test_a_tenant_added_while_it_runs_is_heard_soon(ingress: ShardIngress) -> None:
    async with ingress.loop("a"):
        await ingress.ops.add_tenant("acme")
        await ingress.add("acme", id="acme.x", prompt="Hi")

        async def queued() -> bool:
            return bool(await ingress.redis.exists(ingress.keys.request("acme.x")))

        await ingress.until(queued, "the tenant's entry is taken in")


async def test_a_flood_of_one_tenant_does_not_hide_another(newest_ingress: ShardIngress) -> None:
    """Every ingress gives its share to each look, however many entries lie before others."""
    ingress = newest_ingress
    for tenant in ("flood", "small"):
        await ingress.ops.add_tenant(tenant)
    for _ in range(500):
        await ingress.add("flood", prompt="Hi")
    await ingress.add("small", id="small.1", prompt="Hi")
    async with ingress.loop("a"):

        async def queued() -> bool:
            return bool(await ingress.redis.exists(ingress.keys.request("small.1")))

        await ingress.until(queued, "the small tenant's entry is taken in")
        left = await ingress.redis.xlen(ingress.keys.ingress("flood"))
    assert left > 400


async def test_concurrent_settling_of_one_entry(newest_ingress: ShardIngress) -> None:
    ingress = newest_ingress
    await ingress.poll("w")
    await ingress.add(id="x", prompt="Hi")
    (held,) = await ingress.read("w")
    verdicts = await asyncio.gather(*(ingress.resolve(held) for _ in range(20)))
    assert sorted(v.verdict for v in verdicts) == ["gone"] * 19 + ["ok"]
