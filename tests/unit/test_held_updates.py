"""Tokens that wait for those of later steps: none is lost, and none waits that must not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.engine.requests.engine_request import Finish, Update
from penstock.gpu_worker.engine_process.held_updates import HeldUpdates
from penstock.shared.protocol.states import Reason

INTERVAL_S = 0.05


def token(run: str, index: int, *, ends: bool = False) -> Update:
    finish = Finish(Reason.LENGTH) if ends else None
    return Update(run, index, (index,), f"<{index}é>", finish, 7, 0)


def test_first_tokens_and_ends_never_wait() -> None:
    held = HeldUpdates(INTERVAL_S)
    assert held.release([token("a", 0)], 1.0, everything=False) == [token("a", 0)]
    assert held.release([token("a", 1), token("b", 0)], 1.01, everything=False) == [token("b", 0)]
    (end,) = held.release([token("a", 2, ends=True)], 1.02, everything=False)
    assert (end.start, end.token_ids, end.text) == (1, (1, 2), "<1é><2é>")
    assert end.text_lengths == (5,)  # bytes of the first
    assert end.finish is not None


def test_they_are_released_when_the_interval_has_passed() -> None:
    held = HeldUpdates(INTERVAL_S)
    held.release([token("a", 0)], 1.0, everything=False)
    assert held.release([token("a", 1)], 1.01, everything=False) == []
    assert not held.is_due(1.04)
    (update,) = held.release([token("a", 2)], 1.05, everything=False)
    assert (update.start, update.token_ids) == (1, (1, 2))


def test_an_aborted_run_leaves_nothing() -> None:
    held = HeldUpdates(INTERVAL_S)
    held.release([token("a", 0)], 1.0, everything=False)
    held.release([token("a", 1)], 1.01, everything=False)
    held.forget("a")
    assert held.release([], 2.0, everything=True) == []


def test_a_run_that_cannot_be_joined_leaves_as_it_is_and_the_others_joined() -> None:
    """The edge ends that request alone; an error here would end the worker."""
    held = HeldUpdates(INTERVAL_S)
    held.release([token("a", 0), token("b", 0)], 1.0, everything=False)
    broken = [Update("a", index, (index,), "\ud800", None, 7, 0) for index in (1, 2)]
    held.release([broken[0], token("b", 1)], 1.01, everything=False)
    *of_a, of_b = held.release([broken[1], token("b", 2)], 1.02, everything=True)
    assert of_a == broken
    assert of_b.token_ids == (1, 2)


def test_without_an_interval_none_waits() -> None:
    held = HeldUpdates(0.0)
    for index in range(3):
        updates = [token("a", index)]
        assert held.release(updates, 1.0, everything=False) == updates


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 0.1)), max_size=60),
)
def test_every_token_comes_out_once_in_its_order(turns: list[tuple[str, bool, float]]) -> None:
    """Each run's tokens, whenever they come and whichever of its successors ends."""
    held = HeldUpdates(INTERVAL_S)
    now, given_ = 0.0, dict.fromkeys("abc", 0)
    got: dict[str, list[int]] = {run: [] for run in "abc"}
    ended: set[str] = set()

    def take(updates: list[Update]) -> None:
        for update in updates:
            assert update.start == len(got[update.id])
            got[update.id] += update.token_ids

    for run, ends, pause_s in turns:
        now += pause_s
        if run in ended:
            continue
        update = token(run, given_[run], ends=ends)
        is_first = not given_[run]
        given_[run] += 1
        take(held.release([update], now, everything=False))
        if is_first or ends:
            assert len(got[run]) == given_[run]
        if ends:
            ended.add(run)
    take(held.release([], now, everything=True))
    assert got == {run: list(range(count)) for run, count in given_.items()}
