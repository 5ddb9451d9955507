"""Drafts are there where they are measured to pay, and cost little where they do not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.output.step_output import StepTiming
from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.batch_class import BatchClass
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig, Speculator
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Speculation

STEPS = 2000


@dataclass
class World:
    """Steps whose cost and acceptance are given, and how exactly they are measured.

    A step takes 1 s. Having drafts adds ``any_draft``, each draft ``per_draft``, and each round of
    the draft model ``draft``. With chance ``prompts`` a step reads a chunk of a prompt. A draft
    model that is first asked for a sequence takes ``reading`` seconds to read it. Sequences end by
    chance, after ``life`` steps on average, and others take their places. All texts repeat
    themselves.
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
    any_draft: float = 0.0
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

    def run(
        self, config: SpeculationConfig, steps: int = STEPS, speculator: Speculator | None = None
    ) -> float:
        """Tokens per second over those without drafts, both without the noise."""
        speculator = speculator or Speculator(config, 10**6, 100)
        sequences = [self._new() for _ in range(self.count)]
        prompt = Sequence(id="prompt", prompt_ids=range(STEPS), options=SamplingOptions())
        for step in range(steps):
            spans = [Span(s, s.num_tokens - 1, 1, True) for s in sequences]
            reads = self.prompts > 0 and self._random.random() < self.prompts
            if reads:
                spans.append(Span(prompt, 0, self.chunk, False))
            for option in speculator.choose(spans, 10_000):
                spans[option.index].num_drafts = option.count
                spans[option.index].source = option.source
                spans[option.index].drafts = option.drafts[: option.count]
            came = self._verify(speculator, spans[: self.count], self.rate(step))
            drafts = [span.num_drafts for span in spans]
            prompt_seconds = reads * self.chunk * self.per_draft * self.speed(step)
            if reads:
                self.beside_prompts.append(any(drafts))
            asked = [span for span in spans if span.num_drafts and not span.drafts]
            longest = max([span.num_drafts for span in asked], default=0)
            drafting = (self.draft * longest + self._reads(asked)) * self.speed(step)
            verify = (1 + self.per_draft * sum(drafts) + self.any_draft * any(drafts)) * self.speed(
                step
            )
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


DRAFT = SpeculationConfig(ngram=False, draft=True)
BOTH = SpeculationConfig(ngram=True, draft=True)


@settings(max_examples=25, deadline=None)
@given(
    count=st.sampled_from([1, 2, 4, 8]),
    per_draft=st.sampled_from([0.002, 0.02, 0.1, 0.4]),
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
    rate: float,
    jitter: float,
    outliers: float,
    seed: int,
    prompts: float,
    reading: float,
    life: int,
    ngram: bool,
) -> None:
    """Drafts useless or not, cheap or dear, steps noisy or with prompts, and a
    draft model that must read what it is asked of."""
    world = World(
        count, per_draft, 0.1, lambda _: rate, jitter=jitter, outliers=outliers, seed=seed,
        prompts=prompts, reading=reading, life=life,
    )  # fmt: skip
    assert world.run(BOTH if ngram else DRAFT) > 0.97


@pytest.mark.parametrize(("per_draft", "count"), [(0.4, 30), (0.1, 64), (2.0, 16)])
def test_nor_where_large_batches_make_verifying_very_dear(per_draft: float, count: int) -> None:
    world = World(count, per_draft, 0.1, lambda _: 0.6)
    assert world.run(DRAFT) > 0.97


@pytest.mark.parametrize("period", [150, 500, 1000])
def test_nor_where_workload_and_machine_change(period: int) -> None:
    def rate(step: int) -> float:
        return 0.8 if step // period % 2 else 0.0

    def speed(step: int) -> float:
        return 1.7 if step // (period + 70) % 2 else 1.0

    for per_draft in (0.02, 0.3):
        assert World(2, per_draft, 0.1, rate, speed, jitter=0.2).run(DRAFT) > 0.97


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
    assert world().run(DRAFT) > 0.9 * best


