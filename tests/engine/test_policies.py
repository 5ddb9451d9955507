"""Orders of admission: what each puts first, and what all of them must keep."""

from __future__ import annotations

import math
import random

import pytest
from engine.fakes import config
from engine.waiting_sequences import BOUND_S, drained, filled, make, may_overtake, sequence
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.gpu_worker.engine.scheduling.policies.removable_heap import RemovableHeap
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.errors import ConfigurationError
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Lane

ALL = pytest.mark.parametrize("name", list(PolicyName))


# -- what all keep -------------------------------------------------------------------------------


@ALL
def test_lanes_then_arrival(name: str) -> None:
    policy = make(name)
    for id, lane in [("b", Lane.BATCH), ("n1", Lane.NORMAL), ("c", Lane.CRITICAL)]:
        policy.add(sequence(id, lane))
    policy.add(sequence("n2"))
    assert {s.id for s in policy} == {"c", "n1", "n2", "b"}
    assert drained(policy) == ["c", "n1", "n2", "b"]
    assert policy.peek() is None


@ALL
def test_preempted_go_to_the_front_of_their_own_lane(name: str) -> None:
    policy = make(name)
    policy.add(sequence("c", Lane.CRITICAL))
    policy.add(sequence("b1", Lane.BATCH))
    policy.put_back(sequence("b2", Lane.BATCH, arrival=1.0))
    assert [policy.num_waiting(lane) for lane in Lane] == [1, 0, 2]
    assert drained(policy) == ["c", "b2", "b1"]


@ALL
def test_removal_from_the_middle(name: str) -> None:
    middle = sequence("n2")
    policy = filled(name, (sequence("n1"), middle, sequence("n3")))
    policy.remove(middle)
    assert [policy.num_waiting(lane) for lane in Lane] == [0, 2, 0]
    assert drained(policy) == ["n1", "n3"]


@ALL
def test_without_overtaking_it_is_by_arrival(name: str) -> None:
    rng = random.Random(1)
    sequences = [
        sequence(
            str(i), tenant=rng.choice("ab"), arrival=i / 4, max_tokens=rng.randint(1, 60),
            deadline=rng.choice([None, i / 4 + 1.0]),
        )
        for i in range(40)
    ]  # fmt: skip
    assert drained(filled(name, sequences, max_overtake_s=0.0)) == [s.id for s in sequences]


def test_a_bound_that_is_none_is_refused() -> None:
    for bad in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigurationError, match="max_overtake_s"):
            config(max_overtake_s=bad)


# -- what each puts first ------------------------------------------------------------------------


def test_sjf_takes_the_shortest_until_the_longest_has_waited() -> None:
    long = sequence("long", max_tokens=63)
    shorts = [sequence(f"s{i}", arrival=float(i), max_tokens=2) for i in range(12)]
    order = drained(filled("sjf", [long, *shorts]))
    # The long one's key is the bound, 8; the others' begin at 8 log(1 + 3) / log(1 + 64) = 2.7.
    assert order[:6] == [f"s{i}" for i in range(6)]
    assert order[6] == "long"


def test_sjf_counts_what_is_left_and_not_what_was_given() -> None:
    continued = sequence("continued", max_tokens=40, prompt=4)
    continued.token_ids += [1] * 36
    assert drained(filled("sjf", [sequence("new", max_tokens=10), continued])) == [
        "continued",
        "new",
    ]


def test_sjf_knows_that_the_context_ends_outputs() -> None:
    full = sequence("full", prompt=60, max_tokens=1000)
    assert drained(filled("sjf", [sequence("new", max_tokens=10), full])) == ["full", "new"]


@pytest.mark.parametrize("name", ["sjf", "priority"])
def test_a_long_prompt_counts_by_its_chunks(name: str) -> None:
    """30,000 tokens by 256 and one output take 118 steps, 10 tokens and 16 outputs take 17."""
    sequences = [
        sequence("long prompt", prompt=30_000, max_tokens=1),
        sequence("long output", prompt=10, max_tokens=100),
        sequence("short", prompt=10, max_tokens=16),
        sequence("two chunks", prompt=257),
        sequence("three chunks", prompt=513),
    ]
    limits = {"max_model_len": 32_768, "max_batch_tokens": 256, "chunk_size": 256}
    order = ["short", "two chunks", "three chunks", "long output", "long prompt"]
    assert drained(filled(name, sequences, **limits)) == order


@pytest.mark.parametrize("name", ["sjf", "priority"])
def test_a_prompt_that_is_read_at_once_counts_as_one_step(name: str) -> None:
    sequences = [sequence("short", max_tokens=3), sequence("long", prompt=40, max_tokens=2)]
    whole = {"chunking": Chunking.OFF, "max_batch_tokens": 80, "chunk_size": 64}
    assert drained(filled(name, sequences, **whole)) == ["long", "short"]


