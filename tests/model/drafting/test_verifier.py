"""Drafts are verified a few rows at a time, with the same result as all rows together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model.drafting.speculating import Oracle, draft_model, serve
from model.drafting.test_speculation import OUTPUT_TOKENS, PROMPTS, SAMPLED
from model.families import VOCAB_SIZE

from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model import runner
from penstock.gpu_worker.model.drafting.acceptance import reject, take_typical
from penstock.gpu_worker.model.drafting.verifier import Verifier
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.sampling.sampler import Sampler, SamplingBatch

Loaded = Callable[[str], LoadedModel]


class Compared(Verifier):
    """Two rows at a time, beside tables of all rows.

    Attributes:
        num_drafted: rows with a draft that were compared.
        num_changed: rows in which another token was chosen than was drawn.
        noting: has the number of rows of each table.
    """

    def __init__(self, sampler: Sampler, eos_token_ids: frozenset[int], *, rejection: bool) -> None:
        noting = NotingSampler()
        super().__init__(
            noting, eos_token_ids, rejection=rejection, slice_elements=2 * VOCAB_SIZE + 1
        )
        self.noting = noting
        self._by = sampler, eos_token_ids, rejection
        self.num_drafted = self.num_changed = 0

    def choose(self, logits: Any, chosen: Any, rows: Any, proposals: Any, masks: Any) -> Any:
        sampler, eos_token_ids, rejection = self._by
        batch = SamplingBatch.from_sequences(rows, logits.device, eos_token_ids=eos_token_ids)
        likely = sampler.probabilities(logits, batch, masks)
        drafts, proposed = [-1] * len(rows), torch.zeros_like(likely)
        for begin, row in enumerate(rows):
            proposal = proposals.get(row) if isinstance(row, Sequence) else None
            for row_index, draft in enumerate(proposal.token_ids if proposal else (), begin):
                drafts[row_index] = draft
                if proposal.probabilities is None:
                    proposed[row_index, draft] = 1.0
                else:
                    proposed[row_index] = proposal.probabilities[row_index - begin]
        drawn = chosen.clone()
        expected = reject(drawn, rows, drafts, likely, proposed) if rejection else drawn
        expected = take_typical(expected, rows, drafts, likely)
        found = super().choose(logits, chosen, rows, proposals, masks)
        assert found.tolist() == expected.tolist()
        self.num_drafted += sum(draft >= 0 for draft in drafts)
        self.num_changed += int((found != drawn).sum())
        return found


class NotingSampler(Sampler):
    """Notes how many rows each table has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def probabilities(self, logits: Any, batch: Any, masks: Any = ()) -> Any:
        self.sizes.append(logits.shape[0])
        return super().probabilities(logits, batch, masks)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Compared]:
    """The verifiers of all runners that the test makes."""
    made: list[Compared] = []

    def make(*args: Any, **options: Any) -> Compared:
        made.append(Compared(*args, **options))
        return made[-1]

    monkeypatch.setattr(runner, "Verifier", make)
    return made


@pytest.mark.parametrize("rejection", [True, False], ids=["rejection", "typical"])
@pytest.mark.parametrize("drafter", ["model", "certain"])
def test_a_few_rows_at_a_time_are_as_good_as_all(
    loaded: Loaded, compared: list[Compared], drafter: str, rejection: bool
) -> None:
    """Rows of all options at once, those without a threshold or without chance among them."""
    model = loaded("llama")
    asked = {
        f"{name}/{threshold}": (PROMPTS["short"], replace(options, accept_threshold=threshold))
        for name, options in SAMPLED.items()
        for threshold in (0.0, 0.3)
    }
    certain = Oracle({PROMPTS["short"]: tuple(range(30, 36)) * OUTPUT_TOKENS}, 0.2, VOCAB_SIZE)
    own = draft_model(loaded("qwen2"), model, 200, independent=rejection)
    serve(
        model,
        asked,
        seeds={id: i for i, id in enumerate(asked)},
        speculation=SpeculationConfig(ngram=False, draft=True, length=3),
        drafter=own if drafter == "model" else certain,
        rejection=rejection,
    )
    (verifier,) = compared
    assert set(verifier.noting.sizes) == {1, 2}
    assert verifier.num_changed > 5
    # Greedy rows and, unless all are verified so, those without a threshold are not looked at.
    assert sum(verifier.noting.sizes) < verifier.num_drafted * (1.0 if rejection else 0.6)


def test_nobody_asks_for_a_table(loaded: Loaded, compared: list[Compared]) -> None:
    model = loaded("llama")
    asked = {"a": (PROMPTS["short"], SAMPLED["plain"])}
    serve(
        model,
        asked,
        speculation=SpeculationConfig(ngram=False, draft=True, length=3),
        drafter=draft_model(model, model, 200),
    )
    (verifier,) = compared
    assert verifier.num_drafted > 0
    assert not verifier.noting.sizes
