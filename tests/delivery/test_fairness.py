"""Who is served when: lanes 8:4:1, tenants by tokens, nobody starves, idle time is not saved up."""

from __future__ import annotations

from collections import Counter

import pytest
from delivery.fleet import FakeWorker, Shard

from penstock.shared.protocol.states import Lane

LANES = {"critical": 8, "normal": 4, "batch": 1}


async def pull(worker: FakeWorker, count: int) -> list[str]:
    """Claim one after the other, finish each as it was estimated; the ids in their order."""
    order = []
    for _ in range(count):
        claims = await worker.claim(1)
        if not claims:
            break
        order.append(claims[0].id)
        await worker.send(worker.ending(claims[0], 0, spent=cost(claims[0].id)))
    return order


def cost(request_id: str) -> int:
    """Tokens of the estimate: `max_tokens` is in the id."""
    return int(request_id.rpartition(":")[2])


async def queue(
    shard: Shard, name: str, count: int, *, tokens: int = 100, lane: Lane = Lane.NORMAL
) -> None:
    """Requests of the tenant ``name``, each estimated at ``tokens``."""
    for i in range(count):
        await shard.submit(
            f"{name}:{lane.value}:{i}:{tokens}",
            tenant=name, lane=lane, max_tokens=tokens - 1, prompt="p",
        )  # fmt: skip


def served(order: list[str]) -> Counter[str]:
    """Tokens by tenant."""
    tokens: Counter[str] = Counter()
    for request_id in order:
        tokens[request_id.partition(":")[0]] += cost(request_id)
    return tokens


async def test_a_flood_does_not_delay_others(newest_shard: Shard) -> None:
    """A queues 2000, then B and C 50 each: they are served as if A had 50, too."""
    shard = newest_shard
    await queue(shard, "A", 2000)
    await queue(shard, "B", 50)
    await queue(shard, "C", 50)
    order = await pull(shard.worker("w"), 150)
    assert [request_id[0] for request_id in order] == list("ABC" * 50)
    assert {request_id[0] for request_id in await pull(shard.worker("w"), 30)} == {"A"}
    await shard.check()


async def test_tenants_share_by_tokens_and_not_by_requests(shard: Shard) -> None:
    """Of all prefixes of the pull order, no two busy tenants are further apart than one request."""
    await queue(shard, "A", 300, tokens=50)
    await queue(shard, "B", 100, tokens=200)
    await queue(shard, "C", 60, tokens=450)
    order = await pull(shard.worker("w"), 200)
    for end in range(1, len(order) + 1):
        tokens = served(order[:end])
        shares = [tokens[name] for name in "ABC"]
        assert max(shares) - min(shares) <= 450


