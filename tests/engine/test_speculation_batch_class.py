"""When one class of batch sizes turns drafts on and off."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.speculation.batch_class import BatchClass, Mode, Work

STEPS = 2000
_WITHIN = 8
"""A probe has fewer plain steps in a row than this, a pause has more."""

Outcome = Callable[[int], tuple[float, float]]
"""Seconds that a step with drafts takes, and the plain steps' tokens it gives, by step."""


def drive(
    batch: BatchClass,
    steps: int,
    drafted: Outcome,
    *,
    reading: float = 0.0,
    plain: Callable[[int], float] = lambda _: 1.0,
) -> list[bool]:
    """Make steps that draft wherever they may; True for each with drafts.

    The first of each attempt takes ``reading`` seconds more, as the draft model reads up.
    """
    took: list[bool] = []
    for step in range(steps):
        drafts = batch.may_draft()
        if drafts:
            seconds, tokens = drafted(step)
            late = 0.0 if any(took[-_WITHIN:]) else reading
            batch.observe_drafted(1, tokens, seconds, 1, 0.01 + late, typical=not late)
        else:
            batch.observe_plain(plain(step))
        took.append(drafts)
    return took


def attempts(took: list[bool]) -> list[int]:
    """Steps with which one begins."""
    return [i for i, drafts in enumerate(took) if drafts and not any(took[max(0, i - _WITHIN) : i])]


def test_it_times_plain_steps_first_and_keeps_drafts_that_pay() -> None:
    took = drive(batch := BatchClass(1), STEPS, lambda _: (1.5, 2))
    assert batch.mode is Mode.ON
    assert took.index(True) == 4
    assert sum(took) > 0.97 * STEPS
    assert not all(took[-100:])  # it still measures what a plain step takes
    assert 1.25 < batch.gain < 1.35


def test_drafts_that_lose_are_turned_off_and_tried_again_seldom() -> None:
    took = drive(BatchClass(1), STEPS, lambda _: (1.5, 1))
    begun = attempts(took)
    assert 2 <= len(begun) <= 5
    assert sum(took) < 60
    assert all(later - earlier >= 64 for earlier, later in pairwise(begun))


def test_the_pause_is_as_long_as_a_failed_probe_was_dear() -> None:
    def pause(seconds: float) -> int:
        first, second, *_ = attempts(drive(BatchClass(1), STEPS, lambda _: (seconds, 1)))
        return second - first

    assert pause(1.1) < 250 < pause(1.5) < 900


def test_drafts_that_begin_to_pay_are_turned_on_and_those_that_cease_to_off() -> None:
    def drafted(step: int) -> tuple[float, float]:
        return 1.2, 2.0 if STEPS <= step < 2 * STEPS else 1.0

    took = drive(BatchClass(1), 3 * STEPS, drafted)
    before, during, after = took[:STEPS], took[STEPS : 2 * STEPS], took[2 * STEPS :]
    assert sum(before) < 0.05 * STEPS
    assert sum(during) > 0.7 * STEPS
    assert sum(after) < 0.1 * STEPS


def test_a_gain_between_the_thresholds_changes_nothing() -> None:
    """Hysteresis: what does not turn drafts on does not turn them off either."""
    took = drive(BatchClass(1), STEPS, lambda _: (1.0, 1.03))
    assert sum(took) < 0.3 * STEPS
    on = BatchClass(1)
    drive(on, 200, lambda _: (1.0, 1.3))
    took = drive(on, STEPS, lambda _: (1.0, 1.03))
    assert sum(took) > 0.9 * STEPS
    assert on.mode is Mode.ON


def test_nothing_to_draft_for_long_turns_off_the_look_ups() -> None:
    batch = BatchClass(1)
    drive(batch, 200, lambda _: (1.0, 2.0))
    asked = 0
    for _ in range(1000):
        asked += batch.may_draft()
        batch.observe_plain(1.0)
    assert 32 <= asked < 0.45 * 1000


def test_reading_a_long_prompt_does_not_end_drafts_that_pay() -> None:
    took = drive(BatchClass(1), 300, lambda _: (1.1, 2.0), reading=10.0)
    assert sum(took) > 280


def test_a_machine_that_slows_down_slows_the_host_too() -> None:
    """A class sees few plain steps, so it learns late how long they take outside the model."""
    batch, count = BatchClass(1), 0
    for step in range(STEPS):
        speed = 2.0 if step // 100 % 2 else 1.0
        if batch.may_draft():
            count += 1
            batch.observe_drafted(1, 1.5, 1.25 * speed, 0, 0.0, typical=True)
            batch.observe_host(Work.VERIFY, 1.25 * speed, 0.4 * speed)
        else:
            batch.observe_plain(speed)
            batch.observe_host(Work.NONE, speed, 5.0 if step == 0 else 0.3 * speed)
    assert count > 0.85 * STEPS


def test_a_step_that_was_held_up_does_not_end_drafts_that_pay() -> None:
    def drafted(step: int) -> tuple[float, float]:
        return (50.0 if step % 97 == 50 else 1.2), 1.6

    assert sum(drive(BatchClass(1), STEPS, drafted)) > 0.9 * STEPS


