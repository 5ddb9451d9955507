from __future__ import annotations

from collections.abc import Iterable

import pytest
from engine.fakes import (
    EOS,
    FakeRunner,
    PieceStream,
    Result,
    config,
    prompt_report,
    request,
    solo,
)

from penstock.gpu_worker.engine import (
    Engine,
    EngineRequest,
    Finish,
    Plan,
    SpeculationConfig,
    StepOutput,
    Update,
)
from penstock.shared.errors import IntegrityError, InvalidRequest
from penstock.shared.protocol import Lane, Reason


def engine(**changes: object) -> Engine:
    return Engine(config(**changes), PieceStream)


def give(eng: Engine, tokens: dict[str, int]) -> list[Update]:
    """One step in which the named requests get these tokens, if their spans sample."""
    plan = eng.schedule()
    assert plan is not None
    sampled = (((tokens[s.sequence.id],) if s.samples else ()) for s in plan.spans)
    updates = eng.collect(plan, StepOutput(tuple(sampled)))
    eng.check_integrity()
    return updates


def play(eng: Engine, id: str, token_ids: Iterable[int]) -> tuple[list[str], Update]:
    """The model says ``token_ids``; the texts of the updates, and the last update."""
    texts = []
    for token_id in token_ids:
        (update,) = give(eng, {id: token_id})
        assert update.token_ids == (token_id,)
        texts.append(update.text)
    return texts, update


def ended(update: Update | None) -> Reason:
    assert update is not None
    assert update.finish is not None
    return update.finish.reason


def run_all(eng: Engine, runner: FakeRunner) -> dict[str, Result]:
    ids, texts, results = {}, {}, {}
    while plan := eng.schedule():
        for update in eng.collect(plan, runner.run(plan)):
            ids[update.id] = (*ids.get(update.id, ()), *update.token_ids)
            texts[update.id] = texts.get(update.id, "") + update.text
            if update.finish is not None:
                result = Result(ids[update.id], texts[update.id], update.finish.reason)
                results[update.id] = result
        eng.check_integrity()
    return results


# --- the rules that end an output -------------------------------------------------------------


def test_eos_counts_as_a_token_and_adds_no_text() -> None:
    eng = engine()
    eng.add(request("a", ignore_eos=False))
    texts, last = play(eng, "a", [1, 2, EOS])
    assert texts == ["a", "b", ""]
    assert (last.start, last.token_ids, ended(last)) == (2, (EOS,), Reason.STOP)
    assert not eng.has_work


def test_a_stop_token_ends_even_where_eos_is_ignored() -> None:
    eng = engine()
    eng.add(request("a", stop_token_ids=(3,)))
    texts, last = play(eng, "a", [EOS, 1, 3])
    assert texts == ["", "a", ""]
    assert ended(last) is Reason.STOP


def test_the_end_releases_half_a_character_and_a_possible_stop_string() -> None:
    eng = engine()
    eng.add(request("a", ignore_eos=False, stop=("ab",)))
    texts, last = play(eng, "a", [1, 5, EOS])
    assert texts == ["", "", "a\ufffd"]
    assert ended(last) is Reason.STOP


def test_a_stop_string_over_several_tokens_is_cut_and_its_tokens_count() -> None:
    eng = engine()
    eng.add(request("a", stop=("ba é",)))
    texts, last = play(eng, "a", [1, 4, 8, 5, 6])
    assert "".join(texts) == "a"
    assert (last.start, ended(last)) == (4, Reason.STOP)


def test_text_before_a_stop_string_in_the_same_token_is_published() -> None:
    eng = engine()
    eng.add(request("a", stop=("b",)))
    texts, last = play(eng, "a", [7])
    assert (texts, ended(last)) == (["aa"], Reason.STOP)


def test_max_tokens() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=2, stop=("aab",)))
    texts, last = play(eng, "a", [1, 1])
    assert (texts, ended(last)) == (["", "aa"], Reason.LENGTH)


def test_a_stop_string_goes_before_max_tokens() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=2, stop=("ab",)))
    assert ended(play(eng, "a", [1, 2])[1]) is Reason.STOP


def test_a_stop_token_goes_before_max_tokens() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=2, stop_token_ids=(2,)))
    assert ended(play(eng, "a", [1, 2])[1]) is Reason.STOP


def test_a_stop_string_completed_by_the_flushed_half_character() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=2, stop=("a\ufffd",)))
    texts, last = play(eng, "a", [1, 5])
    assert ("".join(texts), ended(last)) == ("", Reason.STOP)


def test_a_full_context_ends_with_length_whatever_max_tokens_says() -> None:
    eng = engine(max_model_len=6)
    assert eng.add(request("a", [1, 2, 3], max_tokens=100)) is None
    texts, last = play(eng, "a", [1, 2, 5])
    assert (texts, ended(last)) == (["a", "b", "\ufffd"], Reason.LENGTH)


def test_max_tokens_of_one_ends_with_the_first() -> None:
    eng = engine()
    eng.add(request("a", max_tokens=1))
    assert ended(play(eng, "a", [1])[1]) is Reason.LENGTH


# --- refusals ---------------------------------------------------------------------------------


def test_a_prompt_without_room_for_one_token_is_refused_with_the_numbers() -> None:
    eng = engine(max_model_len=4)
    update = eng.add(request("a", [1, 2, 3, 4]))
    assert ended(update) is Reason.PROMPT_TOO_LONG
    assert update is not None
    assert update.finish is not None
    assert (update.token_ids, update.text, update.start, update.prompt_tokens) == ((), "", 0, 4)
    assert "needs 5" in update.finish.message
    assert "context holds 4" in update.finish.message
    assert not eng.has_work
    assert eng.add(request("a", [1, 2, 3])) is None


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    eng = engine(num_blocks=2)
    update = eng.add(request("a", [1] * 9))
    assert ended(update) is Reason.OUT_OF_MEMORY
    assert update is not None
    assert update.finish is not None
    assert "9 tokens need 3 KV blocks of 4 tokens" in update.finish.message
    assert "the pool has 2 (8 tokens)" in update.finish.message
    assert not eng.has_work


