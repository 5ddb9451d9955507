"""Drafts from what all outputs of a worker have said."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.engine.plan import DraftSource, Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig, Speculator
from penstock.gpu_worker.engine.speculation.draft_state import DraftState
from penstock.gpu_worker.engine.speculation.output_memory import OutputMemory
from penstock.gpu_worker.engine.speculation.text_memory import TextMemory
from penstock.shared.protocol.sampling_options import SamplingOptions


def learned(*texts: list[int], entries: int = 1 << 12, salt: bytes = b"") -> TextMemory:
    memory = TextMemory(entries)
    for text in texts:
        memory.learn(text, 0, len(text), salt)
    return memory


def test_a_chain_goes_on_as_long_as_it_is_likely_enough() -> None:
    memory = learned([1, 2, 3, 4, 5, 6, 7], [9, 2, 3, 8])
    drafts, chances = memory.propose([0, 1, 2], 4, 0.0)
    assert drafts[:1] == (3,)
    assert len(drafts) == len(chances)
    assert chances[0] == pytest.approx(1.3 / 2)  # said once
    assert all(later < earlier for earlier, later in pairwise(chances))
    assert memory.propose([0, 1, 2], 4, 0.7) == ((), [])
    assert memory.propose([0, 1, 2], 1, 0.0)[0] == (3,)


def test_what_was_said_often_is_sure_and_what_differs_is_not() -> None:
    memory = learned(*[[5, 6, 7]] * 20)
    drafts, (chance,) = memory.propose([5, 6], 1, 0.0)
    assert drafts == (7,)
    assert chance == pytest.approx(20.3 / 21)
    memory.learn([5, 6, 8], 0, 3)
    drafts, (chance,) = memory.propose([5, 6], 1, 0.0)
    assert drafts == (7,)
    assert chance == pytest.approx(20.3 / 22)
    new = learned([5, 6, 7], [5, 6, 8])
    drafts, (chance,) = new.propose([5, 6], 1, 0.0)
    assert drafts == (7,)
    assert chance == pytest.approx(1.3 / 3)
    new.learn([5, 6, 8], 0, 3)  # now most of the time
    drafts, (chance,) = new.propose([5, 6], 1, 0.0)
    assert drafts == (8,)
    assert chance == pytest.approx(1.3 / 4)


def test_the_longest_context_speaks() -> None:
    memory = learned(*[[3, 4, 9]] * 9, [1, 2, 3, 4, 5])
    assert memory.propose([1, 2, 3, 4], 1, 0.0)[0] == (5,)
    assert memory.propose([7, 7, 3, 4], 1, 0.0)[0] == (9,)


def test_old_counts_fade() -> None:
    memory = learned(*[[5, 6, 7]] * 2000)
    memory.learn([5, 6, 8] * 60, 0, 180)
    assert memory.propose([5, 6], 1, 0.0)[0] == (8,)


def test_texts_of_another_salt_are_not_told() -> None:
    memory = learned([5, 6, 7], salt=b"a")
    assert memory.propose([5, 6], 1, 0.0, b"a")[0] == (7,)
    assert memory.propose([5, 6], 1, 0.0, b"b")[0] == ()
    assert memory.propose([5, 6], 1, 0.0)[0] == ()


@pytest.mark.parametrize("entries", [0, 3, 100])
def test_entries_are_a_power_of_two(entries: int) -> None:
    with pytest.raises(ValueError, match=f"{entries} entries are no power of two"):
        TextMemory(entries)


@given(
    st.lists(st.lists(st.integers(0, 3) | st.just(2**32 - 1), max_size=40), max_size=8),
    st.lists(st.integers(0, 3) | st.just(2**32 - 1), max_size=12),
    st.sampled_from([1, 4, 64, 4096]),
    st.integers(1, 9),
    st.floats(0, 1),
)
def test_chances_are_chances_whatever_was_learned(
    texts: list[list[int]], context: list[int], entries: int, most: int, least: float
) -> None:
    """Also in a table so small that all contexts share a few places."""
    drafts, chances = learned(*texts, entries=entries).propose(context, most, least)
    assert len(drafts) == len(chances) <= most
    assert all(0 <= draft < 2**32 for draft in drafts)
    assert all(least <= chance <= 1 for chance in chances)
    assert chances == sorted(chances, reverse=True)


def test_chances_are_as_high_as_drafts_are_right() -> None:
    """Of a text in which each token follows another with a chance of its own."""
    draw = random.Random(4)
    odds = {token: draw.uniform(0.5, 1.0) for token in range(200)}
    memory, token_ids = TextMemory(1 << 16), [0, 1, 2]
    hoped = right = 0.0
    for step in range(30_000):
        drafts, chances = memory.propose(token_ids[-8:], 1, 0.0)
        last = token_ids[-1]
        coming = (last * 7 + 1) % 200 if draw.random() < odds[last] else draw.randrange(200)
        token_ids.append(coming)
        memory.learn(token_ids[-9:], len(token_ids[-9:]) - 1, len(token_ids[-9:]))
        if drafts and step > 10_000:
            hoped += chances[0]
            right += drafts[0] == coming
    assert right > 3000
    assert 0.85 < hoped / right < 1.15


def sequence(id: str, prompt: list[int], output: list[int], salt: bytes = b"") -> Sequence:
    options = SamplingOptions(max_tokens=1000)
    found = Sequence(id=id, prompt_ids=prompt, options=options, cache_salt=salt)
    found.token_ids += output
    return found


def test_outputs_are_remembered_and_prompts_are_not() -> None:
    memory, state = OutputMemory(), DraftState()
    memory.propose(sequence("a", [1, 2, 3, 4], [5, 6, 7]), state, 1, 0.0)
    assert state.num_learned == 7
    assert memory.propose(sequence("b", [9], [3, 4]), DraftState(), 2, 0.0) == (5, 6)
    assert memory.propose(sequence("c", [9], [1, 2]), DraftState(), 2, 0.0) == ()


def test_an_output_that_has_ended_is_taken_in_some_tokens_a_step() -> None:
    memory = OutputMemory()
    memory.end(sequence("a", [1, 2], [*range(10, 110)]), num_learned=3)
    known = []
    for _ in range(8):
        # Its last two tokens but one, in a sequence that teaches nothing itself.
        asking = sequence("b", [107, 108], [])
        known.append(memory.propose(asking, DraftState(), 1, 0.0))
        memory.learn_some()
    assert known == [()] * 7 + [(109,)]  # 99 tokens, 16 a step


def test_of_outputs_without_drafts_a_sample_is_taken_in() -> None:
    memory = OutputMemory()
    for index in range(8):
        memory.end(sequence(str(index), [1], [100 * index + i for i in range(9)]), num_learned=0)
    for _ in range(20):
        memory.learn_some()
    found = [
        memory.propose(sequence("x", [0], [100 * index, 100 * index + 1]), DraftState(), 1, 0.0)
        for index in range(8)
    ]
    assert sum(map(bool, found)) == 2


def spans_of(*sequences: Sequence) -> list[Span]:
    for each in sequences:
        each.num_computed_tokens = each.num_tokens - 1
    return [Span(each, each.num_tokens - 1, 1, True) for each in sequences]


@pytest.mark.parametrize(("salt", "found"), [(b"", 1), (b"other", 0)])
def test_a_sequence_is_drafted_what_another_has_said(salt: bytes, found: int) -> None:
    speculator = Speculator(SpeculationConfig(ngram=False, memory=True, length=3), 10**6, 100)
    one = sequence("one", [1], [5, 6, 7, 8, 9])
    assert speculator.choose(spans_of(one), 100) == []
    chosen = speculator.choose(spans_of(sequence("two", [2], [5, 6], salt)), 100)
    assert len(chosen) == found
    for option in chosen:
        assert option.source is DraftSource.MEMORY
        assert option.drafts[: option.count] == (7, 8, 9)


def test_a_memory_that_promises_too_much_is_trusted_less() -> None:
    speculator = Speculator(SpeculationConfig(ngram=False, memory=True, length=3), 10**6, 100)
    speculator.choose(spans_of(sequence("one", [1], [5, 6, 7, 8, 9])), 100)
    other = sequence("two", [2], [5, 6])
    chances = []
    for _ in range(30):
        (span,) = spans = spans_of(other)
        (option,) = speculator.choose(spans, 100)
        chances.append(option.chances[0])
        span.source = option.source
        speculator.observe(span, 3, 0, 0)
    assert chances[0] > 0.6
    assert chances[-1] < 0.15
