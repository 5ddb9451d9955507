"""Drafting is never much slower than not drafting, whatever fits and noise say."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig, Speculator
from penstock.gpu_worker.engine.speculation.guard import Guard, Permission
from penstock.gpu_worker.engine.speculation.verification_cost import (
    Calibration,
    StepCosts,
    StepTiming,
)
from penstock.shared.protocol import SamplingOptions

STEPS = 2000

DRAFTING = (Permission.TASTE, Permission.TRIAL, Permission.PROMISING)

_WITHIN = 8
"""Within an attempt there are fewer steps without drafts in a row, to compare with."""

# --- the guard alone


def drive(
    guard: Guard, steps: int, drafted: Callable[[int], tuple[float, int]], reading: float = 0.0
) -> list[bool]:
    """Steps of one sequence that draft where they may; ``drafted`` gives seconds and tokens.

    The first of each attempt takes ``reading`` seconds more, as the draft model reads up.
    """
    took_drafts: list[bool] = []
    for step in range(steps):
        drafts = guard.permit(1) in DRAFTING
        if drafts:
            seconds, tokens = drafted(step)
            late = 0.0 if any(took_drafts[-_WITHIN:]) else reading
            guard.observe_drafted(1, tokens, (seconds, 1.0), (late, 0.0))
        elif guard.wants(1):
            guard.observe_plain(1, 1.0)
        took_drafts.append(drafts)
    return took_drafts


def attempts(took_drafts: list[bool]) -> list[int]:
    """Steps with which one begins."""
    return [
        step
        for step, drafts in enumerate(took_drafts)
        if drafts and not any(took_drafts[max(0, step - _WITHIN) : step])
    ]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.95, 1.9), st.integers(1, 2)), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.5, 5.0, 15.0]),
)
def test_no_course_of_costs_loses_more_than_a_per_cent(
    course: list[tuple[float, int]], reading: float
) -> None:
    """Where no step is an outlier: then it holds for every course, not on average."""
    lost = 0.0

    def drafted(step: int) -> tuple[float, int]:
        nonlocal lost
        seconds, tokens = course[step % len(course)]
        lost += seconds - tokens
        return seconds, tokens

    took = drive(Guard(lambda _: 1.0), STEPS, drafted, reading)
    assert lost + reading * len(attempts(took)) < 0.015 * STEPS + 4 + reading


def test_it_begins_without_drafts_and_stays_with_those_that_pay() -> None:
    took = drive(Guard(lambda _: 1.0), STEPS, lambda _: (1.5, 2))
    assert took.index(True) == 5
    assert sum(took) > 0.97 * STEPS
    assert not all(took[5:])  # what a step without them takes is still measured


def test_pauses_become_longer_and_an_attempt_that_pays_ends_them() -> None:
    pays_from = 5000
    took = drive(Guard(lambda _: 1.0), 9000, lambda step: (1.3, 1 + (step >= pays_from)))
    pauses = [later - earlier for earlier, later in pairwise(attempts(took[:pays_from]))]
    assert pauses[0] < 400
    assert pauses[-1] > 1000
    assert pauses == sorted(pauses)
    assert sum(took[pays_from:]) > 2800


def test_batch_sizes_are_judged_apart() -> None:
    guard = Guard(lambda count: float(count))
    may: dict[int, int] = {1: 0, 30: 0}
    for _ in range(400):
        for count in may:
            if guard.permit(count) in DRAFTING:
                may[count] += 1
                seconds = 1.2 if count == 1 else 120.0
                guard.observe_drafted(count, 2 * count, (seconds, seconds), (0.0, 0.0))
            elif guard.wants(count):
                guard.observe_plain(count, float(count))
    assert may[1] > 380
    assert may[30] <= 4


def test_reading_a_long_prompt_does_not_end_drafts_that_pay() -> None:
    guard = Guard(lambda _: 1.0)
    drafts = 0
    for _ in range(300):
        if guard.permit(1) in DRAFTING:
            reading = 10.0 if drafts == 0 else 0.0
            guard.observe_drafted(1, 2, (1.1, 1.1), (0.1 + reading, 0.1))
            drafts += 1
        else:
            guard.observe_plain(1, 1.0)
    assert drafts > 280


def test_without_times_promises_must_do() -> None:
    guard = Guard(lambda _: 1.0)
    assert guard.permit(3) is Permission.NONE
    guard.observe_timing(False)
    assert guard.permit(3) is Permission.PROMISING


def test_a_step_without_a_time_is_not_judged_and_the_others_still_are() -> None:
    """The first step of a worker may raise, and any later one."""
    guard = Guard(lambda _: 1.0)
    guard.observe_timing(False)
    guard.observe_timing(True)
    assert guard.permit(3) is Permission.NONE
    guard.observe_timing(False)
    assert guard.permit(3) is Permission.NONE


# --- with the choice of lengths, in worlds whose costs differ from what was timed at start

DRAFTS = (0, 1, 7)


def times(per_draft: float, draft: float) -> Calibration:
    """A step of 1 s, which each draft of each sequence makes ``per_draft`` longer."""
    sequences = (1, 8, 64)
    return Calibration(
        sequences=sequences,
        drafts=DRAFTS,
        verify=tuple(tuple(1.0 + per_draft * s * d for d in DRAFTS) for s in sequences),
        draft=tuple(draft for _ in sequences),
    )


@dataclass
class World:
    """Steps whose cost and acceptance are given, and how exactly they are measured.

    In some steps, by chance ``prompts``, a chunk of a prompt is read. A draft model that is first
    asked for a sequence takes ``reading`` seconds to read it. Sequences end by chance, after
    ``life`` steps on average, and others take their places. All texts repeat themselves.
    """

    count: int
    per_draft: float
    draft: float
    rate: Callable[[int], float]
    speed: Callable[[int], float] = lambda _: 1.0
    jitter: float = 0.0
    outliers: float = 0.0
    seed: int = 0
    prompts: float = 0.0
    chunk: int = 16
    reading: float = 0.0
    life: int = 10**9
    tokens: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0
    beside_prompts: list[bool] = field(default_factory=list)  # of such steps, which had drafts
    _random: random.Random = field(init=False)
    _made: int = 0
    _read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def _new(self) -> Sequence:
        self._made += 1
        options = SamplingOptions(max_tokens=100_000)
        sequence = Sequence(id=str(self._made), prompt_ids=(5, 6, 7, 1, 2, 5), options=options)
        sequence.token_ids += [6, 7]
        return sequence

    def _reads(self, asked: list[Span]) -> float:
        """Seconds in which the draft model reads up."""
        new = {span.sequence.id for span in asked} - self._read
        self._read |= new
        return len(new) * self.reading

    def run(self, config: SpeculationConfig, steps: int = STEPS) -> float:
        """Tokens per second over those without drafts, both without the noise."""
        truth = StepCosts(times(self.per_draft, self.draft))
        speculator = Speculator(config, 10**6, 100)
        sequences = [self._new() for _ in range(self.count)]
        prompt = Sequence(id="prompt", prompt_ids=range(STEPS), options=SamplingOptions())
        for step in range(steps):
            spans = [Span(s, s.num_tokens - 1, 1, True) for s in sequences]
            reads = self.prompts > 0 and self._random.random() < self.prompts
            if reads:
                spans.append(Span(prompt, 0, self.chunk, False))
            for choice in speculator.choose(spans, 10_000):
                spans[choice.index].num_drafts = choice.count
                spans[choice.index].source = choice.source
                spans[choice.index].drafts = choice.drafts[: choice.count]
            came = self._verify(speculator, spans[: self.count], self.rate(step))
            drafts = [span.num_drafts for span in spans]
            prompt_seconds = reads * self.chunk * truth.token(self.count) * self.speed(step)
            if reads:
                self.beside_prompts.append(any(drafts))
            asked = [span for span in spans if span.num_drafts and not span.drafts]
            longest = max([span.num_drafts for span in asked], default=0)
            drafting = (truth.draft(len(asked), longest) + self._reads(asked)) * self.speed(step)
            verify = truth.verify(self.count, sum(drafts) / self.count) * self.speed(step)
            verify += prompt_seconds
            self.tokens += came / self.count
            self.seconds += verify + drafting
            self.plain_seconds += self.speed(step) * came / self.count + prompt_seconds
            noise = self._noise()
            speculator.observe_step(spans, came, StepTiming(verify * noise + drafting, drafting))
            for index in range(self.count):
                if self._random.random() * self.life < 1:
                    sequences[index] = self._new()
        return self.plain_seconds / self.seconds

    def _verify(self, speculator: Speculator, spans: list[Span], rate: float) -> int:
        came = len(spans)
        for span in spans:
            accepted = 0
            while accepted < span.num_drafts and self._random.random() < rate:
                accepted += 1
            if span.num_drafts:
                speculator.observe(span, span.num_drafts, accepted, accepted)
            came += accepted
        return came

    def _noise(self) -> float:
        noise = 1 + self.jitter * self._random.random()
        return noise * (5.0 if self._random.random() < self.outliers else 1.0)


def auto(per_draft: float, draft: float, *, ngram: bool = False) -> SpeculationConfig:
    """A worker that timed such steps at start."""
    return SpeculationConfig(ngram=ngram, draft=True, calibration=times(per_draft, draft))


@settings(max_examples=25, deadline=None)
@given(
    count=st.sampled_from([1, 2, 4, 8]),
    per_draft=st.sampled_from([0.002, 0.02, 0.1, 0.4]),
    believed=st.sampled_from([0.0, 0.002, 0.05]),
    rate=st.sampled_from([0.0, 0.1, 0.4, 0.8]),
    jitter=st.sampled_from([0.0, 0.3]),
    outliers=st.sampled_from([0.0, 0.03]),
    seed=st.integers(0, 9),
    prompts=st.sampled_from([0.0, 0.3, 0.9]),
    reading=st.sampled_from([0.0, 0.2, 1.0]),
    life=st.sampled_from([10**9, 300]),
    ngram=st.booleans(),
)
def test_the_loss_is_at_most_three_per_cent(
    count: int,
    per_draft: float,
    believed: float,
    rate: float,
    jitter: float,
    outliers: float,
    seed: int,
    prompts: float,
    reading: float,
    life: int,
    ngram: bool,
) -> None:
    """Drafts useless or not, verifying dearer than was timed, steps noisy or with prompts, and a
    draft model that must read what it is asked of."""
    world = World(
        count, per_draft, 0.1, lambda _: rate, jitter=jitter, outliers=outliers, seed=seed,
        prompts=prompts, reading=reading, life=life,
    )  # fmt: skip
    assert world.run(auto(believed, 0.02, ngram=ngram)) > 0.97


@pytest.mark.parametrize(("per_draft", "count"), [(0.4, 30), (0.1, 64), (2.0, 16)])
def test_nor_where_large_batches_make_verifying_very_dear(per_draft: float, count: int) -> None:
    world = World(count, per_draft, 0.1, lambda _: 0.6)
    assert world.run(auto(0.001, 0.02)) > 0.97


@pytest.mark.parametrize("period", [150, 500, 1000])
def test_nor_where_workload_and_machine_change(period: int) -> None:
    def rate(step: int) -> float:
        return 0.8 if step // period % 2 else 0.0

    def speed(step: int) -> float:
        return 1.7 if step // (period + 70) % 2 else 1.0

    for per_draft in (0.02, 0.3):
        assert World(2, per_draft, 0.1, rate, speed, jitter=0.2).run(auto(0.01, 0.02)) > 0.97


@pytest.mark.parametrize(
    ("per_draft", "rate", "count"), [(0.01, 0.7, 1), (0.01, 0.9, 4), (0.05, 0.8, 2), (0.3, 0.9, 1)]
)
@pytest.mark.parametrize("noise", [(0.0, 0.0), (0.3, 0.03)])
def test_where_drafts_help_nine_tenths_of_the_best_fixed_length_are_reached(
    per_draft: float, rate: float, count: int, noise: tuple[float, float]
) -> None:
    def world() -> World:
        return World(count, per_draft, 0.1, lambda _: rate, jitter=noise[0], outliers=noise[1])

    def fixed(length: int) -> SpeculationConfig:
        return SpeculationConfig(ngram=False, draft=True, length=length)

    best = max(world().run(fixed(length), 600) for length in range(1, 8))
    assert best > 1.2
    assert world().run(auto(per_draft / 2, 0.15)) > 0.9 * best


@pytest.mark.parametrize("period", [40, 130, 400])
def test_a_machine_that_becomes_slower_and_faster_ends_no_drafts_that_pay(period: int) -> None:
    """By half, again and again: steps are judged by those beside them."""
    world = World(
        4, 0.03, 0.05, lambda _: 0.5, lambda step: 1.6 if step // period % 2 else 1.0, jitter=0.1
    )
    steady = World(4, 0.03, 0.05, lambda _: 0.5, jitter=0.1).run(auto(0.03, 0.05))
    assert steady > 1.12
    assert world.run(auto(0.03, 0.05)) > 0.96 * steady


@pytest.mark.parametrize("chunk", [2, 32, 128])
@pytest.mark.parametrize("prompts", [0.9, 1.0])
def test_nothing_is_tried_in_steps_that_nobody_can_judge(prompts: float, chunk: int) -> None:
    world = World(12, 0.05, 0.2, lambda _: 0.0, prompts=prompts, chunk=chunk)
    assert world.run(auto(0.01, 0.05)) > 0.97
    assert sum(world.beside_prompts) == 0


def test_drafts_that_pay_are_there_beside_prompts_as_long_as_they_promise_to() -> None:
    world = World(4, 0.02, 0.1, lambda step: 0.8 if step < 1000 else 0.0, prompts=0.9)
    world.run(auto(0.02, 0.1))
    begun = world.beside_prompts.index(True)
    assert begun < 300
    assert sum(world.beside_prompts[begun:800]) > 0.9 * (800 - begun)
    assert sum(world.beside_prompts[1000:]) < 20


def test_what_becomes_guessable_is_found_out() -> None:
    world = World(1, 0.02, 0.1, lambda step: 0.8 if step > 1000 else 0.0)
    world.run(auto(0.02, 0.1), 4000)
    assert world.tokens > 1000 + 2 * 3000