def test_a_prompt_as_large_as_the_pool_gives_one_token() -> None:
    eng = engine(num_blocks=2)
    assert eng.add(request("a", [1] * 8, max_tokens=1)) is None
    assert ended(play(eng, "a", [1])[1]) is Reason.LENGTH


def test_outgrowing_the_pool_fails_one_and_others_go_on() -> None:
    eng = engine(num_blocks=3, block_size=2)
    eng.add(request("large", [1, 1, 1, 1], stop=("aaab",)))
    eng.add(request("small", [2], max_tokens=4))
    texts, tokens = "", {"large": 1, "small": 2}
    ends = {}
    while eng.has_work:
        for update in give(eng, tokens):
            texts += update.text if update.id == "large" else ""
            if update.finish is not None:
                ends[update.id] = update
    assert {id: ended(update) for id, update in ends.items()} == {
        "large": Reason.OUT_OF_MEMORY,
        "small": Reason.LENGTH,
    }
    assert (ends["large"].start, ends["large"].token_ids) == (2, (1,))
    assert texts == "aaa"  # nothing stays held back
    assert ends["large"].finish is not None
    assert "7 tokens need 4 KV blocks of 2 tokens" in ends["large"].finish.message


def test_an_id_twice_is_an_error_and_harmless() -> None:
    eng = engine()
    eng.add(request("a"))
    with pytest.raises(InvalidRequest, match="id: got 'a'"):
        eng.add(request("a", [9]))
    eng.check_integrity()
    assert [update.prompt_tokens for update in give(eng, {"a": 1})] == [3]


def test_an_ended_id_may_come_again() -> None:
    eng = engine()
    for _ in range(2):
        assert eng.add(request("a", max_tokens=1)) is None
        assert ended(play(eng, "a", [1])[1]) is Reason.LENGTH


def test_an_empty_prompt_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match="prompt_ids"):
        engine().add(request("a", []))


# --- continuing what another worker began -----------------------------------------------------


def test_the_tokens_of_the_first_worker_are_computed_and_not_published_again() -> None:
    eng = engine()
    assert eng.add(request("a", [1, 2, 3], output_ids=[1, 2])) is None
    plan = eng.schedule()
    assert plan is not None
    (span,) = plan.spans
    assert (span.start, span.num_tokens, span.samples) == (0, 5, True)
    assert span.sequence.num_output_tokens == 2
    (update,) = eng.collect(plan, StepOutput(((1,),)))
    assert (update.start, update.token_ids, update.text) == (2, (1,), "a")
    assert (update.prompt_tokens, update.cached_tokens) == (3, 0)


@pytest.mark.parametrize("num_published", range(6))
def test_text_and_stop_strings_are_right_across_the_seam(num_published: int) -> None:
    """Half a character and half a stop string may lie on either side."""
    tokens = [1, 5, 6, 4, 1, 8]  # "a", half, "é", "ba", "a", " "
    first, second = engine(), engine()
    first.add(request("a", stop=("aa ",)))
    before = "".join(play(first, "a", tokens[:num_published])[0]) if num_published else ""
    assert second.add(request("a", stop=("aa ",), output_ids=tokens[:num_published])) is None
    texts, last = play(second, "a", tokens[num_published:])
    assert before + "".join(texts) == "aéb"
    assert (last.start, ended(last)) == (5, Reason.STOP)


@pytest.mark.parametrize(
    ("options", "output_ids", "reason"),
    [
        ({"ignore_eos": False}, [1, EOS], Reason.STOP),
        ({"stop_token_ids": (2,)}, [1, 2], Reason.STOP),
        ({"stop": ("ab",)}, [1, 2], Reason.STOP),
        ({"stop": ("a\ufffd",), "max_tokens": 2}, [1, 5], Reason.STOP),
        ({"max_tokens": 2}, [1, 2], Reason.LENGTH),
        ({}, [1] * 61, Reason.LENGTH),  # the context is full
    ],
)
def test_when_only_the_end_was_missing_it_ends_at_once(
    options: dict[str, object], output_ids: list[int], reason: Reason
) -> None:
    eng = engine()
    update = eng.add(request("a", [1, 2, 3], output_ids=output_ids, **options))
    assert ended(update) is reason
    assert update is not None
    assert (update.start, update.token_ids, update.text) == (len(output_ids), (), "")
    assert not eng.has_work
    eng.check_integrity()


def test_a_continued_request_that_does_not_fit_here_fails_with_the_numbers() -> None:
    eng = engine(num_blocks=2)
    update = eng.add(request("a", [1] * 7, output_ids=[1, 1]))
    assert ended(update) is Reason.OUT_OF_MEMORY
    assert update is not None
    assert update.start == 2


def test_max_tokens_counts_what_was_published_before() -> None:
    eng = engine()
    eng.add(request("a", output_ids=[1, 1, 1], max_tokens=4))
    assert ended(play(eng, "a", [1])[1]) is Reason.LENGTH


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
    with pytest.raises(IntegrityError, match="not the one in flight"):
        eng.collect(Plan(plan.spans), StepOutput(((1,),)))
    eng.collect(plan, StepOutput(((1,),)))
    with pytest.raises(IntegrityError, match="not the one in flight"):
        eng.collect(plan, StepOutput(((1,),)))
    with pytest.raises(IntegrityError, match="not the one in flight"):
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
