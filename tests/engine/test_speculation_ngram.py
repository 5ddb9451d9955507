"""Drafts from a sequence's own text: what followed the last tokens when they came before."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig, Speculator
from penstock.gpu_worker.engine.speculation.draft_state import DraftState
from penstock.gpu_worker.engine.speculation.ngram import NgramIndex
from penstock.shared.protocol.sampling_options import SamplingOptions


def longest_match(token_ids: list[int]) -> int:
    """Tokens of the longest suffix that also stands earlier, up to 32, by looking everywhere."""
    best, end = 0, len(token_ids) - 1
    for place in range(end):
        length = 0
        while length <= min(place, 31) and token_ids[place - length] == token_ids[end - length]:
            length += 1
        best = max(best, length)
    return best


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_drafts_are_what_followed_a_long_match(token_ids: list[int], most: int) -> None:
    index = NgramIndex()
    for count in range(1, len(token_ids) + 1):  # grows token by token, like a sequence
        known = token_ids[:count]
        drafts, match = index.propose(known, most)
        longest = longest_match(known)
        assert (match > 0) == (longest >= 2)
        assert match <= longest
        if not match:
            assert drafts == ()
            continue
        assert len(drafts) == most
        suffix, text = known[count - match :], [*known, *drafts]
        places = [p for p in range(count - match) if known[p : p + match] == suffix]
        assert any(tuple(text[p + match : p + match + most]) == drafts for p in places)


def test_the_longest_of_recent_matches_wins_and_of_equals_the_last() -> None:
    index = NgramIndex()
    assert index.propose([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 2) == ((5, 8), 3)
    assert NgramIndex().propose([7, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], 2) == ((6, 9), 2)


def test_a_text_that_repeats_itself_is_drafted_round_and_round() -> None:
    assert NgramIndex().propose([4, 5, 6, 4, 5, 6, 4, 5], 7) == ((6, 4, 5, 6, 4, 5, 6), 5)
    assert NgramIndex().propose([4, 4, 4], 5)[0] == (4,) * 5


def test_a_look_up_takes_time_of_its_match_and_not_of_the_text() -> None:
    """Counted, not timed: how many tokens are looked at."""

    class Counted(list[int]):
        looked = 0

        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            Counted.looked += 1
            return super().__getitem__(key)  # type: ignore[index]

    draw = random.Random(1)
    looked = []
    for length in (1_000, 16_000):
        token_ids, index = Counted(draw.randrange(5) for _ in range(length)), NgramIndex()
        index.propose(token_ids, 5)
        Counted.looked = 0
        for _ in range(100):
            token_ids.append(draw.randrange(5))
            index.propose(token_ids, 5)
        looked.append(Counted.looked)
    assert looked[1] < 2 * looked[0]


def test_a_text_is_read_in_parts_and_proposes_once_all_of_it_is() -> None:
    token_ids, state = [5, 6, 7, 8] * 50, DraftState()
    assert state.look_up(token_ids, 3) == ((), 0)
    parts = [state.read(token_ids, 64) for _ in range(4)]
    assert parts == [64, 64, 64, 7]  # of the first token there is no pair
    assert state.look_up(token_ids, 3) == NgramIndex().propose(token_ids, 3)
    token_ids.append(5)
    assert state.look_up(token_ids, 3) == ((), 0)


def test_what_came_in_a_pause_is_read_a_bounded_part_in_each_step() -> None:
    """Sixteen texts of 4,000 tokens: no step reads more than its share, and all get drafts."""
    speculator = Speculator(SpeculationConfig(length=3), 10**6, 100)
    options = SamplingOptions(max_tokens=100_000)
    sequences = [
        Sequence(id=str(i), prompt_ids=[*range(2000)] * 2, options=options) for i in range(16)
    ]
    for sequence in sequences:
        sequence.token_ids.append(0)
    spans = [Span(s, s.num_tokens - 1, 1, True) for s in sequences]
    read, steps = [0], 0
    while len(options := speculator.choose(spans, 10_000)) < 16:
        missing = [
            state._index.num_missing(s.token_ids)  # type: ignore[union-attr]
            for s, state in speculator._options._states.items()
        ]
        read.append(16 * 4000 - sum(missing))
        assert read[-1] - read[-2] <= 1024 + 16 * 16
        steps += 1
    assert 16 * 4000 / (1024 + 16 * 16) - 1 <= steps <= 16 * 4000 / 1024 + 1
    assert all(option.drafts == (1, 2, 3) for option in options)
