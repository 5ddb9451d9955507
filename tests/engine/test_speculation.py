"""What drafts may take in an engine: budget, blocks, context; and that streams stay the same."""

from __future__ import annotations

import pytest
from engine.fakes import FakeRunner, PieceStream, config, request, solo

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepTiming
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.shared.protocol.states import Reason, Speculation


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


def test_text_of_accepted_drafts_is_told_by_token() -> None:
    """Whoever reads from any token on gets the text that comes without drafts."""

    def texts(cfg: EngineConfig) -> dict[str, list[bytes]]:
        engine, runner = Engine(cfg, PieceStream), FakeRunner(cfg.block_size)
        for i in range(4):
            engine.add(request(f"r{i}", (1, 2, i), max_tokens=30, stop=("ab ",)))
        found: dict[str, list[bytes]] = {}
        while plan := engine.schedule():
            for update in engine.collect(plan, runner.run(plan)):
                assert len(update.text_lengths) == max(0, len(update.token_ids) - 1)
                text = update.text.encode()
                for length in update.text_lengths:
                    found.setdefault(update.id, []).append(text[:length])
                    text = text[length:]
                found.setdefault(update.id, []).append(text)
        return found

    assert texts(config(speculation=DRAFTS)) == texts(config())


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
            for table in sequence.block_tables:  # none once it has ended
                assert len(table) <= -(-sequence.num_tokens // cfg.block_size)
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
    seconds = 0.0
    while plan := engine.schedule():
        samples = any(span.samples for span in plan.spans)
        seconds += samples * (1.0 + drafted(plan))
        engine.collect(plan, runner.run(plan))
    assert runner.num_drafted > 0
    assert seconds <= 1.03 * 400


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
