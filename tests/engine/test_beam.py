"""Beam search takes what a look at all continuations would take, from few of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from penstock.gpu_worker.engine.groups.beam_search import BeamSearch, Continuation
from penstock.shared.protocol.sampling_options import SamplingOptions

Tokens = tuple[tuple[int, float], ...]

NUM_TOKENS, MAX_TOKENS = 60, 6


@dataclass
class Beam:
    output_ids: list[int] = field(default_factory=list)


class Watched(tuple[tuple[int, float], ...]):
    """Candidates that count how many of them are looked at."""

    seen = 0

    def __iter__(self) -> Iterator[tuple[int, float]]:
        for item in super().__iter__():
            self.seen += 1
            yield item


def drawn(draw: random.Random, *, steps: int) -> Tokens:
    """A distribution of all tokens, the likeliest first; of few ``steps`` many are equal."""
    found = [(token_id, -draw.randrange(1, steps) / 8) for token_id in range(NUM_TOKENS)]
    return tuple(sorted(found, key=lambda one: -one[1]))


Found = list[tuple[float, Continuation]]


def considered(
    scores: list[float], candidates: list[Tokens], width: int, ends: frozenset[int]
) -> tuple[Found, Found]:
    """As transformers does it: who goes on and who ends, of the best over all beams."""
    found = [
        (scores[beam] + logprob, Continuation(beam, token_id))
        for beam, tokens in enumerate(candidates)
        for token_id, logprob in tokens
    ]
    best = sorted(found, key=lambda one: -one[0])[: max(2, 1 + len(ends)) * width]
    ended = [one for one in best[:width] if one[1].token_id in ends]
    return [one for one in best if one[1].token_id not in ends][:width], ended


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_reported_could_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    width, num_ends = draw.choice([(2, 0), (2, 1), (4, 3), (5, 40), (16, 8)])
    ends = frozenset(draw.sample(range(NUM_TOKENS), num_ends))
    options = SamplingOptions(beam_width=width, temperature=0, early_stopping="never")
    search = BeamSearch(options, ends, MAX_TOKENS)
    beams, scores, kept = [Beam()], [0.0], []
    for length in range(1, MAX_TOKENS):
        every = [drawn(draw, steps=draw.choice([8, 10_000])) for _ in beams]
        expected, ended = considered(scores, every, width, ends)
        steps = search.advance(beams, [tokens[: search.num_candidates] for tokens in every])
        kept += [(s / length, (*beams[of.parent].output_ids, of.token_id)) for s, of in ended]
        kept = sorted(kept, key=lambda one: -one[0])[:width]
        assert [(one.score, one.token_ids) for one in search.ended] == kept
        if not steps:
            assert len(kept) == width  # and nothing can become better
            break
        assert steps == [step for _, step in expected]
        scores = [score for score, _ in expected]
        beams = [Beam([*beams[step.parent].output_ids, step.token_id]) for step in steps]


def test_a_wide_search_with_many_ends_looks_at_few_candidates() -> None:
    """All that may be asked at once: 64 beams, 64 stop tokens and the model's own."""
    width, draw = 64, random.Random(1)
    options = SamplingOptions(
        beam_width=width, temperature=0, stop_token_ids=tuple(range(1000, 1064))
    )
    search = BeamSearch(options, options.ending_ids(frozenset({2})), 100)
    assert search.num_candidates == width + 65
    tokens = tuple((token_id, -token_id / 8) for token_id in range(3, 3 + search.num_candidates))
    beams = [Beam([1])]
    for _ in range(3):
        candidates = [Watched(tokens) for _ in beams]
        steps = search.advance(beams, candidates)
        assert len(steps) == width
        assert sum(of.seen for of in candidates) <= len(beams) + width + 1
        beams = [Beam([draw.randrange(100)]) for _ in steps]
