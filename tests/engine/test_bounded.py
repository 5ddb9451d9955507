"""Who was displaced comes back, however much urgent work there is; and lanes have their shares."""

from __future__ import annotations

from collections import Counter

import pytest
from engine.fakes import PieceStream, config, request

from penstock.gpu_worker.edge.claim_budget import ClaimBudget
from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Lane
from penstock.tools.simulate.arrivals import SimRequest
from penstock.tools.simulate.claim_order import FairQueue

STEP_S = 0.05
BOUND_S = 2.0
PLACES = 4
COST = 400
"""Of a request in its queue: so large that urgent work is soon as far ahead as it may be."""


def settings(policy: PolicyName) -> EngineConfig:
    return config(
        policy=policy,
        max_sequences=PLACES,
        num_blocks=500,
        max_model_len=64,
        max_overtake_s=BOUND_S,
    )


class Served:
    """An engine that claims as a worker does, and what each lane got of it."""

    def __init__(self, policy: PolicyName) -> None:
        self.engine = Engine(settings(policy), PieceStream)
        self.owned: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.ended: list[str] = []
        self.now = 0.0
        self._lanes: dict[str, str] = {}

    def add(self, id: str, lane: Lane, max_tokens: int) -> None:
        refusal = self.engine.add(
            request(id, [1, 2], lane=lane, max_tokens=max_tokens, arrival=self.now)
        )
        assert refusal is None
        self.owned[lane.value] += 1
        self._lanes[id] = lane.value

    def room(self) -> ClaimBudget:
        return ClaimBudget.beside(
            self.owned,
            self.engine.load().waiting,
            0,
            max_sequences=PLACES,
            claim_batch=PLACES,
            step_tokens=100,
        )

    def step(self) -> None:
        plan = self.engine.schedule()
        assert plan is not None
        output = StepOutput(tuple((5,) if span.samples else () for span in plan.spans))
        for update in self.engine.collect(plan, output):
            lane = self._lanes[update.id]
            self.tokens[lane] += len(update.token_ids)
            if update.finish is not None:
                self.owned[lane] -= 1
                self.ended.append(update.id)
        self.engine.observe(plan, STEP_S)
        self.now += STEP_S


@pytest.mark.parametrize("policy", PolicyName)
def test_displaced_work_ends_beside_an_endless_flood_of_urgent_work(policy: PolicyName) -> None:
    """Nothing but urgent work waits in Redis, so that no share bounds it."""
    served = Served(policy)
    served.add("slow", Lane.BATCH, 40)
    served.step()
    count = 0
    while "slow" not in served.ended:
        for _ in range(served.room().requests):
            count += 1
            served.add(f"urgent{count}", Lane.CRITICAL, 8)
        served.step()
        # It is displaced, waits for the bound and for a place, and is displaced no more.
        assert served.now < 2 * BOUND_S + (8 + 40 + 10) * STEP_S
    assert served.tokens[Lane.CRITICAL] > served.now / STEP_S


@pytest.mark.parametrize("policy", PolicyName)
def test_urgent_work_displaces_at_once_before_the_bound(policy: PolicyName) -> None:
    served = Served(policy)
    for index in range(PLACES):
        served.add(f"slow{index}", Lane.BATCH, 40)
    served.step()
    served.add("urgent", Lane.CRITICAL, 8)
    served.step()
    assert served.tokens[Lane.CRITICAL] == 1


@pytest.mark.parametrize("policy", PolicyName)
def test_lanes_that_are_all_full_share_as_eight_four_one(policy: PolicyName) -> None:
    """What a worker claims to displace other work does not undo the shares of the claims."""
    served, queue, waiting = Served(policy), FairQueue(), Counter[Lane]()
    requests: dict[str, SimRequest] = {}

    def fill() -> None:
        for lane in Lane:
            while waiting[lane] < 10:
                one = SimRequest(f"r{len(requests)}", 0, COST - 16, 16, 16, lane, "t")
                requests[one.id] = one
                queue.push(one)
                waiting[lane] += 1

    shares: Counter[str] = Counter()
    for step in range(3600):
        fill()
        room = served.room()
        if room.requests:
            free = served.engine.load().available_tokens
            for one in queue.claim(room.requests, free, room.least_urgent):
                waiting[one.lane] -= 1
                served.add(one.id, one.lane, 16)
        ended = len(served.ended)
        served.step()
        for id in served.ended[ended:]:
            queue.correct_charge(requests[id])
        if step == 1200:  # a burst that is ahead of its share is over
            shares = served.tokens.copy()
    shares = served.tokens - shares
    total = shares.total()
    for lane, weight in ((Lane.CRITICAL, 8), (Lane.NORMAL, 4), (Lane.BATCH, 1)):
        assert shares[lane] / total == pytest.approx(weight / 13, rel=0.1)
