"""``fair``: what tenants are charged and paid back, and whose turn it is."""

from __future__ import annotations

from collections import Counter

import pytest
from engine.driving import engine
from engine.fakes import request
from engine.waiting_sequences import BOUND_S, drained, filled, make, sequence

from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.scheduling.policies.fair import FairPolicy
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Lane


def test_fair_shares_by_tokens_and_not_by_requests() -> None:
    """`a` asks for 31 + 1 tokens at a time, `b` for 7 + 1: `b` is admitted four times as often."""
    policy = filled(
        "fair",
        [sequence(f"a{i}", max_tokens=31) for i in range(40)]
        + [sequence(f"b{i}", tenant="b", max_tokens=7) for i in range(40)],
    )
    order = drained(policy)[:40]
    assert sum(id.startswith("b") for id in order) == 32


def test_fair_pays_back_what_was_not_given() -> None:
    policy = make("fair")
    early = sequence("early", max_tokens=60)
    for seq in (early, sequence("a2"), sequence("b1", tenant="b"), sequence("b2", tenant="b")):
        policy.add(seq)
    assert policy.peek() is early
    policy.admit(early)
    policy.end(early)  # after one of 60 tokens
    assert drained(policy) == ["b1", "a2", "b2"]


def test_fair_gives_no_credit_for_staying_away_and_remembers_no_debt_of_lonely_times() -> None:
    policy = filled("fair", [sequence(f"a{i}", max_tokens=60) for i in range(20)])
    drained(policy)
    for i in range(3):
        policy.add(sequence(f"a{i}"))
        policy.add(sequence(f"b{i}", tenant="b"))
    assert drained(policy) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_an_endless_line_of_new_tenants_does_not_starve_one() -> None:
    policy = filled("fair", [sequence("a0"), sequence("a1")])
    overtaken = 0
    for i in range(1000):
        policy.add(sequence(f"new{i}", tenant=f"t{i}", arrival=i / 4))
        first = policy.peek()
        assert first is not None
        policy.admit(first)
        overtaken += 1
        if first.id == "a1":
            break
    assert overtaken <= 2 + 4 * BOUND_S


def test_a_newcomer_has_its_share_beside_a_flood_that_is_older_than_the_bound() -> None:
    policy = filled("fair", [sequence(f"a{i}", arrival=i / 1024) for i in range(1000)])
    for _ in range(3):
        first = policy.peek()
        assert first is not None
        policy.admit(first)
    for i in range(40):
        policy.add(sequence(f"b{i}", tenant="b", arrival=5 * BOUND_S))
    order = drained(policy)
    assert order[1] == "b0"
    assert abs(sum(id.startswith("b") for id in order[:60]) - 30) <= 3
    assert sorted(order) == sorted({*order})
    assert len(order) == 1037


def test_a_newcomer_starts_at_the_least_counter_and_not_at_that_of_an_overdue_tenant() -> None:
    policy = filled("fair", [sequence(f"a{i}", max_tokens=1000) for i in range(3)])
    for turn in range(2):
        first = policy.peek()
        assert first is not None
        assert first.id == f"a{turn}"  # the second one since it is overdue
        policy.admit(first)
        for i in range(9):
            policy.add(sequence(f"b{turn}{i}", tenant="b", arrival=2 * BOUND_S))
    policy.add(sequence("c", tenant="c", arrival=2 * BOUND_S))
    assert drained(policy)[:2] == ["b00", "c"]


def test_fair_forgets_tenants_that_are_gone() -> None:
    """A million tenants that came once must not stay in memory."""
    policy = FairPolicy(BOUND_S)
    policy.add(sequence("always0", tenant="x", max_tokens=1))
    for i in range(2000):
        policy.add(sequence(f"always{i + 1}", tenant="x", max_tokens=1, arrival=float(i)))
        policy.add(sequence(f"once{i}", tenant=f"t{i}", arrival=float(i)))
        for _ in range(2):
            first = policy.peek()
            assert first is not None
            policy.admit(first)
            policy.end(first)
    shares = policy._lanes[Lane.NORMAL]
    assert len(shares._turns) + len(shares._idle) + len(shares._since) < 50
    assert len(shares._served) <= 1
    assert not shares._charged


# -- requests with several sequences -------------------------------------------------------------

END = 8
"""A stop token."""


def served(outputs: int) -> Counter[str]:
    """Tokens sampled for each tenant while both have a backlog; every output ends after three.

    Args:
        outputs: that a request of `a` has; those of `b` have one.
    """
    eng = engine(
        policy=PolicyName.FAIR, max_sequences=4, num_blocks=500, max_model_len=2000,
        max_batch_tokens=64, max_overtake_s=1e6,
    )  # fmt: skip
    for i in range(300):
        for tenant, n in [("a", outputs), ("b", 1)]:
            stops = (END,)
            eng.add(
                request(f"{tenant}{i}", tenant=tenant, max_tokens=1000, n=n, stop_token_ids=stops)
            )
    tokens: Counter[str] = Counter()
    for _ in range(200):
        plan = eng.schedule()
        assert plan is not None
        tokens.update(span.sequence.tenant for span in plan.spans if span.samples)
        eng.collect(plan, third_ends(plan))
    return tokens


def third_ends(plan: Plan) -> StepOutput:
    sampled = ((END if s.sequence.num_output_tokens == 2 else 1,) for s in plan.spans)
    return StepOutput(
        tuple(token if s.samples else () for s, token in zip(plan.spans, sampled, strict=True))
    )


@pytest.mark.parametrize("outputs", [1, 2, 4])
def test_several_outputs_are_charged_for_what_they_give(outputs: int) -> None:
    tokens = served(outputs)
    assert tokens.total() > 600
    assert abs(tokens["a"] - tokens["b"]) <= 24  # what is in flight


def test_a_dropped_beam_is_paid_back_only_when_its_search_ends() -> None:
    policy = make("fair")
    search = sequence("search", max_tokens=32, beam_width=2, temperature=0.0)
    search.num_candidates = 4
    members = {search: None}
    search.siblings = members
    for seq in (search, sequence("a"), *(sequence(f"b{i}", tenant="b") for i in range(4))):
        policy.add(seq)
    policy.admit(search)  # costs 1 + 2 x 32; a request of `b` 1 + 16
    child = search.clone(1, [1, 5])
    members[child] = None
    del members[search]
    policy.end(search)
    for turn in range(3):
        first = policy.peek()
        assert first is not None
        assert first.id == f"b{turn}"
        policy.admit(first)
    del members[child]
    policy.end(child)  # after one token of each beam: 3 in all, and `b` had 51
    assert drained(policy) == ["a", "b3"]


def test_a_request_that_ends_before_its_siblings_were_let_go_is_paid_back_for_them() -> None:
    policy = make("fair")
    chosen = sequence("chosen", max_tokens=32, n=4)
    members = {chosen: None}
    chosen.siblings = members
    for seq in (chosen, sequence("a"), *(sequence(f"b{i}", tenant="b") for i in range(2))):
        policy.add(seq)
    policy.admit(chosen)
    del members[chosen]
    policy.end(chosen)
    assert drained(policy) == ["b0", "a", "b1"]
