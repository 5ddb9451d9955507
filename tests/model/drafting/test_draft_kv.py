"""The draft model's KV is that of its sequence's tokens, whatever became of drafts and blocks.

Outputs do not depend on it, so they show nothing. What shows it: a model that is its own draft
model must have every draft accepted that was not spoiled, and its KV must be what a fresh read of
the same tokens stores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from typing import Any

import pytest
import torch
from model.drafting.speculating import BLOCK_SIZE, Served, serve
from model.families import VOCAB_SIZE
from torch import Tensor

from penstock.gpu_worker.engine.plan import BlockCopy, Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model.drafting import drafters
from penstock.gpu_worker.model.drafting.drafters import DraftModel, Proposal
from penstock.gpu_worker.model.forward.batch import PackedStep, SequenceChunk, pack
from penstock.gpu_worker.model.forward.decode_batch import DecodeBatch
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.sampling.sampler import Sampler, SamplingBatch
from penstock.kernels.kv_layout import KVLayout
from penstock.shared.protocol.sampling_options import SamplingOptions

Loaded = Callable[[str], LoadedModel]
Outputs = Mapping[str, tuple[int, ...]]

WRONG = 1
"""No output has it: what a draft is spoiled with is always refused."""

FAMILIES = ["llama", "gemma2"]
OPTIONS = SamplingOptions(
    temperature=0.0, max_tokens=30, banned_token_ids=(WRONG,), ignore_eos=True
)
CONFIG = SpeculationConfig(ngram=False, draft=True, length=4)


def _requests() -> dict[str, tuple[tuple[int, ...], SamplingOptions]]:
    draw = random.Random(5)
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (5, 29, 17, 26, 11)]
    return {f"r{i}": (tuple(prompt), OPTIONS) for i, prompt in enumerate(prompts)}


REQUESTS = _requests()


class SpoilingSampler(Sampler):
    """Draws ``WRONG`` now and then, and the draft model goes on behind that."""

    def __init__(self) -> None:
        super().__init__()
        self._random = random.Random(2)

    def sample(self, logits: Tensor, batch: SamplingBatch, masks: Seq[Tensor] = ()) -> Tensor:
        tokens = super().sample(logits, batch, masks).clone()
        for row in range(len(tokens)):
            if self._random.random() < 0.2:
                tokens[row] = WRONG
        return tokens

    def most_likely(self, logits: Tensor) -> list[int]:
        tokens = super().most_likely(logits)
        return [WRONG if self._random.random() < 0.2 else token for token in tokens]


class Watched:
    """A model as its own draft model, watched in every step.

    Now and then a sequence is not given drafts, as when its text gave some: it goes on, maybe
    several tokens, without the draft model.

    Attributes:
        num_spoiled: proposals with a spoiled draft, which were refused from there on.
        num_late: times that a sequence had to wait for its drafts.
    """

    def __init__(self, model: LoadedModel, expected: Outputs, max_read: int = 200) -> None:
        self._model = model
        self._expected = {REQUESTS[id][0]: output for id, output in expected.items()}
        self._drafter = DraftModel(
            model, self._pool(200), SpoilingSampler(), model, max_read=max_read
        )
        self._random = random.Random(3)
        self.num_spoiled = 0
        self.num_late = 0
        self.errors: list[AssertionError] = []

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        self._drafter.copy_blocks(copies)

    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        asked = [span for span in spans if self._random.random() < 0.6]
        proposals = self._drafter.propose(asked)
        try:
            for span, proposal in zip(asked, proposals, strict=True):
                if proposal.token_ids:
                    self._check(span.sequence, proposal.token_ids)
                else:
                    self.num_late += 1
        except AssertionError as error:  # which would count as one more step without drafts
            self.errors.append(error)
        given = iter(proposals)
        return [next(given) if span in asked else Proposal(()) for span in spans]

    def _check(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        good = drafts[: drafts.index(WRONG)] if WRONG in drafts else drafts
        self.num_spoiled += len(good) < len(drafts)
        output = self._expected[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        done = sequence.num_output_tokens
        assert good == output[done : done + len(good)]
        fresh, num_blocks = self._pool(99), -(-len(sequence.token_ids) // BLOCK_SIZE)
        step = pack([SequenceChunk(sequence.token_ids, 0, [range(num_blocks)])], fresh)
        self._model.forward(step, fresh)
        read = zip(self._stored(self._drafter.pool, sequence.block_tables[0], sequence),
                   self._stored(fresh, range(num_blocks), sequence), strict=True)  # fmt: skip
        for found, expected in read:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)

    def _pool(self, num_blocks: int) -> KVPool:
        model = self._model
        return KVPool(model.geometry, num_blocks, BLOCK_SIZE, model.device, model.dtype)

    @staticmethod
    def _stored(pool: KVPool, table: Seq[int], sequence: Sequence) -> Iterator[Tensor]:
        """Keys and values of the sequence's tokens, layer by layer."""
        blocks = torch.tensor(table)
        assert pool.geometry.layout is KVLayout.GROUPS
        for layer in pool.layers:
            # Groups of [dim, 16] and of [16, dim], to tokens.
            for tensor, order in ((layer.key, (0, 2, 4, 1, 3)), (layer.value, (0, 2, 3, 1, 4))):
                tokens = tensor[blocks].permute(order).flatten(1, 2)[:, :BLOCK_SIZE]
                yield tokens.flatten(0, 1)[: len(sequence.token_ids)]


def run(model: LoadedModel, watched: Watched, expected: Outputs, **how: Any) -> Served:
    asked = how.pop("requests", REQUESTS)
    served = serve(model, asked, speculation=CONFIG, drafter=watched, **how)
    for error in watched.errors:
        raise error
    assert served.outputs == expected
    assert not served.draft_failures
    assert served.accepted > 20
    return served


