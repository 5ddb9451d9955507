"""From where the sequences of a step have their drafts."""

from __future__ import annotations

import pytest

from penstock.gpu_worker.engine import Span, SpeculationConfig
from penstock.gpu_worker.engine.drafting import Source
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation import Speculator
from penstock.gpu_worker.engine.speculation_choice import Choice, LineUp, line_up
from penstock.gpu_worker.engine.speculation_cost import Calibration
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


@pytest.mark.parametrize(("wanting", "expected"), [(2, {Source.NGRAM_SHORT}), (32, {Source.DRAFT})])
def test_where_too_few_want_a_models_drafts_their_text_must_do(
    wanting: int, expected: set[Source]
) -> None:
    """By itself each would rather have the model's; but two of 32 do not gain what that takes."""
    costs = Calibration(
        sequences=(1, 64),
        drafts=(0, 1, 7),
        verify=((1.0, 1.001, 1.007), (1.0, 1.01, 1.07)),
        draft=(0.07, 0.07),
    )
    speculator = Speculator(SpeculationConfig(draft=True, calibration=costs), 10**6, 100)
    sequences = []
    for index in range(32):
        wish = Speculation.AUTO if index < wanting else Speculation.OFF
        options = SamplingOptions(max_tokens=1000, speculation=wish)
        sequence = Sequence(id=str(index), prompt_ids=(5, 6, 7, 1, 2, 5), options=options)
        sequence.token_ids += [6, 7]
        sequences.append(sequence)
    assert steps(speculator, sequences, 20) == expected
