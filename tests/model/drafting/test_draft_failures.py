"""A draft model that fails costs its step the drafts, and nobody anything else."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import count

import pytest
import torch
from model.drafting.speculating import BLOCK_SIZE, serve
from model.drafting.test_speculation import PROMPTS, requests
from torch import Tensor

from penstock.gpu_worker.engine.plan import BlockCopy, Span
from penstock.gpu_worker.engine.requests.engine_request import Update
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model.drafting.drafters import DraftModel, Proposal
from penstock.gpu_worker.model.drafting.setup import load_draft
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.sampling.sampler import Sampler, SamplingBatch
from penstock.shared.errors import PenstockError
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.settings import load_settings

Loaded = Callable[[str], LoadedModel]
LONGER = SamplingOptions(temperature=0.0, max_tokens=30)
CONFIG = SpeculationConfig(ngram=False, draft=True, length=4)


class FailingSampler(Sampler):
    """Raises in every sixth call: in the middle of a round, when a forward has written its KV."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Iterator[int] = count(1)
        self.failures = 0

    def sample(self, logits: Tensor, batch: SamplingBatch, masks: Seq[Tensor] = ()) -> Tensor:
        self._count()
        return super().sample(logits, batch, masks)

    def most_likely(self, logits: Tensor) -> list[int]:
        self._count()
        return super().most_likely(logits)

    def _count(self) -> None:
        if next(self.calls) % 6 == 0:
            self.failures += 1
            raise RuntimeError("injected")


class FailingPool(KVPool):
    """Raises in every other step that copies, and has copied nothing then."""

    failures = 0
    copies = 0

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        if copies:
            self.copies += 1
            if self.copies % 2:
                self.failures += 1
                raise torch.OutOfMemoryError("injected")
        super().copy_blocks(copies)


def drafter_of(model: LoadedModel, sampler: Sampler, pool: type[KVPool] = KVPool) -> DraftModel:
    """Its own draft model, which agrees with itself as long as its KV is right."""
    kv = pool(model.geometry, 200, BLOCK_SIZE, model.device, model.dtype)
    return DraftModel(model, kv, sampler, model, max_read=64)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_failure_costs_its_step_the_drafts_and_the_next_ones_are_right(
    loaded: Loaded, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, sampler = loaded(family), FailingSampler()
    drafter = drafter_of(model, sampler)
    with caplog.at_level(logging.ERROR, "penstock.model"):
        served = serve(model, requests(LONGER), speculation=CONFIG, drafter=drafter)
    assert served.outputs == serve(model, requests(LONGER)).outputs
    assert served.draft_failures == sampler.failures >= 3
    assert served.drafted > 30
    assert served.accepted == served.drafted
    (record,) = caplog.records
    assert record.getMessage() == (
        "the draft model failed (RuntimeError: injected): its steps go on without drafts; "
        "logged once, counted in penstock_draft_failures_total"
    )


def test_a_failed_copy_makes_it_read_everything_again(loaded: Loaded) -> None:
    model = loaded("llama")
    drafter = drafter_of(model, Sampler(), FailingPool)
    several = SamplingOptions(temperature=1.0, n=3, max_tokens=14)
    asked = {**requests(), "several": (PROMPTS["short"], several)}
    asked = {name: (prompt, several) for name, (prompt, _) in asked.items()}
    served = serve(model, asked, speculation=CONFIG, drafter=drafter)
    plain = serve(model, asked)
    for name, updates in plain.updates.items():
        assert choices_of(served.updates[name]) == choices_of(updates)
    assert isinstance(drafter.pool, FailingPool)
    assert served.draft_failures == drafter.pool.failures >= 1
    # Nothing was refused: what is missing lay behind the end of a choice.
    lengths = [
        len(ids) for updates in plain.updates.values() for ids in choices_of(updates).values()
    ]
    stopped = sum(length < several.max_tokens for length in lengths)
    assert 0 <= served.drafted - served.accepted <= 4 * stopped
    assert served.accepted > 30


def choices_of(updates: Seq[Update]) -> dict[int, tuple[int, ...]]:
    """The tokens of each choice."""
    found: dict[int, tuple[int, ...]] = {}
    for update in updates:
        found[update.choice] = found.get(update.choice, ()) + update.token_ids
    return found


class Greedy:
    """Proposes more than it was asked for, which would be written into blocks of others."""

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """It has no KV."""

    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        return [Proposal((1,) * (span.num_drafts + 1)) for span in spans]


def test_more_drafts_than_were_asked_for_are_none(loaded: Loaded) -> None:
    model = loaded("llama")
    served = serve(model, requests(), speculation=CONFIG, drafter=Greedy())
    assert served.outputs == serve(model, requests()).outputs
    assert served.drafted == 0
    assert served.draft_failures > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"source": "draft"}, "speculation.source is draft, and there is no draft model: give "),
        ({"source": "draft", "draft_model": "off"}, "speculation.source is draft, and there is no"),
        ({"draft_model": "/not/there"}, "speculation.draft_model: model directory '/not/there' "),
    ],
)
def test_draft_model_that_is_not_there(loaded: Loaded, given: dict[str, str], says: str) -> None:
    model = loaded("llama")
    flags = {"model.path": str(model.path)}
    flags |= {f"speculation.{name}": value for name, value in given.items()}
    with pytest.raises(PenstockError, match=f"^{re.escape(says)}"):
        load_draft(load_settings(flags, environment={}), model)