@pytest.fixture(scope="module")
def plain(loaded: Loaded) -> Callable[[str], dict[str, tuple[int, ...]]]:
    made: dict[str, dict[str, tuple[int, ...]]] = {}

    def get(family: str) -> dict[str, tuple[int, ...]]:
        if family not in made:
            made[family] = serve(loaded(family), REQUESTS).outputs
        return made[family]

    return get


Plain = Callable[[str], dict[str, tuple[int, ...]]]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_rejections(loaded: Loaded, plain: Plain, family: str) -> None:
    model, expected = loaded(family), plain(family)
    watched = Watched(model, expected)
    run(model, watched, expected)
    assert watched.num_spoiled > 5
    assert not watched.num_late


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_preemptions(loaded: Loaded, plain: Plain, family: str, preemption: str) -> None:
    model, expected = loaded(family), plain(family)
    watched = Watched(model, expected)
    served = run(
        model,
        watched,
        expected,
        num_blocks=17,
        preemption=preemption,
        num_host_blocks=99 if preemption == "swap" else 0,
        prefix_cache=False,
    )
    assert watched.num_spoiled > 5
    assert served.stats is not None
    assert {mode for _, _, mode in served.stats.preemptions} == {preemption}


@pytest.mark.parametrize("family", FAMILIES)
def test_of_streams_that_another_worker_began(loaded: Loaded, plain: Plain, family: str) -> None:
    """And whose blocks hold what the draft model has read of others."""
    model, expected = loaded(family), plain(family)
    watched = Watched(model, expected)
    run(model, watched, expected)
    backwards = dict(reversed(REQUESTS.items()))
    begun = {id: output[: 1 + i] for i, (id, output) in enumerate(expected.items())}
    run(model, watched, expected, requests=backwards, begun=begun)
    assert watched.num_spoiled > 20


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", FAMILIES)
def test_that_is_caught_up_with_in_pieces(
    loaded: Loaded, plain: Plain, family: str, preemption: str
) -> None:
    model, expected = loaded(family), plain(family)
    watched = Watched(model, expected, max_read=12)
    run(model, watched, expected, num_blocks=17, preemption=preemption, num_host_blocks=99)
    assert watched.num_spoiled > 5
    assert watched.num_late > 10


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each sequence in each forward of a draft model, as they come."""
    found: list[list[int]] = []

    def note(chunks: Seq[SequenceChunk], pool: KVPool, *, largest_only: bool) -> PackedStep:
        found.append([len(chunk.token_ids) for chunk in chunks])
        return pack(chunks, pool, largest_only=largest_only)

    class Noted(DecodeBatch):
        def pack(self, token_ids: Seq[int], *args: Any, **options: Any) -> PackedStep:
            found.append([1] * len(token_ids))
            return super().pack(token_ids, *args, **options)

    monkeypatch.setattr(drafters, "pack", note)
    monkeypatch.setattr(drafters, "DecodeBatch", Noted)
    return found


def asking() -> list[Span]:
    """The requests, computed by the target alone so far, ask for two drafts each."""
    spans, blocks = [], iter(range(99))
    for id, (prompt, options) in REQUESTS.items():
        sequence = Sequence(id=id, prompt_ids=prompt, options=options)
        sequence.block_tables = (list(islice(blocks, 9)),)
        spans.append(Span(sequence, len(prompt) - 1, 1, samples=True, num_drafts=2))
    return spans


def drafter_of(model: LoadedModel, sampler: Sampler, forwards: list[list[int]]) -> DraftModel:
    pool = KVPool(model.geometry, 99, BLOCK_SIZE, model.device, model.dtype)
    drafter = DraftModel(model, pool, sampler, model, max_read=24)
    forwards.clear()
    return drafter


def test_is_read_in_one_forward_of_bounded_size_the_nearest_first(
    loaded: Loaded, forwards: list[list[int]]
) -> None:
    drafter, spans = drafter_of(loaded("llama"), Sampler(), forwards), asking()
    found = [[len(p.token_ids) for p in drafter.propose(spans)] for _ in range(5)]
    # Prompts of 5, 29, 17, 26 and 11 tokens. Who has proposed reads its last token again.
    assert forwards[::2] == [
        [5, 11, 8],
        [1, 1, 9, 13],
        [1, 1, 1, 13, 8],
        [1, 1, 1, 1, 20],
        [1, 1, 1, 1, 1],
    ]
    assert forwards[1::2] == [[1] * 2, [1] * 3, [1] * 4, [1] * 4, [1] * 5]
    assert found == [[2, 0, 0, 0, 2], [2, 0, 2, 0, 2], [2, 0, 2, 2, 2], [2, 0, 2, 2, 2], [2] * 5]


class FailingOnce(Sampler):
    """Raises in its first call, after the forward that has read."""

    failed = False

    def sample(self, logits: Tensor, batch: SamplingBatch, masks: Seq[Tensor] = ()) -> Tensor:
        self._fail()
        return super().sample(logits, batch, masks)

    def most_likely(self, logits: Tensor) -> list[int]:
        self._fail()
        return super().most_likely(logits)

    def _fail(self) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("injected")


def test_that_was_read_before_a_failure_is_not_read_again(
    loaded: Loaded, forwards: list[list[int]]
) -> None:
    drafter, spans = drafter_of(loaded("llama"), FailingOnce(), forwards), asking()
    with pytest.raises(RuntimeError, match="injected"):
        drafter.propose(spans)
    drafter.propose(spans)
    assert forwards[:2] == [[5, 11, 8], [1, 1, 9, 13]]
