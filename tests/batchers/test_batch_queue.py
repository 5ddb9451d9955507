"""The queue of a batcher, with its invariants checked after every step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.gpu_worker.batchers.batch_queue import Batch, BatchQueue, Item
from penstock.gpu_worker.batchers.window import Window
from penstock.shared.protocol.states import Lane

MAX_WAIT_S = 0.25


class Queue(RuleBasedStateMachine):
    """Items come, are cancelled, expire, and go in batches."""

    max_batch, max_cost, adaptive = 3, None, False

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.window = Window(MAX_WAIT_S, adaptive=self.adaptive)
        self.queue = BatchQueue(self.max_batch, self.max_cost, self.window)
        self.waiting: dict[str, Item] = {}
        self.count = 0

    @rule(
        lane=st.sampled_from(Lane),
        cost=st.integers(0, 5),
        key=st.sampled_from("ab"),
        alone=st.sampled_from([False, False, False, True]),
        age=st.floats(0, 2),
        left=st.sampled_from([0.1, 1.0, 60.0]),
    )
    def add(self, lane: Lane, cost: int, key: str, alone: bool, age: float, left: float) -> None:
        self.count += 1
        item = Item(
            run=f"r{self.count}", payload=self.count, lane=lane, cost=cost, key=key,
            arrival=self.now - age, came=self.now, deadline=self.now + left, alone=alone,
        )  # fmt: skip
        self.queue.add(item)
        self.waiting[item.run] = item

    @rule(data=st.data())
    @precondition(lambda self: self.waiting)
    def cancel(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.drop(run)
        assert not self.queue.drop(run)
        del self.waiting[run]

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.2, 0.3, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = [run for run, item in self.waiting.items() if item.deadline <= self.now]
        assert self.queue.drop_expired(self.now) == len(over)
        for run in over:
            del self.waiting[run]

    @rule(seconds=st.floats(0, 0.1))
    def schedule(self, seconds: float) -> None:
        due = self.queue.next_due()
        batch = self.queue.schedule(self.now)
        if batch is None:
            assert due is None or due > self.now
            assert (due is None) is (not self.waiting)
            assert not any(item.arrival + MAX_WAIT_S < self.now for item in self.waiting.values())
            return
        assert due is not None
        assert due <= self.now
        self.check(batch)
        self.window.ran(batch.cost, seconds)

    def check(self, batch: Batch) -> None:
        items = batch.items
        assert 0 < len(items) <= self.max_batch
        if self.max_cost is not None:
            assert len(items) == 1 or batch.cost <= self.max_cost
        if any(item.alone for item in items):
            assert len(items) == 1
        assert len({item.key for item in items}) == 1
        for item in items:
            assert self.waiting.pop(item.run) == item
        # Nobody of the same key was passed over.
        rivals = [
            item
            for item in self.waiting.values()
            if not item.alone and item.key == items[0].key and not items[0].alone
        ]
        assert all(rival.turn >= items[-1].turn for rival in rivals)

    @invariant()
    def all_is_in_order(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.waiting)
        assert {item.run for item in self.queue} == set(self.waiting)

    def teardown(self) -> None:
        """Whatever waits goes some time, without anything else happening."""
        self.now += MAX_WAIT_S + 1
        while self.waiting:
            batch = self.queue.schedule(self.now)
            assert batch is not None
            self.check(batch)
        assert self.queue.next_due() is None


class AdaptiveQueue(Queue):
    max_cost, adaptive = 6, True


TestQueue = Queue.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAdaptiveQueue = AdaptiveQueue.TestCase
TestAdaptiveQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def item(run: str, **values: object) -> Item:
    return Item(run=run, payload=None, **values)  # type: ignore[arg-type]


def runs(batch: Batch | None) -> list[str]:
    assert batch is not None
    return [one.run for one in batch.items]


def test_urgent_items_go_first_but_others_come_to_their_turn() -> None:
    queue = BatchQueue(2, None, Window(0))
    for at in range(6):
        queue.add(item(f"c{at}", lane=Lane.CRITICAL, arrival=at))
    queue.add(item("b", lane=Lane.BATCH, arrival=0))
    order = [run for _ in range(4) for run in runs(queue.schedule(10))]
    assert order == ["c0", "c1", "c2", "b", "c3", "c4", "c5"]  # two lanes down are two seconds


def test_a_suspect_goes_alone_behind_a_batch_of_those_that_wait_with_it() -> None:
    queue = BatchQueue(2, None, Window(60, adaptive=False))
    queue.add(item("suspect", alone=True))
    queue.add(item("a"))
    assert runs(queue.schedule(0)) == ["a"]
    queue.add(item("b"))
    assert runs(queue.schedule(0)) == ["suspect"]
    assert queue.schedule(0) is None


def test_a_dear_item_is_a_batch_by_itself() -> None:
    queue = BatchQueue(8, 10, Window(0))
    for run, cost in (("a", 4), ("b", 50), ("c", 6), ("d", 4)):
        queue.add(item(run, cost=cost))
    assert [runs(queue.schedule(1)) for _ in range(3)] == [["a"], ["b"], ["c", "d"]]
