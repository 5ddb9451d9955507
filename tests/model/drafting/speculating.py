"""An engine over a real model with drafts, and one drafter that is right as often as it is told."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.plan import BlockCopy, Span
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest, Update
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.engine.stats import EngineStats
from penstock.gpu_worker.model.drafting.drafters import Drafter, DraftModel, Proposal
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.swap_pool import SwapPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.sampling.sampler import Sampler
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane

BLOCK_SIZE = 4


class Oracle:
    """Proposes what the sequence will say, or with a given chance something else.

    Args:
        outputs: by prompt, what comes.
        wrong: chance that a draft is changed.
        vocab_size: to change it within.
    """

    def __init__(
        self, outputs: Mapping[tuple[int, ...], Seq[int]], wrong: float, vocab_size: int
    ) -> None:
        self._outputs = outputs
        self._wrong = wrong
        self._vocab_size = vocab_size
        self._random = random.Random(3)

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """It has no KV."""

    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        return [Proposal(self._of(span)) for span in spans]

    def _of(self, span: Span) -> tuple[int, ...]:
        sequence = span.sequence
        known = self._outputs[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        coming = [*known[sequence.num_output_tokens :], *[1] * span.num_drafts][: span.num_drafts]
        return tuple(
            self._random.randrange(self._vocab_size) if self._random.random() < self._wrong else i
            for i in coming
        )


@dataclass
class Served:
    """What came of the requests.

    Attributes:
        outputs: tokens by request.
        updates: by request, in order.
        stats: of the engine.
        steps: how many there were.
        draft_failures: in how many of them the drafter failed.
    """

    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    updates: dict[str, list[Update]] = field(default_factory=dict)
    stats: EngineStats | None = None
    steps: int = 0
    draft_failures: int = 0

    @property
    def drafted(self) -> int:
        assert self.stats is not None
        assert self.stats.speculation is not None
        return sum(self.stats.speculation.drafted.values())

    @property
    def accepted(self) -> int:
        assert self.stats is not None
        assert self.stats.speculation is not None
        return sum(self.stats.speculation.accepted.values())


def engine_config(model: LoadedModel, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "block_size": BLOCK_SIZE,
        "num_blocks": 200,
        "max_batch_tokens": 64,
        "max_sequences": 8,
        "chunk_size": 64,
        "max_model_len": model.max_model_len,
        "eos_token_ids": model.eos_token_ids,
        "vocab_size": model.vocab_size,
    }
    return EngineConfig(**{**values, **changes})  # type: ignore[arg-type]


def draft_model(
    draft: LoadedModel, target: LoadedModel, num_blocks: int, *, independent: bool = False
) -> DraftModel:
    pool = KVPool(draft.geometry, num_blocks, BLOCK_SIZE, draft.device, draft.dtype)
    return DraftModel(draft, pool, Sampler(), target, max_read=512, independent=independent)


def serve(
    model: LoadedModel,
    requests: Mapping[str, tuple[tuple[int, ...], SamplingOptions]],
    *,
    speculation: SpeculationConfig | None = None,
    drafter: Drafter | None = None,
    seeds: Mapping[str, int] | None = None,
    begun: Mapping[str, Iterable[int]] | None = None,
    rejection: bool = False,
    at_once: int = 2,
    **changes: object,
) -> Served:
    """Run requests together to their ends, some arriving in each step."""
    config = engine_config(model, speculation=speculation, **changes)
    engine = Engine(config, lambda ids: IncrementalDetokenizer(model.tokenizer, ids))
    pool = KVPool(model.geometry, config.kv_cache_groups, BLOCK_SIZE, model.device, model.dtype)
    host_blocks = [group.num_host_blocks for group in config.kv_cache_groups]
    swap_pool = SwapPool(pool, host_blocks) if any(host_blocks) else None
    runner = ModelRunner(model, pool, None, swap_pool, drafter=drafter, rejection=rejection)
    served = Served(updates={id: [] for id in requests})
    coming = list(requests.items())
    live = 0
    while coming or live:
        for id, (prompt, options) in coming[:at_once]:
            before = tuple((begun or {}).get(id, ()))
            refused = engine.add(
                EngineRequest(
                    id=id,
                    lane=Lane.NORMAL,
                    tenant="t",
                    prompt_ids=prompt,
                    output_ids=before,
                    options=options,
                    seed=(seeds or {}).get(id, 0),
                    arrival=0.0,
                )
            )
            served.outputs[id] = before
            live += 1
            if refused is not None:
                served.updates[id].append(refused)
                live -= 1
        coming = coming[at_once:]
        plan = engine.schedule()
        if plan is None:
            continue
        served.steps += 1
        output = runner.run(plan)
        served.draft_failures += output.draft_failed
        for update in engine.collect(plan, output):
            if not update.parts:
                assert update.start == len(served.outputs[update.id])
            served.outputs[update.id] += update.token_ids
            served.updates[update.id].append(update)
            live -= update.finish is not None
        engine.check_integrity()
    served.stats = engine.stats()
    return served
