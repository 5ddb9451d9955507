"""From where the sequences of a step have their drafts."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.assignment import Ways
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig, Speculator
from penstock.gpu_worker.engine.speculation.draft_state import Source
from penstock.gpu_worker.engine.speculation.draft_strategy import Choice, LineUp, line_up
from penstock.gpu_worker.engine.speculation.verification_cost import Calibration
from penstock.shared.protocol import SamplingOptions, Speculation


def text(index: int, rate: float) -> Choice:
    return Choice(index, Source.NGRAM_SHORT, rate, 2, (1, 2))


def model(index: int, rate: float) -> Choice:
    return Choice(index, Source.DRAFT, rate, 4)


@pytest.mark.parametrize(
    ("way", "sources"),
    [
        (LineUp.SURER, {0: "text", 1: "model", 2: "model", 3: "text"}),
        (LineUp.MODEL, {0: "model", 1: "model", 2: "model", 3: "text"}),
        (LineUp.TEXT, {0: "text", 1: "text", 3: "text"}),
    ],
)
def test_each_way_of_lining_up(way: LineUp, sources: dict[int, str]) -> None:
    found = [
        [text(0, 0.6), model(0, 0.6)],
        [text(1, 0.3), model(1, 0.6)],
        [model(2, 0.6)],
        [text(3, 0.3)],
    ]
    chosen = line_up(way, found, draft_share=0.9)
    assert {c.index: "text" if c.source.is_text else "model" for c in chosen} == sources


def test_the_dearer_the_model_the_surer_it_must_be() -> None:
    found = [[text(0, 0.3), model(0, 0.6)]]
    sources = [line_up(LineUp.SURER, found, share)[0].source for share in (1.0, 0.7, 0.5)]
    assert sources == [Source.DRAFT, Source.DRAFT, Source.NGRAM_SHORT]


def steps(speculator: Speculator, sequences: list[Sequence], count: int) -> set[Source]:
    """Where drafts came from in the last of so many steps, whose times nobody tells."""
    sources: set[Source] = set()
    for _ in range(count):
        spans = [Span(s, s.num_tokens - 1, 1, True) for s in sequences]
        sources = {choice.source for choice in speculator.choose(spans, 10_000)}
        speculator.observe_step(spans, len(spans), None)
    return sources


COSTS = Calibration(
    sequences=(1, 64),
    drafts=(0, 1, 7),
    verify=((1.0, 1.001, 1.007), (1.0, 1.01, 1.07)),
    draft=(0.07, 0.07),
)


def batch(wanting: int) -> list[Sequence]:
    """32 sequences, of which the first ``wanting`` want drafts and could have both kinds."""
    sequences = []
    for index in range(32):
        wish = Speculation.AUTO if index < wanting else Speculation.OFF
        options = SamplingOptions(max_tokens=100_000, speculation=wish)
        sequence = Sequence(id=str(index), prompt_ids=(5, 6, 7, 1, 2, 5), options=options)
        sequence.token_ids += [6, 7]
        sequences.append(sequence)
    return sequences


@pytest.mark.parametrize(("wanting", "expected"), [(2, {Source.NGRAM_SHORT}), (32, {Source.DRAFT})])
def test_where_too_few_want_a_models_drafts_their_text_must_do(
    wanting: int, expected: set[Source]
) -> None:
    """By itself each would rather have the model's; but two of 32 do not gain what that takes."""
    speculator = Speculator(SpeculationConfig(draft=True, calibration=COSTS), 10**6, 100)
    assert steps(speculator, batch(wanting), 20) == expected


def promise(best: LineUp, by: float) -> dict[LineUp, float]:
    return {way: 10.0 * (by if way is best else 1.0) for way in LineUp}


def test_another_way_must_promise_two_per_cent_more() -> None:
    ways = Ways()
    ways.compare(8, promise(LineUp.TEXT, 1.015))
    assert ways.present(8) is LineUp.SURER
    ways.compare(8, promise(LineUp.TEXT, 1.03))
    assert ways.present(8) is LineUp.TEXT
    ways.compare(8, promise(LineUp.MODEL, 1.015))
    assert ways.present(8) is LineUp.TEXT


def test_each_class_of_batch_sizes_has_a_way_of_its_own_and_compares_by_itself() -> None:
    ways = Ways()
    ways.compare(30, promise(LineUp.TEXT, 2.0))
    assert [ways.present(n) for n in (1, 16, 17, 32, 33)] == [
        LineUp.SURER, LineUp.SURER, LineUp.TEXT, LineUp.TEXT, LineUp.SURER,
    ]  # fmt: skip
    due = [(n, step) for step in range(1, 17) for n in (4, 30) if ways.is_due(n)]
    assert due == [(n, step) for step in (8, 16) for n in (4, 30)]


def test_ways_that_are_worth_the_same_do_not_take_turns() -> None:
    """As promises wobble with rates, by 2 % between the highest and the lowest."""
    draw, ways, taken = random.Random(2), Ways(), [LineUp.SURER]
    for _ in range(500):
        ways.compare(8, {way: 100 + 2 * draw.random() for way in LineUp})
        taken.append(ways.present(8))
    assert sum(a is not b for a, b in pairwise(taken)) == 0