@pytest.mark.parametrize("period", [40, 130, 400])
def test_a_machine_that_becomes_slower_and_faster_ends_no_drafts_that_pay(period: int) -> None:
    """By half, again and again: steps are judged by those beside them."""
    world = World(
        4, 0.03, 0.05, lambda _: 0.5, lambda step: 1.6 if step // period % 2 else 1.0, jitter=0.1
    )
    steady = World(4, 0.03, 0.05, lambda _: 0.5, jitter=0.1).run(DRAFT)
    assert steady > 1.12
    assert world.run(DRAFT) > 0.96 * steady


@pytest.mark.parametrize("chunk", [2, 32, 128])
@pytest.mark.parametrize("prompts", [0.9, 1.0])
def test_nothing_is_tried_in_steps_that_nobody_can_judge(prompts: float, chunk: int) -> None:
    world = World(12, 0.05, 0.2, lambda _: 0.0, prompts=prompts, chunk=chunk)
    assert world.run(DRAFT) > 0.97
    assert sum(world.beside_prompts) == 0


def test_drafts_that_pay_are_there_beside_prompts_as_long_as_they_promise_to() -> None:
    world = World(4, 0.02, 0.1, lambda step: 0.8 if step < 1000 else 0.0, prompts=0.9)
    world.run(DRAFT)
    begun = world.beside_prompts.index(True)
    assert begun < 300
    assert sum(world.beside_prompts[begun:800]) > 0.9 * (800 - begun)
    assert sum(world.beside_prompts[1000:]) < 20


def test_what_becomes_guessable_is_found_out() -> None:
    world = World(1, 0.02, 0.1, lambda step: 0.8 if step > 1000 else 0.0)
    world.run(DRAFT, 4000)
    assert world.tokens > 1000 + 2 * 3000


@pytest.mark.parametrize(
    ("per_draft", "rate", "count", "any_draft"),
    [
        (0.01, 0.7, 1, 0.0),
        (0.01, 0.02, 1, 0.0),
        (0.05, 0.7, 8, 0.0),
        pytest.param(0.2, 0.6, 30, 0.0, marks=pytest.mark.slow),
        (0.3, 0.9, 4, 0.0),
        (0.02, 0.7, 4, 0.3),
        (0.02, 0.3, 4, 0.4),
    ],
)
def test_what_it_chooses_is_within_three_per_cent_of_the_best_fixed_length(
    per_draft: float, rate: float, count: int, any_draft: float
) -> None:
    def run(length: int | None, steps: int) -> float:
        world = World(count, per_draft, 0.1, lambda _: rate, any_draft=any_draft, seed=4)
        return world.run(SpeculationConfig(ngram=False, draft=True, length=length), steps)

    fixed = [run(length, 3000) for length in range(1, 8)]
    assert max(fixed) != min(fixed)
    assert run(None, 3000) > 0.97 * max(1.0, *fixed)


def test_the_gain_that_is_shown_is_what_comes_of_it_and_1_without_drafts() -> None:
    world, speculator = World(1, 0.02, 0.1, lambda _: 0.8), Speculator(DRAFT, 10**6, 100)
    assert speculator.stats().gain == 1
    found = world.run(DRAFT, 1000, speculator)
    assert found > 1.5
    assert speculator.stats().gain == pytest.approx(found, rel=0.25)
    hopeless = World(1, 0.02, 0.1, lambda _: 0.0)
    hopeless.run(DRAFT, 500, speculator)
    assert speculator.stats().gain == 1
    assert speculator.stats() is speculator.stats()


def test_a_step_costs_something_on_however_busy_a_machine() -> None:
    """Times from a machine so busy that drafts seem to cost all, and a step by itself nothing."""
    for seed in (1612, *range(300)):
        draw = random.Random(seed)
        batch = BatchClass(draw.choice([1, 1, 2, 8]))
        step_s = 10 ** draw.uniform(-4, -2)
        draft_s, noise = step_s * 10 ** draw.uniform(-2, 1), draw.choice([0.3, 1, 2, 4])
        for _ in range(150):
            times = 10 ** abs(draw.gauss(0, noise / 3)) if draw.random() < 0.3 else 1
            if batch.may_draft():
                count = draw.randint(1, 12)
                earned, seconds = draw.uniform(1, count + 1), (step_s + draft_s * count) * times
                batch.observe_drafted(count, earned, seconds, 0, 0.0, typical=True)
            else:
                batch.observe_plain(step_s * times)
            assert 0 < batch.gain < float("inf")


