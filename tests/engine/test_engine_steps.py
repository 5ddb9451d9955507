"""Steps of an engine: who leaves in the middle of one, which fail, what is shared and counted."""

from __future__ import annotations

import pytest
from engine.driving import ended, engine, give, play, run_all
from engine.fakes import (
    FakeRunner,
    PieceStream,
    config,
    prompt_report,
    request,
    solo,
)

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest, Finish
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.shared.errors import IntegrityError
from penstock.shared.protocol.states import Lane, Reason

# --- leaving ----------------------------------------------------------------------------------


def test_abort_of_the_unknown_and_of_the_ended() -> None:
    eng = engine()
    assert not eng.abort("a")
    eng.add(request("a", max_tokens=1))
    play(eng, "a", [1])
    assert not eng.abort("a")


def test_abort_frees_everything_waiting_or_running() -> None:
    eng = engine(max_sequences=1)
    eng.add(request("running"))
    eng.add(request("waiting"))
    give(eng, {"running": 1})
    assert eng.abort("running")
    assert eng.abort("waiting")
    eng.check_integrity()
    assert not eng.has_work
    assert eng.schedule() is None
    assert eng.stats().used_blocks == 0


def test_abort_while_the_step_runs_gives_no_update() -> None:
    eng = engine()
    eng.add(request("a"))
    eng.add(request("b"))
    plan = eng.schedule()
    assert plan is not None
    assert eng.abort("a")
    eng.check_integrity()
    assert [u.id for u in eng.collect(plan, StepOutput(((1,), (1,))))] == ["b"]
    eng.check_integrity()


def test_the_same_id_again_while_the_aborted_one_is_in_flight() -> None:
    eng = engine()
    eng.add(request("a", [1, 2, 3]))
    plan = eng.schedule()
    assert plan is not None
    eng.abort("a")
    eng.add(request("a", [4, 5]))
    assert eng.collect(plan, StepOutput(((1,),))) == []
    (update,) = give(eng, {"a": 2})
    assert (update.prompt_tokens, update.start, update.token_ids) == (2, 0, (2,))


def test_a_failed_step_ends_its_own_sequences_and_no_other() -> None:
    eng = engine(max_sequences=2)
    for id in "abc":
        eng.add(request(id))
    give(eng, {"a": 1, "b": 1})
    plan = eng.schedule()
    assert plan is not None
    eng.abort("b")
    (update,) = eng.fail(plan, Reason.ENGINE_ERROR, "NaN in layer 3")
    assert (update.id, update.start, update.token_ids, update.text) == ("a", 1, (), "")
    assert ended(update) is Reason.ENGINE_ERROR
    assert update.finish is not None
    assert update.finish.message == "NaN in layer 3"
    eng.check_integrity()
    assert [u.id for u in give(eng, {"c": 1})] == ["c"]


def test_one_failure_in_a_step_ends_that_request_alone() -> None:
    eng = engine()
    for id in "abc":
        eng.add(request(id, [1] * 9))
    plan = eng.schedule()
    assert plan is not None
    eng.abort("c")
    failure = Finish(Reason.OUT_OF_MEMORY, "too large")
    output = StepOutput(((1,), (), ()), failures={1: failure, 2: failure})
    first, second = eng.collect(plan, output)
    assert (first.id, first.token_ids, first.finish) == ("a", (1,), None)
    assert (second.id, second.start, second.token_ids, second.finish) == ("b", 0, (), failure)
    eng.check_integrity()
    assert [u.id for u in give(eng, {"a": 1})] == ["a"]


def test_what_a_failed_step_computed_is_not_shared() -> None:
    eng, prompt = engine(), [1] * 9
    eng.add(request("a", prompt))
    plan = eng.schedule()
    assert plan is not None
    eng.fail(plan, Reason.ENGINE_ERROR, "")
    eng.add(request("b", prompt))
    assert [u.cached_tokens for u in give(eng, {"b": 1})] == [0]


def test_plans_come_back_once_and_in_turn() -> None:
    eng = engine()
    eng.add(request("a"))
    plan = eng.schedule()
    assert plan is not None
    with pytest.raises(IntegrityError, match="before the last plan"):
        eng.schedule()
    with pytest.raises(IntegrityError, match="not the oldest in flight"):
        eng.collect(Plan(plan.spans), StepOutput(((1,),)))
    eng.collect(plan, StepOutput(((1,),)))
    with pytest.raises(IntegrityError, match="not the oldest in flight"):
        eng.collect(plan, StepOutput(((1,),)))
    with pytest.raises(IntegrityError, match="not the oldest in flight"):
        eng.fail(plan, Reason.ENGINE_ERROR, "")


@pytest.mark.parametrize("token_ids", [(), ((1,), (1,)), ((),), ((1, 2),)])
def test_an_output_that_is_not_the_plans_is_an_error(
    token_ids: tuple[tuple[int, ...], ...],
) -> None:
    eng = engine()
    eng.add(request("a"))
    plan = eng.schedule()
    assert plan is not None
    with pytest.raises(IntegrityError):
        eng.collect(plan, StepOutput(token_ids))


