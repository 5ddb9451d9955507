"""Where drafts come from, how many pay, and what they may take."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from engine.fakes import FakeRunner, PieceStream, config, request, solo

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.plan import Plan, Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig, Speculator
from penstock.gpu_worker.engine.speculation.draft_length import (
    Pool,
    best_lengths,
    cut,
    expected_gain,
)
from penstock.gpu_worker.engine.speculation.verification_cost import (
    Calibration,
    StepCosts,
    StepTiming,
)
from penstock.shared.protocol import Reason, SamplingOptions, Speculation

# --- what pays

STEP = 1.0


def calibration(per_draft: float, draft: float = 0.1) -> Calibration:
    """A step of 1 s, which each draft of each sequence makes ``per_draft`` longer."""
    sequences, drafts = (1, 8, 64), (0, 1, 7)
    return Calibration(
        sequences=sequences,
        drafts=drafts,
        verify=tuple(tuple(STEP + per_draft * s * d for d in drafts) for s in sequences),
        draft=tuple(draft for _ in sequences),
    )


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("count", [1, 8, 30])
@pytest.mark.parametrize("per_draft", [0.0, 0.02, 0.2])
def test_no_other_length_promises_much_more(rate: float, count: int, per_draft: float) -> None:
    costs = StepCosts(calibration(per_draft))
    nobody = Pool(0, 0.0, 0)
    _, length, promised = best_lengths(costs, count, 0, nobody, Pool(count, rate, 0), 7)

    def tokens_per_s(k: int) -> float:
        return count * (1 + expected_gain(rate, k)) / (STEP + per_draft * count * k + 0.1 * k)

    assert promised == pytest.approx(tokens_per_s(length))
    assert promised > max(map(tokens_per_s, range(8))) / 1.04


def test_drafts_that_are_refused_or_dear_are_left_out() -> None:
    nobody = Pool(0, 0.0, 0)
    cheap, dear = StepCosts(calibration(0.01)), StepCosts(calibration(0.5))
    assert best_lengths(cheap, 1, 0, nobody, Pool(1, 0.02, 3), 7)[1] == 0
    assert best_lengths(dear, 16, 0, nobody, Pool(16, 0.6, 3), 7)[1] == 0
    assert best_lengths(cheap, 1, 0, Pool(1, 0.95, 0), nobody, 7)[0] == 7


def test_the_length_stays_while_another_promises_hardly_more() -> None:
    costs, nobody = StepCosts(calibration(0.0, draft=0.2)), Pool(0, 0.0, 0)
    lengths = {
        present: best_lengths(costs, 1, 0, nobody, Pool(1, 0.7, present), 7)[1]
        for present in range(8)
    }
    assert lengths[2] == 2  # the best is 2 or 3, within a per cent or two
    assert lengths[3] == 3
    assert lengths[7] in (2, 3)


def test_sequences_that_guess_badly_get_fewer() -> None:
    assert cut(0.9, 5, 0.3) == 5
    assert cut(0.5, 5, 0.3) == 1
    assert cut(0.2, 5, 0.3) == 0
    assert cut(1.0, 5, 0.99) == 5


def test_costs_follow_what_steps_take() -> None:
    costs = StepCosts(calibration(0.02))
    for _ in range(200):
        costs.observe_verify(8, 0, 3.0)
    assert costs.verify(8, 0) == pytest.approx(3.0, rel=0.05)
    for _ in range(200):
        costs.observe_draft(8, 4, 2.0)
    assert costs.draft(8, 4) == pytest.approx(2.0, rel=0.05)
    costs.observe_verify(8, 0, 1000.0)  # the machine stood still for once
    assert costs.verify(8, 0) < 3.5


def test_between_and_beyond_what_was_timed_a_line_is_drawn() -> None:
    costs = StepCosts(calibration(0.02))
    assert costs.verify(4, 3) == pytest.approx(STEP + 0.02 * 4 * 3)
    assert costs.verify(128, 7) == pytest.approx(STEP + 0.02 * 128 * 7)


class Simulated:
    """Steps whose cost and acceptance are given; how many tokens come in how much time."""

    def __init__(self, times: Calibration, rate: float, count: int, jump: float = 0.0) -> None:
        self._truth, self._rate, self._count = StepCosts(times), rate, count
        self._jump = jump
        self._random = random.Random(4)
        self.lengths: list[int] = []

    def run(self, speculator: Speculator, steps: int) -> float:
        options = SamplingOptions(max_tokens=100_000)
        sequences = [
            Sequence(id=str(i), prompt_ids=range(10 * i, 10 * i + 5), options=options)
            for i in range(self._count)
        ]
        for sequence in sequences:
            sequence.token_ids.append(7)  # it decodes
        tokens, seconds = 0, 0.0
        for _ in range(steps):
            spans = [Span(s, s.num_tokens - 1, 1, True) for s in sequences]
            for choice in speculator.choose(spans, 10_000):
                span = spans[choice.index]
                span.num_drafts, span.source = choice.count, choice.source
            came = self._verify(speculator, spans)
            drafts = [span.num_drafts for span in spans]
            drafting = self._truth.draft(sum(d > 0 for d in drafts), max(drafts))
            took = self._truth.verify(self._count, sum(drafts) / self._count) + drafting
            took += self._jump if any(drafts) else 0.0
            speculator.observe_step(spans, came, StepTiming(took, drafting))
            self.lengths.append(max(drafts))
            tokens, seconds = tokens + came, seconds + took
        return tokens / seconds

    def _verify(self, speculator: Speculator, spans: list[Span]) -> int:
        came = len(spans)
        for span in spans:
            accepted = 0
            while accepted < span.num_drafts and self._random.random() < self._rate:
                accepted += 1
            if span.num_drafts:
                speculator.observe(span, span.num_drafts, accepted, accepted)
            came += accepted
        return came


@pytest.mark.parametrize(
    ("per_draft", "rate", "count", "jump"),
    [
        (0.01, 0.7, 1, 0.0),
        (0.01, 0.02, 1, 0.0),
        (0.05, 0.7, 8, 0.0),
        (0.2, 0.6, 30, 0.0),
        (0.3, 0.9, 4, 0.0),
        (0.02, 0.7, 4, 0.3),
        (0.02, 0.3, 4, 0.4),
    ],
)
@pytest.mark.parametrize("measured", [0.5, 0.0])
def test_what_it_chooses_is_within_three_per_cent_of_the_best_fixed_length(
    per_draft: float, rate: float, count: int, jump: float, measured: float
) -> None:
    """Also where times at start were half of it, or flat, and the first draft costs much more."""
    truth = calibration(per_draft)
    believed = calibration(per_draft * measured, draft=0.15)
    adaptive = Simulated(truth, rate, count, jump)
    config = SpeculationConfig(ngram=False, draft=True, calibration=believed)
    found = adaptive.run(speculator := Speculator(config, 10**6, 100), 1500)
    found = adaptive.run(speculator, 1500)
    fixed = [
        Simulated(truth, rate, count, jump).run(
            Speculator(SpeculationConfig(ngram=False, draft=True, length=k), 10**6, 100), 800
        )
        for k in range(1, 8)
    ]
    plain = count / STEP
    assert max(fixed) != min(fixed)
    assert found > 0.97 * max(plain, *fixed)
    changes = sum(a != b for a, b in pairwise(adaptive.lengths[-1500:]))
    assert changes < 150  # plain steps and probes among them
    assert speculator.stats().gain == pytest.approx(found / plain, rel=0.2)


@pytest.mark.parametrize(("ngram", "draft"), [(True, True), (True, False), (False, True)])
def test_a_fixed_length_is_shown(ngram: bool, draft: bool) -> None:
    config = SpeculationConfig(ngram=ngram, draft=draft, length=5)
    stats = Speculator(config, 10**6, 4).stats()
    assert (stats.text_length, stats.draft_length) == (3 * ngram, 3 * draft)  # of a span of 4


def test_the_gain_that_is_shown_goes_on_where_drafting_has_ended() -> None:
    dear = Simulated(calibration(2.0), 0.0, 4)
    believed = calibration(0.002, draft=0.02)
    config = SpeculationConfig(ngram=False, draft=True, calibration=believed)
    dear.run(speculator := Speculator(config, 10**6, 100), 30)
    assert 0 in dear.lengths[-3:]
    ended = speculator.stats().gain
    assert ended < 0.99
    dear.run(speculator, 40)
    assert not any(dear.lengths[-40:])
    assert ended < speculator.stats().gain < 1


# --- what they may take


def run_all(engine: Engine, runner: FakeRunner) -> dict[str, list[int]]:
    outputs: dict[str, list[int]] = {}
    while plan := engine.schedule():
        assert plan.num_tokens <= 32
        for update in engine.collect(plan, runner.run(plan)):
            assert update.start == len(outputs.setdefault(update.id, []))
            outputs[update.id] += update.token_ids
        engine.check_integrity()
    return outputs


DRAFTS = SpeculationConfig(ngram=True, draft=True, length=4)


def test_streams_are_those_without_drafts_and_come_in_fewer_steps() -> None:
    cfg, fast = config(), config(speculation=DRAFTS)
    engine, runner = Engine(fast, PieceStream), FakeRunner(fast.block_size)
    requests = [request(f"r{i}", (1, 2, i), max_tokens=30) for i in range(4)]
    for one in requests:
        engine.add(one)
    outputs = run_all(engine, runner)
    for one in requests:
        assert tuple(outputs[one.id]) == solo(one, cfg).token_ids
    assert engine.stats().steps < 25
    assert runner.num_accepted > 20


def test_what_lies_behind_a_stop_is_counted_nowhere() -> None:
    cfg = config(speculation=DRAFTS)
    engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size)
    for i in range(20):
        engine.add(request(f"r{i}", (1, 2, i % 5, i % 3), max_tokens=30, stop=("ab", "b ")))
    outputs = run_all(engine, runner)
    stats = engine.stats()
    assert stats.output_tokens == sum(map(len, outputs.values()))
    assert stats.speculation is not None
    assert 0 < sum(stats.speculation.accepted.values()) < runner.num_accepted


def test_no_draft_goes_past_the_end_of_an_output_or_the_context() -> None:
    cfg = config(speculation=DRAFTS, max_model_len=12)
    for limits in ({"max_tokens": 4}, {"max_tokens": 40}):
        engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size)
        engine.add(request("a", (1, 2, 1, 2, 1), **limits))
        while plan := engine.schedule():
            for span in plan.spans:
                left = min(5 + limits["max_tokens"], 12) - span.sequence.num_tokens
                assert span.num_drafts < left
            engine.collect(plan, runner.run(plan))


def drafted(plan: Plan | None) -> int:
    assert plan is not None
    return sum(span.num_drafts for span in plan.spans)


def test_drafts_take_what_is_left_of_the_budget() -> None:
    cfg = config(speculation=DRAFTS, max_batch_tokens=8, chunk_size=8)
    engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size)
    for i in range(3):
        engine.add(request(f"r{i}", (1, 2, i), max_tokens=30))
    plan = engine.schedule()
    assert plan is not None
    engine.collect(plan, runner.run(plan))
    engine.add(request("long", (1,) * 20, max_tokens=2))
    while engine.has_work:
        plan = engine.schedule()
        assert plan is not None
        assert plan.num_tokens <= 8
        waits = any(span.sequence.id == "long" and not span.samples for span in plan.spans)
        assert not waits or drafted(plan) == 0
        engine.collect(plan, runner.run(plan))


def test_drafts_preempt_nobody_and_give_their_blocks_back() -> None:
    """A pool in which the sequences just fit without drafts: nothing is different with them."""
    cfg = config(speculation=DRAFTS, num_blocks=8, watermark=0.0)
    engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size)
    for i in range(2):
        engine.add(request(f"r{i}", (1, 2, i), max_tokens=13))
    while plan := engine.schedule():
        engine.collect(plan, runner.run(plan))
        for span in plan.spans:
            sequence = span.sequence
            assert len(sequence.block_tables[0]) <= -(-sequence.num_tokens // cfg.block_size)
        engine.check_integrity()
    assert not engine.stats().preemptions
    assert runner.num_drafted > runner.num_accepted > 0


@pytest.mark.parametrize("prompt_timed", [True, False])
def test_drafts_that_never_pay_end_also_after_a_long_prompt(prompt_timed: bool) -> None:
    """Whether or not anybody timed the chunks that sample nothing; nothing promises a loss."""

    def timing(plan: Plan) -> StepTiming | None:
        samples = any(span.samples for span in plan.spans)
        return StepTiming(1.0 + drafted(plan)) if samples or prompt_timed else None

    speculation = SpeculationConfig(ngram=False, draft=True)
    cfg = config(speculation=speculation, num_blocks=256, max_model_len=1000)
    engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size, timing=timing)
    engine.add(request("a", (1, 2) * 20, max_tokens=400))
    steps = 0
    while plan := engine.schedule():
        steps += drafted(plan) > 0
        engine.collect(plan, runner.run(plan))
    assert runner.num_drafted > 0
    assert steps < 10


@pytest.mark.parametrize("wish", Speculation)
def test_a_wish_is_kept(wish: Speculation) -> None:
    cfg = config(speculation=DRAFTS)
    engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size)
    engine.add(request("a", (1, 2, 1, 2, 1, 2), max_tokens=20, speculation=wish))
    run_all(engine, runner)
    stats = engine.stats().speculation
    assert stats is not None
    found = {source for source, _ in stats.drafted}
    both = {Speculation.NGRAM, Speculation.DRAFT}
    assert found <= {Speculation.AUTO: both, Speculation.OFF: set()}.get(wish, {wish})


def test_an_abort_and_a_failure_in_mid_draft_leave_nothing_behind() -> None:
    cfg = config(speculation=DRAFTS)
    for end in ("abort", "fail"):
        engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size)
        engine.add(request("a", (1, 2, 3), max_tokens=30))
        engine.collect(plan := engine.schedule(), runner.run(plan))  # type: ignore[arg-type]
        plan = engine.schedule()
        assert drafted(plan) > 0
        assert plan is not None
        output = runner.run(plan)
        if end == "abort":
            engine.abort("a")
            assert engine.collect(plan, output) == []
        else:
            engine.fail(plan, Reason.ENGINE_ERROR, "injected")
        engine.check_integrity()
        assert engine.stats().used_blocks == 0
