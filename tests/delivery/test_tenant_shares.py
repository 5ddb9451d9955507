"""What one tenant may have waiting: a part of the free room, more of it in urgent lanes."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from delivery.fleet import Shard, request

from penstock.shared.errors import QueueFull
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.operations import Bounds
from penstock.shared.settings import QueueSettings

BOUNDS = Bounds(requests=100, tenant_share=100)
COST = request("x").cost_estimate


async def fill(shard: Shard, tenant: str, lane: Lane, bounds: Bounds, **fields: Any) -> QueueFull:
    """Submit until it is refused."""
    for number in count():
        try:
            await shard.submit(
                f"{tenant}-{number:03}", tenant=tenant, lane=lane, bounds=bounds, **fields
            )
        except QueueFull as refusal:
            return refusal
    raise AssertionError


async def held(shard: Shard, tenant: str) -> int:
    return await shard.counter(f"tenant:{tenant}")


@pytest.mark.parametrize(
    ("lane", "most"), [(Lane.CRITICAL, 89), (Lane.NORMAL, 76), (Lane.BATCH, 40)]
)
async def test_a_lone_tenant_leaves_room(shard: Shard, lane: Lane, most: int) -> None:
    refusal = await fill(shard, "a", lane, BOUNDS)
    assert refusal.bound == "tenant_requests"
    assert await held(shard, "a") == most
    assert await shard.redis.exists(shard.keys.request(f"a-{most:03}")) == 0
    await shard.check()


async def test_a_flood_of_one_tenant_closes_the_queue_for_no_other(shard: Shard) -> None:
    """10,000 waiting `batch` requests of one tenant once refused another's `critical`."""
    for tenant in ("a", "b", "c"):
        await fill(shard, tenant, Lane.BATCH, BOUNDS)
    assert [await held(shard, tenant) for tenant in "abc"] == [40, 20, 10]
    await fill(shard, "d", Lane.CRITICAL, BOUNDS)
    assert await held(shard, "d") >= 20
    await shard.submit("e-0", tenant="e", lane=Lane.CRITICAL, bounds=BOUNDS)
    await shard.check()


async def test_batch_as_a_whole_leaves_room_for_urgent_lanes(shard: Shard) -> None:
    """However many names somebody submits under."""
    for number in range(80):
        await shard.submit(f"x{number}", tenant=f"t{number}", lane=Lane.BATCH, bounds=BOUNDS)
    with pytest.raises(QueueFull, match=r"requests \(80\)"):
        await shard.submit("x", tenant="another", lane=Lane.BATCH, bounds=BOUNDS)
    for number in range(80, 95):
        await shard.submit(f"x{number}", tenant=f"t{number}", bounds=BOUNDS)
    with pytest.raises(QueueFull, match=r"requests \(95\)"):
        await shard.submit("x", tenant="another", bounds=BOUNDS)
    await shard.submit("x", tenant="another", lane=Lane.CRITICAL, bounds=BOUNDS)


async def test_tokens_are_shared_too(shard: Shard) -> None:
    bounds = Bounds(tokens=100 * COST, tenant_share=100)
    refusal = await fill(shard, "a", Lane.BATCH, bounds)
    assert (refusal.bound, await held(shard, "a")) == ("tenant_tokens", 40)


async def test_bytes_are_shared_too(shard: Shard) -> None:
    size = len(request("a-000", tenant="a", lane=Lane.BATCH).pack())
    refusal = await fill(shard, "a", Lane.BATCH, Bounds(bytes=100 * size, tenant_share=100))
    assert (refusal.bound, await held(shard, "a")) == ("tenant_bytes", 40)


async def test_what_leaves_the_queue_frees_its_share(shard: Shard) -> None:
    bounds = Bounds(tokens=100 * COST, tenant_share=100)
    await fill(shard, "a", Lane.BATCH, bounds)
    assert len(await shard.worker("w").claim(15)) == 15
    for number in range(15):
        await shard.submit(f"y{number}", tenant="a", lane=Lane.BATCH, bounds=bounds)
    with pytest.raises(QueueFull):
        await shard.submit("y", tenant="a", lane=Lane.BATCH, bounds=bounds)
    assert len(await shard.worker("w").claim(100)) == 40
    assert not [name for name in await shard.redis.hkeys(shard.keys.counters) if b"tenant" in name]


async def test_an_empty_queue_takes_whatever_fits(shard: Shard) -> None:
    bounds = Bounds(tokens=COST, requests=1, tenant_share=100)
    await shard.submit("x", lane=Lane.BATCH, bounds=bounds)
    with pytest.raises(QueueFull):
        await shard.submit("y", lane=Lane.BATCH, bounds=bounds)


async def test_who_holds_nothing_may_use_the_rooms_rest(shard: Shard) -> None:
    bounds = Bounds(tokens=100 * COST, tenant_share=50)
    await shard.submit("a", tenant="a", lane=Lane.BATCH, bounds=bounds)
    large = request("x", max_tokens=60 * COST).cost_estimate
    assert large > 50 * COST
    await shard.submit("b", tenant="b", lane=Lane.BATCH, bounds=bounds, max_tokens=60 * COST)


async def test_shares_can_be_switched_off(shard: Shard) -> None:
    await fill(shard, "a", Lane.BATCH, Bounds(requests=100))
    assert await held(shard, "a") == 100


def test_shares_are_on_by_default() -> None:
    assert Bounds.of(QueueSettings()).tenant_share == 100


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"max_tokens": 300}, 300),
        ({"max_tokens": 131_072}, 4096),
        ({"max_tokens": 131_072, "n": 64}, 64 * 4096),
        ({"max_tokens": 131_072, "min_tokens": 9000}, 9000),
        ({"max_tokens": 131_072, "ignore_eos": True}, 131_072),
    ],
)
def test_the_output_is_estimated_by_what_is_likely(options: dict[str, Any], tokens: int) -> None:
    assert Request.build(id="x", prompt="abcd", **options).output_estimate == tokens
