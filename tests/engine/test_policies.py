from __future__ import annotations

from penstock.gpu_worker.engine import LaneFcfs, Sequence
from penstock.shared.protocol import Lane, SamplingOptions


def sequence(id: str, lane: Lane = Lane.NORMAL) -> Sequence:
    return Sequence(id=id, prompt_ids=[1], options=SamplingOptions(), lane=lane)


def drained(policy: LaneFcfs) -> list[str]:
    order = []
    while (first := policy.peek()) is not None:
        policy.remove(first)
        order.append(first.id)
    return order


def test_lanes_then_arrival() -> None:
    policy = LaneFcfs()
    for id, lane in [("b", Lane.BATCH), ("n1", Lane.NORMAL), ("c", Lane.CRITICAL)]:
        policy.add(sequence(id, lane))
    policy.add(sequence("n2"))
    assert [s.id for s in policy] == ["c", "n1", "n2", "b"]
    assert drained(policy) == ["c", "n1", "n2", "b"]
    assert policy.peek() is None


def test_peek_changes_nothing() -> None:
    policy = LaneFcfs()
    policy.add(sequence("a"))
    assert policy.peek() is policy.peek() is not None
    assert policy.num_waiting(Lane.NORMAL) == 1


def test_preempted_go_to_the_front_of_their_own_lane() -> None:
    policy = LaneFcfs()
    policy.add(sequence("c", Lane.CRITICAL))
    policy.add(sequence("b1", Lane.BATCH))
    policy.put_back(sequence("b2", Lane.BATCH))
    assert drained(policy) == ["c", "b2", "b1"]


def test_removal_from_the_middle() -> None:
    policy, middle = LaneFcfs(), sequence("n2")
    for seq in (sequence("n1"), middle, sequence("n3")):
        policy.add(seq)
    policy.remove(middle)
    assert [policy.num_waiting(lane) for lane in Lane] == [0, 2, 0]
    assert drained(policy) == ["n1", "n3"]
