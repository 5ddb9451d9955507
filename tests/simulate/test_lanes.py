"""The model of the claim's order against the script itself, on a real Redis."""

from __future__ import annotations

import random

import pytest
from delivery.fleet import MINUTE_MS, Shard
from redis.asyncio import Redis
from simulate.fleets import fixed

from penstock.shared.protocol.states import Lane
from penstock.tools.simulate import FairQueue, SimRequest


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scale", [1, 40])
async def test_model_and_script_hand_out_the_same(redis_url: str, seed: int, scale: int) -> None:
    """Random submissions, claims and ends in any order: the same requests, in the same order.

    Of larger requests, urgent ones are soon so far ahead that full workers get no more of them.
    """
    rng = random.Random(seed)
    queue = FairQueue()
    made: dict[str, SimRequest] = {}
    order: list[str] = []
    async with Redis.from_url(redis_url) as client:
        shard = Shard(client)
        worker = shard.worker("w", lease_ms=10 * MINUTE_MS)
        for turn in range(260):
            kind = rng.choices(["submit", "claim", "end"], [5, 2, 4])[0]
            if kind == "submit":
                # Few tenants and lanes run dry and come back, which is where the rules are subtle.
                request = fixed(
                    0.0, id=f"r{turn}", prompt=rng.randint(1, 40), output=rng.randint(1, 30),
                    max_tokens=scale * rng.randint(30, 60), lane=rng.choice(list(Lane)),
                    tenant=rng.choice("abc"),
                )  # fmt: skip
                made[request.id] = request
                queue.push(request)
                reply = await shard.submit(
                    request.id, prompt=(1,) * request.prompt_len,  # type: ignore[arg-type]
                    max_tokens=request.max_tokens, lane=request.lane, tenant=request.tenant,
                )  # fmt: skip
                assert not reply.duplicate
            elif kind == "claim":
                room, tokens = rng.randint(1, 5), rng.choice([1, 60, 200, 100_000])
                least_urgent = rng.choice([*Lane, Lane.BATCH, Lane.BATCH])
                wanted = [request.id for request in queue.claim(room, tokens, least_urgent)]
                claims = await worker.claim(room, tokens=tokens, least_urgent=least_urgent)
                assert [claim.id for claim in claims] == wanted
                order += wanted
            elif worker.claims:
                claim = worker.claims.pop(rng.choice(list(worker.claims)))
                request = made[claim.id]
                queue.correct_charge(request)
                await worker.send(worker.ending(claim, 0, spent=request.tokens))
        rest = await worker.claim(1000)
        assert [claim.id for claim in rest] == [r.id for r in queue.claim(1000, 1 << 40)]
    assert len(order) > 30
    assert len(order) + len(rest) == len(made)
    assert len(queue) == 0


def test_lanes_share_as_eight_four_one() -> None:
    queue = FairQueue()
    for lane in Lane:
        for index in range(130):
            queue.push(fixed(0.0, id=f"{lane}{index}", lane=lane))
    claimed = [request.lane for request in queue.claim(130, 1 << 30)]
    assert [claimed.count(lane) for lane in Lane] == [80, 40, 10]


def test_a_claim_ends_with_its_tokens() -> None:
    """The last one may exceed what is left, as in the script."""
    queue = FairQueue()
    for index in range(5):
        queue.push(fixed(0.0, id=str(index), prompt=10, output=10))
    assert [len(queue.claim(5, tokens)) for tokens in (0, 1, 21)] == [0, 1, 2]