def test_edf_ranks_by_deadline_however_far_it_is() -> None:
    far = [
        sequence("600 s", deadline=600.0),
        sequence("35 s", arrival=2.0, deadline=35.0),
        sequence("none", arrival=3.0),
        sequence("599 s", arrival=5 * BOUND_S, deadline=599.0),
    ]
    assert drained(filled("edf", far)) == ["none", "35 s", "599 s", "600 s"]


def test_edf_lets_nobody_overtake_who_came_after_the_deadline() -> None:
    hasty = [sequence(f"h{i}", arrival=float(i), deadline=i + 1.0) for i in range(30)]
    order = drained(filled("edf", [sequence("20 s", deadline=20.0), sequence("none"), *hasty]))
    assert order.index("none") == BOUND_S - 1
    assert order.index("20 s") == 20


def test_edf_takes_the_earliest_deadline_and_none_counts_as_one_a_bound_away() -> None:
    order = drained(
        filled(
            "edf",
            [
                sequence("none"), sequence("far", deadline=100.0), sequence("near", deadline=3.0),
                sequence("past", deadline=-5.0), sequence("after", deadline=10.0, arrival=9.0),
            ],
        )
    )  # fmt: skip
    assert order == ["past", "near", "none", "after", "far"]


def test_priority_lets_waiting_make_up_for_the_lane() -> None:
    """Three quarters of the bound are what two lanes are worth."""
    batch = sequence("batch", Lane.BATCH)
    urgent = [sequence(f"c{i}", Lane.CRITICAL, arrival=i + 0.5) for i in range(10)]
    order = drained(filled("priority", [batch, *urgent]))
    assert order.index("batch") == 6


def test_priority_displaces_only_who_would_wait_behind() -> None:
    policy = make("priority")
    old = sequence("old", Lane.BATCH, arrival=0.0)
    young = sequence("young", Lane.BATCH, arrival=20.0)
    head = sequence("head", Lane.CRITICAL, arrival=20.0)
    assert policy.may_displace(head, young)
    assert not policy.may_displace(head, old)
    assert not policy.may_displace(young, old)


# -- any order of events -------------------------------------------------------------------------


