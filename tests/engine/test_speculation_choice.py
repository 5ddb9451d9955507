"""Which source drafts for each sequence of a step, and how many tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.plan import DraftSource
from penstock.gpu_worker.engine.speculation.draft_choice import (
    FREE,
    DraftOption,
    Prices,
    choose_drafts,
    even_chances,
)

LONGEST = 7


def text(index: int, rate: float, count: int = LONGEST) -> DraftOption:
    return DraftOption(
        index, DraftSource.NGRAM_SHORT, even_chances(rate, count), count, tuple(range(count))
    )


def model(index: int, rate: float, count: int = LONGEST) -> DraftOption:
    return DraftOption(index, DraftSource.DRAFT, even_chances(rate, count), count)


def lengths(chosen: list[DraftOption]) -> dict[int, tuple[str, int]]:
    return {c.index: ("text" if c.source.is_text else "model", c.count) for c in chosen}


def memory(index: int, chances: list[float]) -> DraftOption:
    drafts = tuple(range(len(chances)))
    return DraftOption(index, DraftSource.MEMORY, chances, len(chances), drafts)


def test_each_of_the_drafts_that_stay_is_accepted_with_at_least_its_price() -> None:
    def left(rate: float, price: float) -> int:
        option = text(0, rate, 5)
        option.limit(price)
        return option.count

    assert left(0.9, 0.3) == 5
    assert left(0.5, 0.3) == 1
    assert left(0.2, 0.3) == 0
    assert left(1.0, 0.99) == 5


def test_of_two_texts_the_one_that_promises_more_drafts() -> None:
    """A sequence's own text has the same chance at each draft; a memory knows each one's."""
    price = Prices(0.0, 0.3, 0.0)
    own, others = text(0, 0.6, 4), memory(0, [0.9, 0.85, 0.3, 0.1])
    (chosen,) = choose_drafts([[own, others]], price, probing=False)
    assert (chosen.source, chosen.count) == (DraftSource.MEMORY, 3)
    own, others = text(0, 0.95, 4), memory(0, [0.9, 0.5, 0.3])
    (chosen,) = choose_drafts([[own, others]], price, probing=False)
    assert (chosen.source, chosen.count) == (DraftSource.NGRAM_SHORT, 4)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 0.95), min_size=1, max_size=3),
    st.floats(0.01, 0.5),
    st.floats(0, 1),
)
def test_no_other_lengths_from_a_text_are_worth_more(
    rates: list[float], price: float, step: float
) -> None:
    def value(counts: tuple[int, ...]) -> float:
        gains = (sum(even_chances(rate, k)) for rate, k in zip(rates, counts, strict=True))
        return sum(gains) - price * sum(counts) - step * any(counts)

    found = [[text(i, rate)] for i, rate in enumerate(rates)]
    counts = [0] * len(rates)
    for option in choose_drafts(found, Prices(step, price, 0.0), probing=False):
        counts[option.index] = option.count
    best = max(map(value, itertools.product(range(LONGEST + 1), repeat=len(rates))))
    assert value(tuple(counts)) == pytest.approx(best, abs=1e-9)


def test_free_drafts_are_as_many_as_possible_from_the_surer_source() -> None:
    found = [[text(0, 0.6), model(0, 0.5)], [text(1, 0.3, 2), model(1, 0.5)], [model(2, 0.5)]]
    chosen = choose_drafts(found, FREE, probing=False)
    assert lengths(chosen) == {0: ("text", 7), 1: ("model", 7), 2: ("model", 7)}


@pytest.mark.parametrize(("count", "source"), [(2, "text"), (16, "model")])
def test_the_draft_model_proposes_only_if_enough_sequences_share_its_rounds(
    count: int, source: str
) -> None:
    """Each of them by itself would rather have the model's drafts."""
    found = [[text(i, 0.5), model(i, 0.7)] for i in range(count)]
    chosen = choose_drafts(found, Prices(0.0, 0.1, 1.0), probing=False)
    assert {of for of, _ in lengths(chosen).values()} == {source}
    assert len(chosen) == count


def test_dear_rounds_of_the_draft_model_are_fewer() -> None:
    def rounds(price: float) -> int:
        found = [[model(i, 0.8)] for i in range(4)]
        chosen = choose_drafts(found, Prices(0.0, 0.05, price), probing=False)
        return max((option.count for option in chosen), default=0)

    found = [rounds(price) for price in (0.0, 1.0, 2.0, 4.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] == LONGEST
    assert 0 < found[1] < LONGEST
    assert found[-1] == 0


def test_sequences_that_are_guessed_badly_get_fewer_or_none() -> None:
    found = [[model(0, 0.9)], [model(1, 0.4)], [model(2, 0.1)]]
    assert lengths(choose_drafts(found, Prices(0.0, 0.3, 0.0), probing=False)) == {
        0: ("model", 7),
        1: ("model", 1),
    }


def test_a_step_without_enough_to_gain_has_no_drafts() -> None:
    found = [[text(0, 0.5)]]
    assert choose_drafts(found, Prices(1.0, 0.1, 0.0), probing=False) == []


def test_a_probe_drafts_for_all_whatever_it_promises() -> None:
    found = [[text(0, 0.01)], [model(1, 0.0)]]
    chosen = choose_drafts([[text(0, 0.01)]], Prices(1.0, 0.9, 0.0), probing=True)
    assert lengths(chosen) == {0: ("text", 1)}
    chosen = choose_drafts(found[1:], Prices(1.0, 0.9, 5.0), probing=True)
    assert lengths(chosen) == {1: ("model", 1)}


def test_choices_keep_the_order_of_the_step() -> None:
    found = [[model(0, 0.9)], [text(1, 0.9)], [model(2, 0.9)], [text(3, 0.9)]]
    assert [c.index for c in choose_drafts(found, FREE, probing=False)] == [0, 1, 2, 3]
