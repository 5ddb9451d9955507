"""Rejection sampling gives the target's distribution, and the test would see if it did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from model.drafting.speculating import Oracle, draft_model, serve
from model.families import VOCAB_SIZE
from torch import Tensor

from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model.drafting.acceptance import agreed, reject
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.sampling.random_numbers import uniform
from penstock.shared.protocol.sampling_options import SamplingOptions

Verify = Callable[[Tensor, Sequence["Row"], Sequence[int], Tensor, Tensor], Tensor]

VOCAB = 5
LENGTH = 2
TOKENS = 3
"""The third token is the bonus after two accepted drafts."""
DRAWS = 10_000
UNLIKELY = 1e-6
"""A right verification is further off than this once in a million; a wrong one always."""

PLAIN = SamplingOptions()


@dataclass
class Row:
    """What is read of a sequence."""

    seed: int
    num_output_tokens: int
    choice: int = 0
    num_candidates: int = 0
    num_prompt_tokens: int = 1
    options: SamplingOptions = PLAIN

    @property
    def token_ids(self) -> list[int]:
        raise AssertionError("verification needs no tokens")


@dataclass
class Chain:
    """A target and a draft that look at the last token alone: ``[VOCAB, VOCAB]`` each."""

    target: Tensor
    draft: Tensor

    @classmethod
    def make(cls, likeness: float) -> Chain:
        generator = torch.Generator().manual_seed(5)
        logits = 1.5 * torch.randn(2, VOCAB, VOCAB, generator=generator, dtype=torch.float64)
        other = likeness * logits[0] + (1 - likeness) * logits[1]
        return cls(logits[0].softmax(-1), other.softmax(-1))

    def expected(self) -> dict[tuple[int, ...], float]:
        """Probability of each text of ``TOKENS`` tokens after token 0."""
        texts = {}
        for text in product(range(VOCAB), repeat=TOKENS):
            steps = zip((0, *text), text, strict=False)
            texts[text] = float(torch.stack([self.target[a, b] for a, b in steps]).prod())
        return texts


def generate(chain: Chain, verify: Verify) -> tuple[Counter[tuple[int, ...]], int]:
    """Texts of many sequences, each verifying ``LENGTH`` drafts a step; and the drafts accepted."""
    generator = torch.Generator().manual_seed(7)
    texts: list[list[int]] = [[] for _ in range(DRAWS)]
    accepted = 0
    while active := [i for i in range(DRAWS) if len(texts[i]) < TOKENS]:
        last = torch.tensor([texts[i][-1] if texts[i] else 0 for i in active])
        drafts, befores = [], [last]
        for _ in range(LENGTH):
            drawn = torch.multinomial(chain.draft[befores[-1]], 1, generator=generator).squeeze(1)
            drafts.append(drawn)
            befores.append(drawn)
        before = torch.stack(befores, 1).flatten()
        nothing = torch.full_like(last, -1)
        drafted = torch.stack([*drafts, nothing], 1).flatten()
        rows = [Row(i, len(texts[i]) + offset) for i in active for offset in range(LENGTH + 1)]
        target, proposed = chain.target[before], chain.draft[before]
        chosen = verify(draw(target, rows), rows, drafted.tolist(), target, proposed)
        for i, ids, of in zip(
            active,
            drafted.view(-1, LENGTH + 1).tolist(),
            chosen.view(-1, LENGTH + 1).tolist(),
            strict=True,
        ):
            taken = agreed(ids[:LENGTH], of)
            texts[i] += taken
            accepted += len(taken) - 1
    return Counter(tuple(text[:TOKENS]) for text in texts), accepted


def draw(target: Tensor, rows: Sequence[Row]) -> Tensor:
    """The sampler's own draw."""
    numbers = uniform(
        torch.tensor([row.seed for row in rows]),
        torch.zeros(len(rows), dtype=torch.int64),
        torch.tensor([row.num_output_tokens for row in rows]),
    )
    return torch.searchsorted(target.cumsum(-1), numbers.unsqueeze(1), right=True).squeeze(1)