class Turns:
    """The bound of ``fair``: of an overdue tenant's lane, every second admission is not for one
    that has been without a turn for less long.

    Args:
        bound: in seconds, after which a tenant is overdue.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.latest = -math.inf
        self.served: dict[str, float] = {}
        self.passed: dict[str, int] = {}

    def add(self, seq: Sequence) -> None:
        self.latest = max(self.latest, seq.arrival)

    def admit(self, first: Sequence, waiting: list[Sequence]) -> None:
        """``first`` was admitted, before these others of the lane."""
        since: dict[str, float] = {}
        for seq in sorted([first, *waiting], key=lambda s: s.arrival):
            served = self.served.get(seq.tenant, -math.inf)
            since.setdefault(seq.tenant, max(seq.arrival, served))
        for tenant, began in since.items():
            if tenant == first.tenant or began + self.bound >= self.latest:
                self.passed[tenant] = 0
                continue
            change = 1 if since[first.tenant] > began else -1
            self.passed[tenant] = max(0, self.passed.get(tenant, 0) + change)
            assert self.passed[tenant] <= 1
        self.served[first.tenant] = self.latest
        self.leave(waiting)

    def leave(self, waiting: list[Sequence]) -> None:
        """These still wait for their first admission."""
        tenants = {seq.tenant for seq in waiting}
        self.served = {t: served for t, served in self.served.items() if t in tenants}
        self.passed = {t: count for t, count in self.passed.items() if t in tenants}
        if not waiting:
            self.latest = -math.inf


class PolicyMachine(RuleBasedStateMachine):
    """Arrivals, admissions, preemptions, aborts and ends, as a scheduler brings them."""

    @initialize(name=st.sampled_from(PolicyName), bound=st.sampled_from([0.0, 0.5, BOUND_S]))
    def build(self, name: PolicyName, bound: float) -> None:
        self.name, self.bound = name, bound
        self.policy = make(name, max_overtake_s=bound)
        self.fresh: list[Sequence] = []  # never admitted
        self.returned: list[Sequence] = []  # the last one put back comes first
        self.running: list[Sequence] = []
        self.turns = {lane: Turns(bound) for lane in Lane}
        self.now = 0.0
        self.num_made = 0

    @rule(
        passed=st.integers(0, 8),
        age=st.sampled_from([0, 0, 0, 3]),
        lane=st.sampled_from(Lane),
        tenant=st.sampled_from("abc"),
        prompt=st.integers(1, 60),
        max_tokens=st.sampled_from([1, 3, 7, 15, 31, 63, 1000]),
        deadline=st.none() | st.integers(-4, 40),
    )
    def add(self, passed: int, age: int, deadline: int | None, **values: object) -> None:
        self.now += passed / 4
        self.num_made += 1
        seq = sequence(
            f"s{self.num_made}", arrival=self.now - age,
            deadline=None if deadline is None else self.now + deadline / 4, **values,
        )  # type: ignore[arg-type]  # fmt: skip
        self.policy.add(seq)
        self.turns[seq.lane].add(seq)
        self.fresh.append(seq)

    @precondition(lambda self: self.fresh or self.returned)
    @rule()
    def admit(self) -> None:
        first = self.policy.peek()
        assert first is not None
        self.policy.admit(first)
        self.running.append(first)
        lanes_are_hard = self.name is not PolicyName.PRIORITY
        if lanes_are_hard:
            assert first.rank == min(s.rank for s in self.fresh + self.returned)
        own = [s for s in self.returned if s.lane is first.lane]
        if own:
            assert first is own[-1]
            self.returned.remove(first)
            return
        self.fresh.remove(first)
        if self.name is PolicyName.FAIR and self.bound:
            self.turns[first.lane].admit(first, [s for s in self.fresh if s.lane is first.lane])
        for other in self.fresh:
            if other.lane is first.lane or (not lanes_are_hard and not self.returned):
                assert may_overtake(self.name, self.bound, first, other)
        if self.name is PolicyName.FCFS:
            assert all(
                int(first.id[1:]) < int(s.id[1:]) for s in self.fresh if s.lane is first.lane
            )

    @precondition(lambda self: self.running)
    @rule(data=st.data(), given=st.integers(0, 3))
    def preempt(self, data: st.DataObject, given: int) -> None:
        seq = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        seq.token_ids += [1] * min(given, 64 - seq.num_tokens)
        self.policy.put_back(seq)
        self.returned.append(seq)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.policy.end(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.fresh or self.returned)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.fresh + self.returned))
        self.policy.remove(seq)
        (self.fresh if seq in self.fresh else self.returned).remove(seq)
        self.turns[seq.lane].leave([s for s in self.fresh if s.lane is seq.lane])

    @invariant()
    def nobody_is_lost(self) -> None:
        if not hasattr(self, "policy"):
            return
        waiting = self.fresh + self.returned
        listed = list(self.policy)
        assert len(listed) == len(waiting)
        assert set(listed) == set(waiting)
        for lane in Lane:
            assert self.policy.num_waiting(lane) == sum(s.lane is lane for s in waiting)
        assert self.policy.peek() is self.policy.peek()
        assert (self.policy.peek() is None) == (not waiting)


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


# -- cost ----------------------------------------------------------------------------------------


class Counted(float):
    """A time that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float(self) == other

    __hash__ = float.__hash__

    def __add__(self, other: float) -> Counted:
        return Counted(float(self) + other)


@ALL
def test_cost_of_an_operation_grows_as_the_logarithm(name: str) -> None:
    """Comparisons of one admission, one arrival, one abort beside 64 and beside 16,384 waiting."""
    per_operation = {}
    for count in (64, 16_384):
        rng = random.Random(count)
        sequences = [
            sequence(str(i), arrival=Counted(rng.random()), tenant=f"t{i % 7}")
            for i in range(count)
        ]
        policy = filled(name, sequences)
        Counted.comparisons, operations = 0, 200
        for i in range(operations):
            first = policy.peek()
            assert first is not None
            policy.admit(first)
            late = sequence(f"late{i}", arrival=Counted(rng.random()), tenant="t1")
            policy.add(late)
            policy.remove(late)
            policy.add(sequence(f"next{i}", arrival=Counted(rng.random()), tenant="t2"))
        per_operation[count] = Counted.comparisons / operations
    # log2 grows from 6 to 14, that is 2.3 times; the array may hold as many that left again.
    assert per_operation[16_384] <= 4 * per_operation[64] + 1


def test_heap_is_a_sorted_dictionary() -> None:
    rng = random.Random(0)
    heap: RemovableHeap[int] = RemovableHeap()
    model: dict[int, tuple[float, int]] = {}
    for number in range(5000):
        item = rng.randrange(60)
        if item in model and rng.random() < 0.5:
            heap.remove(item)
            del model[item]
        else:
            key = float(rng.randrange(20))
            heap.put(item, key)
            model[item] = (key, number)
        assert heap.first() == min(model, key=model.__getitem__, default=None)
        assert len(heap) == len(model)
        assert all(heap.key(item) == model[item][0] for item in heap)
        assert len(heap._array) <= 2 * len(model) + 16