def test_a_machine_that_slows_down_is_not_taken_for_a_loss() -> None:
    def speed(step: int) -> float:
        return 1.7 if step // 60 % 2 else 1.0

    took = drive(BatchClass(1), STEPS, lambda s: (1.2 * speed(s), 1.5), plain=speed)
    assert sum(took) > 0.85 * STEPS


def test_a_draft_model_that_loses_does_not_hold_up_drafts_from_the_text() -> None:
    """It once did: texts that repeat themselves waited thousands of steps after its probe."""
    batch = BatchClass(1, has_others=True)
    by_text = by_model = 0
    for _ in range(STEPS):
        if not batch.may_draft():
            batch.observe_plain(1.0)
        elif batch.may_ask():
            by_model += 1
            batch.observe_drafted(1, 1.5, 1.5, 1, 1.0, typical=True)
        else:
            by_text += 1
            batch.observe_drafted(1, 1.8, 1.2, 0, 0.0, typical=True)
    assert 0 < by_model < 0.1 * STEPS
    assert by_text > 0.8 * STEPS


def driven_beside_a_host(batch: BatchClass, *, looking_up: float, verifying: float) -> int:
    """Steps with drafts, of many in which every second one finds some worth verifying."""
    count = 0
    for step in range(STEPS):
        if not batch.may_draft():
            batch.observe_plain(1.0)
            batch.observe_host(Work.NONE, 1.0, 0.1)
        elif step % 2:
            batch.observe_plain(1.0)
            batch.observe_host(Work.LOOK_UP, 1.0, looking_up)
        else:
            count += 1
            batch.observe_drafted(1, 1.5, 1.2, 0, 0.0, typical=True)
            batch.observe_host(Work.VERIFY, 1.2, verifying)
    return count


def test_time_outside_the_model_counts() -> None:
    """Look-ups that cost more than drafts gain: the model's own time showed a gain of a seventh."""
    assert driven_beside_a_host(BatchClass(1), looking_up=0.1, verifying=0.1) > 0.4 * STEPS
    assert driven_beside_a_host(BatchClass(1), looking_up=0.3, verifying=0.4) < 0.08 * STEPS


def test_costs_are_learned_from_steps() -> None:
    batch = BatchClass(1)
    for step in range(400):
        count = 1 + step % 7
        if batch.may_draft():
            seconds = 1.0 + 0.2 + 0.1 * count
            batch.observe_drafted(count, 2.0, seconds, count, 0.05 * count, typical=True)
        else:
            batch.observe_plain(1.0)
    prices = batch.prices(1)
    for price, seconds in ((prices.step, 0.2), (prices.token, 0.1), (prices.round, 0.05)):
        assert 0.9 * seconds < price / batch.gain < 1.1 * seconds


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0.95, 1.9), st.integers(1, 2)), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.5, 5.0, 15.0]),
)
def test_no_course_of_costs_loses_much(course: list[tuple[float, int]], reading: float) -> None:
    lost = 0.0

    def drafted(step: int) -> tuple[float, float]:
        nonlocal lost
        seconds, tokens = course[step % len(course)]
        lost += seconds - tokens
        return seconds, tokens

    took = drive(BatchClass(1), STEPS, drafted, reading=reading)
    assert lost + reading * len(attempts(took)) < 0.015 * STEPS + 4 + reading


def test_probes_that_fail_again_and_again_become_rare() -> None:
    """And one that succeeds makes the next ones frequent again."""
    took = drive(batch := BatchClass(1), 6 * STEPS, lambda _: (1.6, 1.0))
    assert batch.mode is Mode.OFF
    begun = attempts(took)
    pauses = [later - earlier for earlier, later in pairwise(begun)]
    assert pauses[1] > 1.5 * pauses[0]
    assert pauses[2] > 1.5 * pauses[1]
    assert max(pauses) < 12 * pauses[0]
    drive(batch, 8 * STEPS, lambda _: (1.0, 2.0))
    assert batch.mode is Mode.ON
    took = drive(batch, 2 * STEPS, lambda _: (1.6, 1.0))
    first, second, *_ = attempts(took)
    assert second - first < 1.5 * pauses[0]


def test_steps_of_a_pause_that_only_pass_count_all_the_same() -> None:
    batch = BatchClass(1)
    while not batch.idle_steps:
        if batch.may_draft():
            batch.observe_drafted(1, 1.0, 2.0, 0, 0.0, typical=True)
        else:
            batch.observe_plain(1.0)
    left, due = batch.idle_steps, batch.plain_due
    assert left > 32
    batch.skip(left - 1)
    assert (batch.idle_steps, batch.plain_due) == (1, due - left + 1)
    batch.observe_plain(1.0)
    assert batch.idle_steps == 0
    for _ in range(batch.plain_due):
        assert not batch.may_draft()
        batch.observe_plain(1.0)
    assert batch.may_draft()


def test_only_the_first_steps_of_a_probe_draft_whatever_that_promises() -> None:
    batch = BatchClass(1)
    for _ in range(4):
        assert not batch.must_draft()
        batch.observe_plain(1.0)
    blind = 0
    while batch.must_draft():
        blind += 1
        batch.observe_drafted(1, 2.0, 1.1, 0, 0.0, typical=True)
    assert blind == 4
    assert batch.mode is Mode.PROBE
    assert batch.may_draft()