def likelihood(found: Counter[Any], expected: dict[Any, float]) -> float:
    """Chi-square test: how likely counts so far off are. Cells of less than 8 go together."""
    total = found.total()
    cells, rest = [], [0.0, 0.0]
    for text, probability in expected.items():
        if probability * total >= 8:
            cells.append((found[text], probability * total))
        else:
            rest[0] += found[text]
            rest[1] += probability * total
    if rest[1] >= 8:
        cells.append((rest[0], rest[1]))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def coupled(
    chosen: Tensor, rows: Sequence[Row], drafts: Sequence[int], target: Tensor, proposed: Tensor
) -> Tensor:
    del rows, drafts, target, proposed
    return chosen


@pytest.mark.parametrize("likeness", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("verify", [reject, coupled])
def test_texts_have_the_targets_distribution(verify: Verify, likeness: float) -> None:
    chain = Chain.make(likeness)
    found, accepted = generate(chain, verify)
    assert likelihood(found, chain.expected()) > UNLIKELY
    assert accepted > 0


def test_rejection_accepts_what_the_overlap_allows() -> None:
    """The share that ends at the first draft is the total variation there: no method has less."""
    chain = Chain.make(0.8)
    rows = [Row(i, 0) for i in range(DRAWS)]
    drawn = torch.multinomial(
        chain.draft[0], DRAWS, replacement=True, generator=torch.Generator().manual_seed(1)
    )
    target, proposed = (t[0].expand(DRAWS, -1) for t in (chain.target, chain.draft))
    chosen = reject(draw(target, rows), rows, drawn.tolist(), target, proposed)
    share = float((chosen == drawn).double().mean())
    overlap = float(torch.minimum(chain.target[0], chain.draft[0]).sum())
    assert share == pytest.approx(overlap, abs=5 * 0.5 / DRAWS**0.5)
    certain = reject(draw(target, rows), rows, drawn.tolist(), target, target)
    assert torch.equal(certain, drawn)  # where p is q, everything is accepted


def next_position(
    chosen: Tensor, rows: Sequence[Row], drafts: Sequence[int], target: Tensor, proposed: Tensor
) -> Tensor:
    """Bug: accepts by the distributions one position further on."""
    shifted = reject(chosen, rows, drafts, target.roll(-1, 0), proposed.roll(-1, 0))
    right = reject(chosen, rows, drafts, target, proposed)
    draft = torch.tensor(drafts)
    return torch.where(shifted == draft, draft, torch.where(right == draft, chosen, right))


def no_residual(
    chosen: Tensor, rows: Sequence[Row], drafts: Sequence[int], target: Tensor, proposed: Tensor
) -> Tensor:
    """Bug: a rejected draft is replaced by a draw from the target itself."""
    draft = torch.tensor(drafts)
    return torch.where(reject(chosen, rows, drafts, target, proposed) == draft, draft, chosen)


def believes(
    chosen: Tensor, rows: Sequence[Row], drafts: Sequence[int], target: Tensor, proposed: Tensor
) -> Tensor:
    """Bug: takes drafts as if they had been certain."""
    certain = torch.zeros_like(proposed)
    place = torch.tensor(drafts).clamp(min=0).unsqueeze(1)
    return reject(chosen, rows, drafts, target, certain.scatter_(1, place, 1.0))


def bonus_from_the_draft(
    chosen: Tensor, rows: Sequence[Row], drafts: Sequence[int], target: Tensor, proposed: Tensor
) -> Tensor:
    """Bug: what comes after the last draft is the draft model's."""
    last = torch.tensor(drafts) < 0
    right = reject(chosen, rows, drafts, target, proposed)
    return torch.where(last, draw(proposed, rows), right)


@pytest.mark.parametrize("bug", [next_position, no_residual, bonus_from_the_draft])
def test_a_wrong_verification_is_noticed(bug: Verify) -> None:
    chain = Chain.make(0.8)
    found, _ = generate(chain, bug)
    assert likelihood(found, chain.expected()) < UNLIKELY


def test_taking_drawn_drafts_for_certain_ones_is_right_and_accepts_less() -> None:
    """A draft that is compared with a point mass is accepted with the target's probability."""
    chain = Chain.make(0.8)
    found, accepted = generate(chain, believes)
    assert likelihood(found, chain.expected()) > UNLIKELY
    assert accepted < generate(chain, reject)[1]


OPTIONS = {
    "plain": SamplingOptions(temperature=3.0, allowed_token_ids=(30, 31, 32), max_tokens=TOKENS),
    "penalties": SamplingOptions(
        temperature=2.0,
        allowed_token_ids=(30, 31, 32),
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        top_k=2,
        max_tokens=TOKENS,
    ),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", ["model", "text"])
def test_served_texts_have_the_distribution_of_plain_ones(
    loaded: Callable[[str], LoadedModel], options: str, drafter: str
) -> None:
    """Through the engine, with a draft model of another family, or drafts that are certain."""
    model, prompt = loaded("llama"), (7, 30, 31, 32)
    asked = {f"r{i}": (prompt, OPTIONS[options]) for i in range(500)}
    seeds = {id: i for i, id in enumerate(asked)}
    roomy = {"max_sequences": 64, "max_batch_tokens": 512, "num_blocks": 600}
    plain = serve(model, asked, seeds=seeds, at_once=64, **roomy)
    own = draft_model(loaded("qwen2"), model, 600, independent=True)
    served = serve(
        model,
        asked,
        seeds={id: seed + 10_000 for id, seed in seeds.items()},
        speculation=SpeculationConfig(ngram=False, draft=True, length=2),
        drafter=own if drafter == "model" else Oracle({prompt: (30, 31, 30)}, 0.3, VOCAB_SIZE),
        rejection=True,
        at_once=64,
        **roomy,
    )
    assert 0 < served.accepted < served.drafted
    found, expected = Counter(served.outputs.values()), Counter(plain.outputs.values())
    assert two_samples(found, expected) > UNLIKELY


def two_samples(one: Counter[Any], other: Counter[Any]) -> float:
    """Chi-square test of two equally large samples; cells of less than 8 go together."""
    cells, rest = [], [0, 0]
    for text in one.keys() | other.keys():
        if one[text] + other[text] >= 8:
            cells.append((one[text], other[text]))
        else:
            rest = [rest[0] + one[text], rest[1] + other[text]]
    if sum(rest):
        cells.append((rest[0], rest[1]))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_rejection_is_greedy_where_nothing_is_random(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("llama")
    asked = {"a": ((7, 30, 31), SamplingOptions(temperature=0.0, max_tokens=20))}
    plain = serve(model, asked)
    served = serve(
        model,
        asked,
        speculation=SpeculationConfig(ngram=False, draft=True, length=3),
        drafter=Oracle({(7, 30, 31): plain.outputs["a"]}, 0.3, VOCAB_SIZE),
        rejection=True,
    )
    assert served.outputs == plain.outputs
    assert 0 < served.accepted < served.drafted


def test_a_seed_gives_the_same_texts_with_the_same_drafts(
    loaded: Callable[[str], LoadedModel],
) -> None:
    model = loaded("llama")
    asked = {f"r{i}": ((7, 30, 31), SamplingOptions(max_tokens=12)) for i in range(4)}
    runs = [
        serve(
            model,
            asked,
            seeds={f"r{i}": i for i in range(4)},
            speculation=SpeculationConfig(ngram=False, draft=True, length=3),
            drafter=draft_model(loaded("qwen2"), model, 200, independent=True),
            rejection=True,
        )
        for _ in range(2)
    ]
    assert runs[0].outputs == runs[1].outputs
    assert len(set(runs[0].outputs.values())) == 4
