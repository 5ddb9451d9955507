"""Merging by index: whatever arrives, each token comes out once, in order, with its text."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.reading.merge import Merger
from penstock.shared.errors import InvalidRequest, StreamDiverged, StreamError
from penstock.shared.protocol.events import Chunk, End, rolling_digest
from penstock.shared.protocol.states import Reason


def cut(ids: list[int], bounds: list[int], *, with_lengths: bool = True) -> list[Chunk]:
    """The ids as chunks that end at the bounds; token i adds 0 to 2 times the letter a + i."""
    edges = [0, *sorted({b % (len(ids) + 1) for b in bounds} - {0, len(ids)}), len(ids)]
    chunks = []
    for start, stop in itertools.pairwise(edges):
        lengths = tuple(i % 3 for i in range(start, stop)) if with_lengths else ()
        chunk = Chunk(start, tuple(ids[start:stop]), text(start, stop), rolling_digest(ids[:stop]))
        if stop > start:
            chunks.append(chunk._replace(text_lengths=lengths))
    return chunks


def text(start: int, stop: int) -> str:
    return "".join(chr(97 + i % 26) * (i % 3) for i in range(start, stop))


def drain(merger: Merger) -> tuple[list[int], str]:
    chunks = list(merger.ready)
    merger.ready.clear()
    return [t for c in chunks for t in c.token_ids], "".join(c.text for c in chunks)


@given(
    ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    bounds=st.lists(st.integers(0, 60), max_size=20),
    rng=st.randoms(use_true_random=False),
)
def test_shuffled_doubled_and_lost_chunks_come_out_once(
    ids: list[int], bounds: list[int], rng: random.Random
) -> None:
    chunks = cut(ids, bounds)
    storm: list[Chunk | End] = [c for c in chunks for _ in range(rng.randint(0, 3))]
    storm.append(End(n=len(ids), reason=Reason.STOP))
    rng.shuffle(storm)
    merger = Merger("x")
    for event in storm:
        before = merger.index
        if not merger.add(event):
            assert merger.index == before
    for event in [*chunks, End(n=len(ids), reason=Reason.STOP)]:  # then the log, in order
        assert merger.add(event)
    assert drain(merger) == (ids, text(0, len(ids)))
    assert merger.end is not None
    assert merger.digest == rolling_digest(ids)


@given(
    size=st.integers(1, 40),
    first=st.lists(st.integers(0, 40), max_size=15),
    second=st.lists(st.integers(0, 40), max_size=15),
    lost=st.integers(0, 40),
)
def test_tokens_published_again_in_other_chunks_join_without_a_seam(
    size: int, first: list[int], second: list[int], lost: int
) -> None:
    """After a failover the tail is published again from a chunk boundary on, cut differently."""
    ids = list(range(size))
    old = cut(ids, first)
    kept = old[: lost % len(old)]
    boundary = kept[-1].stop if kept else 0
    merger = Merger("x")
    for chunk in old[:-1]:
        assert merger.add(chunk)
    again = [c for c in cut(ids, [*second, boundary]) if c.start >= boundary]
    for chunk in again:
        assert merger.add(chunk)
    assert drain(merger) == (ids, text(0, size))


@pytest.mark.parametrize("with_lengths", [True, False])
def test_reading_begins_at_any_index(with_lengths: bool) -> None:
    ids = list(range(30))
    chunks = cut(ids, [4, 9, 17], with_lengths=with_lengths)
    for index in range(31):
        merger = Merger("x", index)
        for chunk in chunks:
            assert merger.add(chunk)
        assert merger.add(End(n=30, reason=Reason.STOP))
        tokens, got = drain(merger)
        assert tokens == ids[index:]
        # Without lengths the chunk that index lies in brings its text whole.
        begins = (c.start for c in chunks if c.start <= index < c.stop and not with_lengths)
        assert got == text(next(begins, index), 30)


@given(
    size=st.integers(2, 40),
    first=st.lists(st.integers(0, 40), max_size=15),
    second=st.lists(st.integers(0, 40), max_size=15),
    left=st.integers(0, 40),
)
def test_a_reader_that_comes_back_gets_no_text_twice(
    size: int, first: list[int], second: list[int], left: int
) -> None:
    """It left where a chunk ended, and the log was then written again in other chunks."""
    ids = list(range(size))
    before = Merger("x")
    for chunk in cut(ids, first)[: 1 + left % 3]:
        before.add(chunk)
    _, shown = drain(before)
    after = Merger("x", before.index, before.digest)
    for chunk in cut(ids, second):
        assert after.add(chunk)
    assert shown + drain(after)[1] == text(0, size)


def test_a_gap_is_refused_and_changes_nothing() -> None:
    first, second, third = cut(list(range(9)), [3, 6])
    merger = Merger("x")
    assert merger.add(first)
    assert not merger.add(third)
    assert not merger.add(End(n=9, reason=Reason.STOP))
    assert merger.end is None
    assert merger.add(second)
    assert merger.add(third)
    assert drain(merger)[0] == list(range(9))


def test_other_tokens_than_those_read_are_noticed() -> None:
    mine, other = list(range(9)), [0, 1, 2, 30, 4, 5, 6, 7, 8]
    merger = Merger("x")
    for chunk in cut(mine, [3, 6])[:2]:
        merger.add(chunk)
    with pytest.raises(StreamDiverged) as caught:
        merger.add(cut(other, [3, 6])[2])
    assert caught.value.index == 6


@pytest.mark.parametrize("bounds", [[6], [3]], ids=["same end", "across"])
def test_divergence_is_noticed_in_a_repeat_of_what_was_read(bounds: list[int]) -> None:
    mine, other = list(range(9)), [0, 1, 2, 3, 40, 5, 6, 7, 8]
    merger = Merger("x")
    for chunk in cut(mine, [3, 6])[:2]:
        merger.add(chunk)
    with pytest.raises(StreamDiverged):
        _ = [merger.add(chunk) for chunk in cut(other, bounds)]


def test_a_returning_reader_proves_its_past_with_its_digest() -> None:
    ids = list(range(9))
    chunks = cut(ids, [3, 6])
    right = Merger("x", 3, rolling_digest(ids[:3]))
    for chunk in chunks:
        right.add(chunk)
    assert drain(right)[0] == ids[3:]
    wrong = Merger("x", 3, rolling_digest([5, 5, 5]))
    with pytest.raises(StreamDiverged):
        wrong.add(chunks[0])


def test_beginning_beyond_the_end_is_a_bad_index_but_with_a_proof_a_divergence() -> None:
    end = End(n=5, reason=Reason.STOP)
    with pytest.raises(InvalidRequest, match=r"from_index: got 7; allowed: 0 to 5") as caught:
        Merger("x", 7).add(end)
    assert caught.value.field == "from_index"
    with pytest.raises(StreamDiverged):
        Merger("x", 7, 123).add(end)


def test_an_end_before_what_was_read_is_a_divergence() -> None:
    merger = Merger("x")
    for chunk in cut(list(range(9)), [3]):
        merger.add(chunk)
    with pytest.raises(StreamDiverged):
        merger.add(End(n=5, reason=Reason.STOP))


def test_text_that_cannot_be_joined_is_an_error_not_a_guess() -> None:
    ids = list(range(9))
    merger = Merger("x", 4)
    for chunk in cut(ids, [4, 7])[:2]:
        merger.add(chunk)
    drain(merger)
    whole = cut(ids, [], with_lengths=False)[0]
    with pytest.raises(StreamError, match="cannot be joined at token 7"):
        merger.add(whole)