def test_batch_sizes_are_judged_apart() -> None:
    speculator = Speculator(DRAFT, 10**6, 100)
    found = dict.fromkeys((1, 30), 0.0)
    for count in found:
        world = World(count, 0.15, 0.1, lambda _: 0.8)
        found[count] = world.run(DRAFT, 500, speculator)
        assert (speculator.stats().gain > 1) == (count == 1)
    assert found[1] > 1.3
    assert 0.97 < found[30] <= 1.01


def test_the_length_follows_acceptance_and_load() -> None:
    def mean_length(rate: float, count: int) -> float:
        speculator = Speculator(DRAFT, 10**6, 100)
        World(count, 0.05, 0.05, lambda _: rate).run(DRAFT, 600, speculator)
        drafted = speculator.stats().drafted
        first = drafted.get((Speculation.DRAFT, 1), 0)
        return sum(drafted.values()) / first if first > 150 * count else 0.0

    by_rate = [mean_length(rate, 1) for rate in (0.0, 0.4, 0.6, 0.9)]
    assert by_rate == sorted(by_rate)
    assert by_rate[0] == 0
    assert by_rate[-1] > 5
    by_load = [mean_length(0.6, count) for count in (1, 8, 64)]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[-1] == 0


@pytest.mark.parametrize("length", [1, 5])
def test_a_fixed_length_is_kept_whatever_it_costs(length: int) -> None:
    config = SpeculationConfig(ngram=False, draft=True, length=length)
    speculator = Speculator(config, 10**6, 4)  # spans of 4 tokens: 3 drafts
    World(4, 2.0, 1.0, lambda _: 0.0).run(config, 50, speculator)
    drafted = speculator.stats().drafted
    assert drafted == {(Speculation.DRAFT, k): 200 for k in range(1, min(length, 3) + 1)}
    assert speculator.stats().gain == 1


def test_without_times_nothing_is_drafted() -> None:
    speculator, sequence = (
        Speculator(DRAFT, 10**6, 100),
        Sequence(id="a", prompt_ids=(1, 2, 3), options=SamplingOptions(max_tokens=100)),
    )
    sequence.token_ids.append(7)
    for _ in range(50):
        spans = [Span(sequence, 3, 1, True)]
        assert speculator.choose(spans, 100) == []
        speculator.observe_step(spans, 1, None)


@pytest.mark.parametrize("between", [1, 7])
def test_a_pause_is_as_long_whatever_comes_between(between: int) -> None:
    """Steps of another batch size interrupt it, with probes of their own, and do not count."""
    alone = pauses(None)
    assert len(alone) >= 2
    assert alone[1] > 1.5 * alone[0] > 300
    assert pauses(between) == alone


def pauses(between: int | None) -> list[int]:
    """How many steps of one sequence lie between its probes; now and then one of two comes."""
    speculator, found, since = Speculator(DRAFT, 10**6, 100), [], 0
    for step in range(3000):
        if between is not None and step % between == 0:
            step_without_gain(speculator, 2)
        since += 1
        if step_without_gain(speculator, 1):
            if since > 30:
                found.append(since)
            since = 0
    return found


def step_without_gain(speculator: Speculator, size: int) -> int:
    """A step of ``size`` sequences in which drafts take three times as long; how many it had."""
    spans = []
    for number in range(size):
        options = SamplingOptions(max_tokens=100_000)
        sequence = Sequence(id=f"{size}.{number}", prompt_ids=(1, 2, 3), options=options)
        sequence.token_ids.append(7)
        spans.append(Span(sequence, 3, 1, True))
    for option in speculator.choose(spans, 10_000):
        spans[option.index].num_drafts = option.count
        spans[option.index].source = option.source
    drafts = sum(span.num_drafts for span in spans)
    for span in spans:
        if span.num_drafts:
            speculator.observe(span, span.num_drafts, 0, 0)
    seconds = 3.0 if drafts else 1.0
    speculator.observe_step(spans, size, StepTiming(seconds, 0.0))
    return drafts
