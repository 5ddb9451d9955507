"""Penalties, biases and forbidden tokens: as transformers has them, and a function of the ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from penstock.gpu_worker.model.sampling.logits_processors import LogitsProcessors
from penstock.gpu_worker.model.sampling.row_operations import TorchRows
from penstock.gpu_worker.model.sampling.sampler import (
    INVALID_TOKEN,
    NO_TOKEN_LEFT,
    Sampler,
    SamplingBatch,
)
from penstock.shared.protocol.sampling_options import SamplingOptions

VOCAB = 50
EOS = frozenset({3, 4})
CPU = torch.device("cpu")


@dataclass(eq=False)
class Row:
    options: SamplingOptions
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int = 0
    choice: int = 0
    num_candidates: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


def row(prompt: list[int], output: list[int], seed: int = 0, **options: Any) -> Row:
    return Row(SamplingOptions(**options), [*prompt, *output], len(prompt), seed)


def random_logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def processed(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    return LogitsProcessors(rows, CPU, EOS).apply(logits.clone(), TorchRows())


def sample(logits: torch.Tensor, rows: list[Row], previous: Any = None) -> list[int]:
    batch = SamplingBatch.from_sequences(rows, CPU, previous, eos_token_ids=EOS)
    return Sampler().sample(logits, batch).tolist()


# --- each against its definition ----------------------------------------------------------------


def theirs(sequence: Row) -> LogitsProcessorList:
    """The processors of ``generate`` for these options, in the order in which it makes them."""
    options, made = sequence.options, LogitsProcessorList()
    if options.logit_bias:
        made.append(SequenceBiasLogitsProcessor([[[i], b] for i, b in options.logit_bias.items()]))
    if options.repetition_penalty != 1:
        made.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.banned_token_ids:
        made.append(NoBadWordsLogitsProcessor([[i] for i in options.banned_token_ids]))
    if options.min_tokens:
        ending = sorted(EOS | set(options.stop_token_ids))
        made.append(
            MinNewTokensLengthLogitsProcessor(
                sequence.num_prompt_tokens, options.min_tokens, ending
            )
        )
    if options.allowed_token_ids:
        allowed = list(options.allowed_token_ids)
        made.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1))
    return made


MIXES: list[Mapping[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"logit_bias": {7: 2.5, 11: -100.0, 0: 0.1}},
    {"banned_token_ids": (0, 5, 5, 49)},
    {"allowed_token_ids": (1, 2, 30)},
    {"min_tokens": 6},
    {"min_tokens": 5, "stop_token_ids": (9, 10)},
    {"min_tokens": 4, "stop_token_ids": (9,)},
    {
        "logit_bias": {7: 2.5, 11: -50.0},
        "repetition_penalty": 1.7,
        "banned_token_ids": (1, 12),
        "allowed_token_ids": (1, 2, 3, 7, 9, 11),
        "min_tokens": 9,
        "stop_token_ids": (9,),
    },
]


@pytest.mark.parametrize("options", MIXES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_logits_are_those_of_transformers(options: Mapping[str, Any], seed: int) -> None:
    sequence = row([7, 8, 8, 11, 2], [9, 7, 7, 20, 21], **options)
    logits = random_logits(1, seed)
    expected = theirs(sequence)(torch.tensor([sequence.token_ids]), logits.clone())
    assert torch.equal(processed(logits, [sequence]), expected)


def test_the_order_matters_to_that_comparison() -> None:
    sequence = row([7], [9], logit_bias={7: -100.0}, repetition_penalty=2.0)
    logits = random_logits(1, 0)
    backwards = LogitsProcessorList(reversed(theirs(sequence)))
    found = backwards(torch.tensor([sequence.token_ids]), logits.clone())
    assert not torch.equal(processed(logits, [sequence]), found)


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.25), (-1.5, 2.0)])
def test_frequency_and_presence_are_counted_over_the_output(
    frequency: float, presence: float
) -> None:
    sequence = row([1, 1, 2], [2, 5, 5, 5], frequency_penalty=frequency, presence_penalty=presence)
    logits = random_logits(1, 4)
    expected = logits.clone()
    for token, count in {2: 1, 5: 3}.items():
        expected[0, token] -= count * frequency
        expected[0, token] -= presence
    assert torch.equal(processed(logits, [sequence]), expected)


def test_ignored_end_of_text_does_not_end_and_may_be_chosen_before_min_tokens() -> None:
    sequence = row([1], [], min_tokens=3, ignore_eos=True, stop_token_ids=(9,))
    forbidden = processed(random_logits(1, 0), [sequence])[0].isinf().nonzero().flatten()
    assert forbidden.tolist() == [9]


def test_min_tokens_ends_when_the_output_is_long_enough() -> None:
    short, longer = row([1], [], min_tokens=2), row([1], [], min_tokens=3)
    processors = LogitsProcessors([short, longer], CPU, EOS)
    blocked = []
    for _ in range(4):
        found = processors.apply(random_logits(2, 0), TorchRows())
        blocked.append(found[:, sorted(EOS)].isinf().all(dim=1).tolist())
        short.token_ids.append(5)
        longer.token_ids.append(5)
    assert blocked == [[True, True], [True, True], [False, True], [False, False]]


# --- sampling -------------------------------------------------------------------------------------


def test_rows_without_options_are_not_touched_by_those_with() -> None:
    plain = [
        row([1], [2], seed=i, temperature=i % 2, top_p=(1.0, 0.7)[i // 2 % 2]) for i in range(8)
    ]
    logits = random_logits(9, 3)
    alone = sample(logits[:8], plain)
    batch = SamplingBatch.from_sequences(plain, CPU)
    assert batch.processed is None
    assert sample(logits, [*plain, row([1], [2], repetition_penalty=2.0)])[:8] == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_allowed_is_chosen(temperature: float) -> None:
    rows = [
        row([1], [], seed=i, temperature=temperature, allowed_token_ids=(i, i + 1, 40),
            banned_token_ids=(40,))
        for i in range(20)
    ]  # fmt: skip
    chosen = sample(random_logits(20, 8), rows)
    assert all(token in (i, i + 1) for i, token in enumerate(chosen))


def test_a_row_that_may_choose_nothing_fails_alone() -> None:
    rows = [row([1], []), row([1], [], banned_token_ids=tuple(range(VOCAB))), row([1], [])]
    chosen = sample(random_logits(3, 1), rows)
    assert chosen[1] == NO_TOKEN_LEFT
    assert NO_TOKEN_LEFT not in (chosen[0], chosen[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_logit_is_not_hidden_by_a_ban(bad: float) -> None:
    logits = random_logits(1, 1)
    logits[0, 5] = bad
    assert sample(logits, [row([1], [], banned_token_ids=(5,))]) == [INVALID_TOKEN]


def test_logits_are_not_changed() -> None:
    logits = random_logits(1, 1)
    copy = logits.clone()
    sample(logits, [row([1], [2], repetition_penalty=3.0, logit_bias={1: 5.0})])
    assert torch.equal(logits, copy)


# --- the same tokens in whatever company ----------------------------------------------------------


def model(sequence: Row) -> torch.Tensor:
    """A model of its own: logits are a function of the last two tokens."""
    return random_logits(1, sum(sequence.token_ids[-2:]))[0]


def generate_alone(sequence: Row, tokens: int) -> list[int]:
    """Without any state: a fresh batch for every token."""
    for _ in range(tokens):
        sequence.token_ids += sample(model(sequence).unsqueeze(0), [sequence])
    return sequence.token_ids


def copy_of(sequence: Row) -> Row:
    """What another worker makes of the log."""
    ids = list(sequence.token_ids)
    return Row(sequence.options, ids, sequence.num_prompt_tokens, sequence.seed)


_penalty = st.sampled_from([0.0, 0.0, 0.7, -1.1, 2.0])
_options = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 0, 5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4, 0.8]),
    presence_penalty=_penalty,
    frequency_penalty=_penalty,
    logit_bias=st.sampled_from([None, {1: 4.0, 30: -3.0}]),
    banned_token_ids=st.sampled_from([(), (1, 2)]),
    allowed_token_ids=st.sampled_from([(), tuple(range(1, 40, 2))]),
    min_tokens=st.sampled_from([0, 0, 4]),
)
_prompt = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
_sequences = st.lists(
    st.tuples(_options, _prompt, st.integers(0, 2**63 - 1)), min_size=1, max_size=6
)


@settings(max_examples=30, deadline=None)
@given(made=_sequences, data=st.data())
def test_tokens_are_the_same_alone_in_any_batch_and_after_any_interruption(
    made: list[tuple[SamplingOptions, list[int], int]], data: st.DataObject
) -> None:
    length = 8
    expected = [
        generate_alone(Row(options, list(prompt), len(prompt), seed), length)
        for options, prompt, seed in made
    ]
    rows = [Row(options, list(prompt), len(prompt), seed) for options, prompt, seed in made]
    batch = None
    while waiting := [i for i, sequence in enumerate(rows) if sequence.num_output_tokens < length]:
        # Any subset in any order: who is left out was preempted, or waits for the next chunk.
        chosen = data.draw(st.permutations(waiting)) if len(waiting) > 1 else waiting
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        if data.draw(st.booleans()):  # resumed by another worker, from the ids alone
            rows[chosen[0]] = copy_of(rows[chosen[0]])
        for _ in range(data.draw(st.integers(1, 3))):
            present = [i for i in chosen if rows[i].num_output_tokens < length]
            if not present:
                break
            now = [rows[i] for i in present]
            batch = SamplingBatch.from_sequences(now, CPU, batch, eos_token_ids=EOS)
            logits = torch.stack([model(sequence) for sequence in now])
            for sequence, token in zip(now, Sampler().sample(logits, batch).tolist(), strict=True):
                sequence.token_ids.append(token)
    assert [sequence.token_ids for sequence in rows] == expected


def test_tensors_are_made_once_while_the_batch_stays() -> None:
    rows = [row([1], [], seed=i, repetition_penalty=1.2, banned_token_ids=(2,)) for i in range(3)]
    first = SamplingBatch.from_sequences(rows, CPU)
    again = SamplingBatch.from_sequences(rows, CPU, first)
    assert first.processed is not None
    assert again.processed is not None
    assert again.processed.processors is first.processed.processors
    fewer = SamplingBatch.from_sequences(rows[1:], CPU, again)
    assert fewer.processed is not None
    assert fewer.processed.processors is not first.processed.processors