# --- sharing and counting ---------------------------------------------------------------------


def test_equal_prefixes_are_computed_once() -> None:
    eng, runner = engine(), FakeRunner(4)
    first, *others = [request(f"r{i}", [*[1, 2, 3, 4] * 4, i], max_tokens=3) for i in range(5)]
    eng.add(first)
    run_all(eng, runner)
    assert runner.num_computed == 17 + 2
    for req in others:
        eng.add(req)
    results = run_all(eng, runner)
    assert runner.num_computed == 17 + 2 + 4 * (1 + 2)
    assert results == {req.id: solo(req, config()) for req in others}
    stats = eng.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (5 * 17, 4 * 16)
    assert stats.computed_tokens == runner.num_computed


@pytest.mark.parametrize(("salt_by_tenant", "cached"), [(False, 8), (True, 0)])
def test_tenants_share_prefixes_unless_salted(salt_by_tenant: bool, cached: int) -> None:
    eng = engine(salt_by_tenant=salt_by_tenant)
    eng.add(request("a", [1] * 9, tenant="a"))
    give(eng, {"a": 1})
    eng.add(request("b", [1] * 9, tenant="b"))
    assert [u.cached_tokens for u in give(eng, {"a": 1, "b": 1})] == [0, cached]
    eng.add(request("a2", [1] * 9, tenant="a"))
    assert [u.cached_tokens for u in give(eng, {"a": 1, "b": 1, "a2": 1})] == [0, cached, 8]


def test_cached_tokens_counts_prompt_tokens_only() -> None:
    eng = engine()
    eng.add(request("a", [1, 1, 1, 1, 1], max_tokens=8))
    play(eng, "a", [1] * 8)
    eng.add(request("b", [1, 1, 1, 1, 1], output_ids=[1] * 7))
    assert [u.cached_tokens for u in give(eng, {"b": 1})] == [5]


def test_stats() -> None:
    eng = engine(max_sequences=2, num_blocks=8)
    for id, lane in [("c", Lane.CRITICAL), ("b", Lane.BATCH), ("b2", Lane.BATCH)]:
        eng.add(request(id, [1] * 5 if id == "c" else [2] * 5, lane=lane))
    give(eng, {"c": 1, "b": 1})
    stats = eng.stats()
    assert stats.running == {Lane.CRITICAL: 1, Lane.NORMAL: 0, Lane.BATCH: 1}
    assert stats.waiting == {Lane.CRITICAL: 0, Lane.NORMAL: 0, Lane.BATCH: 1}
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (4, 0, 4)
    assert (stats.steps, stats.computed_tokens, stats.output_tokens) == (1, 10, 2)
    eng.abort("c")
    stats = eng.stats()
    assert (stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (2, 1, 5)
    assert stats.num_blocks == 8


def shared_prefix_load() -> list[EngineRequest]:
    lanes = list(Lane)
    return [
        request(
            f"r{i}",
            [1, 2, 3, 1, 2, 3, 1, 2][: 3 + i % 6] + [i % 4] * (i % 5),
            lane=lanes[i % 3],
            max_tokens=1 + (7 * i) % 23,
            stop=("aab ", "é")[: i % 3],
        )
        for i in range(24)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3, 64])
@pytest.mark.parametrize(("num_blocks", "max_sequences"), [(64, 8), (18, 8), (9, 3), (64, 1)])
def test_every_mode_gives_what_each_request_gives_alone(
    prefix_cache: bool, chunk_size: int, num_blocks: int, max_sequences: int
) -> None:
    cfg = config(
        prefix_cache=prefix_cache,
        chunk_size=chunk_size,
        num_blocks=num_blocks,
        max_sequences=max_sequences,
        max_model_len=36,
    )
    eng, load = Engine(cfg, PieceStream), shared_prefix_load()
    for req in load:
        assert eng.add(req) is None
    results = run_all(eng, FakeRunner(cfg.block_size))
    assert results == {req.id: solo(req, cfg) for req in load}
    stats = eng.stats()
    assert stats.used_blocks == 0
    assert bool(stats.preemptions) == (num_blocks < 64)
    assert bool(stats.prefix_hit_tokens) == prefix_cache


# --- several features at once -----------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_a_prompt_whose_last_chunk_is_a_token_is_reported_before_any_drafts(n: int) -> None:
    prompt_ids = (1, 2, 1, 2, 1)
    eng = engine(chunk_size=4, speculation=SpeculationConfig(draft=True, length=2))
    eng.add(request("a", prompt_ids, n=n, prompt_logprobs=0, max_tokens=8))
    runner, updates = FakeRunner(4), []
    while plan := eng.schedule():
        updates += eng.collect(plan, runner.run(plan))
    assert runner.num_drafted
    reports = [update.prompt_logprobs for update in updates]
    assert reports == [(None, *map(prompt_report, prompt_ids[1:])), *[()] * (len(updates) - 1)]
