from __future__ import annotations

import pytest
from engine.fakes import cut
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.output.text_stream import StopMatcher

letters = st.text(alphabet="ab", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def feed_all(matcher: StopMatcher, pieces: list[str]) -> list[str]:
    return [matcher.feed(piece) for piece in pieces]


@st.composite
def split_texts(draw: st.DrawFn) -> list[str]:
    text = draw(letters)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(deadline=None)
@given(stops=stop_lists, pieces=split_texts())
def test_cuts_where_find_cuts_whatever_the_split(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = "".join(feed_all(matcher, pieces)) + matcher.flush()
    whole = "".join(pieces)
    before = cut(whole, stops)
    assert text == (whole if before is None else before)
    assert (matcher.matched is None) == (before is None)


@settings(deadline=None)
@given(stops=stop_lists, pieces=split_texts())
def test_holds_back_exactly_the_longest_suffix_that_may_begin_a_stop_string(
    stops: list[str], pieces: list[str]
) -> None:
    matcher, seen, released = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        released += matcher.feed(piece)
        if matcher.matched is not None:
            break
        held = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0
        )
        assert released == seen[: len(seen) - held]


@settings(deadline=None)
@given(stops=stop_lists, pieces=split_texts())
def test_the_match_names_the_stop_string_that_ends_the_text(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopMatcher(stops)
    released = "".join(feed_all(matcher, pieces))
    if matcher.matched is not None:
        assert matcher.matched in stops
        assert "".join(pieces).startswith(released + matcher.matched)


@pytest.mark.parametrize(
    ("stops", "pieces", "released"),
    [
        (["stop"], ["a st", "op b"], ["a ", ""]),  # spans two pieces
        (["stop"], ["a st", "ill"], ["a ", "still"]),  # a false alarm comes back whole
        (["stop"], ["sstop"], ["s"]),  # begins inside a failed begin
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""]),  # overlaps itself
        (["aaab", "ac"], ["aaac"], ["aa"]),  # begins two failed begins later
        (["xab", "a"], ["xac"], ["x"]),  # stands inside a failed begin
        (["abcd", "bc"], ["abcd"], ["a"]),  # complete first, not begun first
        (["abcd", "bc"], ["ab", "xbc"], ["", "abx"]),
        (["abc", "bc"], ["abc"], [""]),  # complete together: the longer
        (["bc", "abc"], ["xabc"], ["x"]),
        (["a", "aa"], ["aa"], [""]),
        (["\n\n"], ["one\n", "two\n\nthree"], ["one", "\ntwo"]),
        (["é"], ["caf", "é"], ["caf", ""]),
        ([], ["anything", " passes"], ["anything", " passes"]),
        (["ab"], ["", "a", "", "b"], ["", "", "", ""]),
    ],
)
def test_pieces(stops: list[str], pieces: list[str], released: list[str]) -> None:
    assert feed_all(StopMatcher(stops), pieces) == released


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.feed("axb") == "a"
    assert matcher.feed("c") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "x"


def test_flush_gives_what_was_held_and_only_once() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.feed("a sto") == "a "
    assert matcher.flush() == "sto"
    assert matcher.flush() == ""
    assert matcher.matched is None


def test_what_is_held_is_bounded_by_the_stop_string_and_not_by_the_output() -> None:
    matcher = StopMatcher(["a" * 30 + "b"])
    released = sum(len(matcher.feed("a")) for _ in range(50_000))
    assert released == 50_000 - 30