@pytest.mark.parametrize("queued", [16, pytest.param(190, marks=pytest.mark.slow)])
async def test_fifty_tenants_one_of_which_floods(newest_shard: Shard, queued: int) -> None:
    """Up to 10,000 wait; the shares of no two tenants are ever further apart than one request."""
    shard, costs = newest_shard, (50, 100, 200)
    await queue(shard, "t0", 4 * queued, tokens=costs[0])
    for i in range(1, 50):
        await queue(shard, f"t{i}", queued, tokens=costs[i % 3])
    order = await pull(shard.worker("w"), 50 * queued // 4)
    tokens: Counter[str] = Counter({f"t{i}": 0 for i in range(50)})
    for request_id in order:
        tokens[request_id.partition(":")[0]] += cost(request_id)
        assert max(tokens.values()) - min(tokens.values()) <= max(costs), tokens
    assert min(tokens.values()) > max(costs), "each had its turns"
    await shard.check()


async def lanes_share(shard: Shard, queued: int) -> None:
    """At every pull, each lane has had its share of the pulls so far, to within one."""
    for lane in Lane:
        await queue(shard, "t", queued, lane=lane)
    order = await pull(shard.worker("w"), queued * 13 // 8)
    for end in range(13, len(order) + 1):
        pulled = Counter(request_id.split(":")[1] for request_id in order[:end])
        for lane, weight in LANES.items():
            assert abs(pulled[lane] - end * weight / 13) <= 1 + weight / 13, (end, pulled)
    await shard.check()


async def test_lanes_share_8_4_1(shard: Shard) -> None:
    await lanes_share(shard, 48)


async def test_lanes_of_500_share_8_4_1(newest_shard: Shard) -> None:
    await lanes_share(newest_shard, 500)


async def test_the_most_urgent_lane_goes_first_from_a_standstill(shard: Shard) -> None:
    for lane in reversed(Lane):
        await queue(shard, "t", 1, lane=lane)
    order = await pull(shard.worker("w"), 3)
    assert [request_id.split(":")[1] for request_id in order] == ["critical", "normal", "batch"]


async def test_urgent_work_overtakes_a_long_queue(shard: Shard) -> None:
    await queue(shard, "bulk", 500, lane=Lane.BATCH)
    await pull(shard.worker("w"), 100)
    await queue(shard, "human", 3, lane=Lane.CRITICAL)
    order = await pull(shard.worker("w"), 4)
    assert [request_id.split(":")[0] for request_id in order].count("human") == 3


async def test_a_full_worker_may_ask_for_more_urgent_work_alone(shard: Shard) -> None:
    """Continued or fresh; suspect and less urgent work stays for workers that have room for it."""
    for lane in Lane:
        await queue(shard, "t", 3, lane=lane)
    drained = shard.worker("drained")
    assert len(await drained.claim(3)) == 3  # one of each, from a standstill
    await shard.ops.release_all("drained", blame=False)
    given_back = {request_id.split(":")[1] for request_id in drained.claims}
    assert given_back == {"critical", "normal", "batch"}
    claims = await shard.worker("full").claim(10, least_urgent=Lane.NORMAL)
    lanes = [claim.id.split(":")[1] for claim in claims]
    assert lanes[:2] == ["critical", "normal"], "what is to be continued goes first"
    assert sorted(lanes) == ["critical"] * 3 + ["normal"] * 3
    rest = await pull(shard.worker("free"), 10)
    assert [request_id.split(":")[1] for request_id in rest] == ["batch"] * 3


async def test_continued_work_goes_by_lane(shard: Shard) -> None:
    """Whoever was given back first: a dead worker's batch work does not hold up what is urgent."""
    await queue(shard, "slow", 2, lane=Lane.BATCH)
    await shard.worker("a").claim(2)
    await shard.ops.release_all("a", blame=False)
    await queue(shard, "urgent", 1, lane=Lane.CRITICAL)
    await shard.worker("b").claim(1, least_urgent=Lane.CRITICAL)
    await shard.ops.release_all("b", blame=False)
    order = await pull(shard.worker("c"), 3)
    assert [request_id.split(":")[0] for request_id in order] == ["urgent", "slow", "slow"]
    await shard.check()


async def displacing(worker: FakeWorker, most: int) -> int:
    """How many claims a worker gets that is full of batch work, finishing each at once."""
    for count in range(most):
        claims = await worker.claim(1, least_urgent=Lane.NORMAL)
        if not claims:
            return count
        assert claims[0].id.startswith("urgent")
        await worker.send(worker.ending(claims[0], 0, spent=cost(claims[0].id)))
    return most


async def test_a_flood_of_urgent_work_displaces_others_up_to_its_share(shard: Shard) -> None:
    """A burst goes first; beyond 1,024 tokens for each of its weight what waits has its turns."""
    worker = shard.worker("full")
    await queue(shard, "night", 30, lane=Lane.BATCH)
    await worker.claim(8)
    await queue(shard, "urgent", 160, lane=Lane.CRITICAL)
    burst = await displacing(worker, 160)
    assert 8 * 1024 / 100 <= burst <= 8 * (1024 + 2 * 100) / 100
    claims = await worker.claim(1)  # a place is free for anybody
    assert claims[0].id.startswith("night")
    assert await displacing(worker, 160) == 8
    await shard.check()


async def test_what_runs_and_what_is_gone_is_no_reason_to_wait(shard: Shard) -> None:
    """Only who waits has turns: not those claimed, nor those cancelled."""
    worker = shard.worker("full")
    await queue(shard, "night", 10, lane=Lane.BATCH)
    await queue(shard, "other", 1, lane=Lane.BATCH)
    assert len(await worker.claim(10)) == 10
    waiting = {
        f"{name}:batch:{i}:100" for name, i in [*[("night", i) for i in range(10)], ("other", 0)]
    }
    (left,) = waiting - worker.claims.keys()
    await shard.ops.cancel(left)
    await queue(shard, "urgent", 160, lane=Lane.CRITICAL)
    assert await displacing(worker, 160) == 160
    await shard.check()


@pytest.mark.parametrize("lane_of_b", [Lane.NORMAL, Lane.BATCH])
async def test_nobody_starves_under_a_stream_of_others(shard: Shard, lane_of_b: Lane) -> None:
    """B's one request waits, while A always has more queued and C, D, ... arrive."""
    worker = shard.worker("w")
    await queue(shard, "A", 20, lane=Lane.CRITICAL)
    await pull(worker, 10)
    await queue(shard, "B", 1, lane=lane_of_b)
    order: list[str] = []
    for turn in range(40):
        await queue(shard, f"A{turn}", 1, lane=Lane.CRITICAL)
        order += await pull(worker, 1)
    assert [request_id[0] for request_id in order].index("B") <= 20


async def test_a_returning_tenant_can_not_claim_its_idle_time(shard: Shard) -> None:
    worker = shard.worker("w")
    await queue(shard, "A", 200)
    await queue(shard, "B", 10)
    await pull(worker, 120)
    await queue(shard, "B", 80, tokens=101)
    order = await pull(worker, 60)
    tokens = served(order)
    assert abs(tokens["A"] - tokens["B"]) <= 2 * 101, tokens


async def test_a_returning_lane_can_not_claim_its_idle_time(shard: Shard) -> None:
    worker = shard.worker("w")
    await queue(shard, "t", 300, lane=Lane.BATCH)
    await queue(shard, "t", 5, lane=Lane.CRITICAL)
    await pull(worker, 150)
    await queue(shard, "t", 200, lane=Lane.CRITICAL, tokens=104)
    order = await pull(worker, 90)
    pulled = Counter(request_id.split(":")[1] for request_id in order)
    assert 9 <= pulled["batch"] <= 12, pulled


async def test_a_flood_of_overestimates_gives_no_head_start(shard: Shard) -> None:
    """A claimed 100 requests of 8000 tokens and used 10 of each; B came in between."""
    worker = shard.worker("w")
    await queue(shard, "A", 100, tokens=8000)
    claims = await worker.claim(100)
    await queue(shard, "B", 50)
    await worker.send(*(worker.ending(claim, 0, spent=10) for claim in claims))
    await queue(shard, "A", 50)
    order = await pull(worker, 40)
    tokens = served(order)
    assert abs(tokens["A"] - tokens["B"]) <= 200, tokens


async def test_an_underestimate_is_paid_later(shard: Shard) -> None:
    worker = shard.worker("w")
    await queue(shard, "A", 10)
    await queue(shard, "B", 30)
    (claim,) = await worker.claim(1)
    assert claim.id.startswith("A")
    await worker.send(worker.ending(claim, 0, spent=1000))
    order = await pull(worker, 9)
    assert served(order)["B"] >= 900


async def test_a_cancelled_request_pays_for_what_it_published(shard: Shard) -> None:
    """Estimated at 2000, cancelled after 8: its tenant goes on as if it had asked for 8."""
    worker = shard.worker("w")
    await queue(shard, "A", 1, tokens=2000)
    await queue(shard, "B", 40)
    claim = await worker.claim_one()
    await worker.send(worker.tokens(claim, 0, 8))
    await pull(worker, 4)
    await queue(shard, "A", 20)
    await shard.ops.cancel(claim.id)
    assert 7 <= Counter(i[0] for i in await pull(worker, 16))["A"] <= 9


async def test_virtual_times_keep_their_digits(shard: Shard) -> None:
    """After years: Lua's own tostring would round these to a hundred."""
    start = 2**52 + 1.0
    for key, member in ((shard.keys.tenants(Lane.NORMAL), "A"), (shard.keys.lanes, "normal")):
        await shard.redis.zadd(key, {member: start})
    await queue(shard, "A", 1, tokens=11)
    await shard.worker("w").claim_one()
    assert await shard.redis.zscore(shard.keys.tenants(Lane.NORMAL), "A") == start + 11
    floors = await shard.redis.hgetall(shard.keys.virtual_time)
    assert {float(floors[name]) for name in (b"normal", b"lanes")} == {start}
    await queue(shard, "B", 1, tokens=11)
    assert await shard.redis.zscore(shard.keys.tenants(Lane.NORMAL), "B") == start


async def test_a_thousand_idle_tenants_hide_nobody(shard: Shard) -> None:
    """A claim looks at a bounded number of them, and rings for another look if that was all."""
    names = {f"idle{i}": 0.0 for i in range(1500)}
    await shard.redis.zadd(shard.keys.tenants(Lane.NORMAL), names)
    await queue(shard, "zoe", 1)
    await shard.redis.zadd(shard.keys.tenants(Lane.NORMAL), {"zoe": 1})
    worker = shard.worker("w")
    bell = (await shard.redis.xrevrange(shard.keys.bell))[0][0]
    assert await worker.claim(1) == ()
    assert await shard.redis.xread({shard.keys.bell: bell})
    assert len(await worker.claim(1)) == 1


async def test_a_claim_stops_at_its_budget_of_tokens(shard: Shard) -> None:
    await queue(shard, "A", 10)
    worker = shard.worker("w")
    assert len(await worker.claim(10, tokens=250)) == 3
    assert len(await worker.claim(10, tokens=1)) == 1
    assert len(await worker.claim(10, tokens=0)) == 0
    assert len(await worker.claim(0)) == 0
    await shard.check()
