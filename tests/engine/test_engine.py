"""How outputs end, which requests an engine refuses, and how one goes on that another began."""

from __future__ import annotations

import pytest
from engine.driving import ended, engine, give, play
from engine.fakes import (
    EOS,
    request,
)

from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.states import Reason

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
