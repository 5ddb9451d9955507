"""The scenarios of a call of ``penstock simulate``, and the report on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.shared.errors import ConfigurationError
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Lane

from ...report import Check, Number, Report
from ..arrivals import Generator, Lengths, SimRequest, read_trace
from ..dispatch import Dispatch
from ..measures import ServiceLevel
from ..scenario import Outcome, Scenario, simulate
from ..step_time import CostModel

__all__ = ["ChunkChoice", "Comparison", "PreemptionMode", "Variant", "compare", "report"]

_MOST_BLOCKS = 1 << 22
"""KV blocks of a whole fleet: about 100 bytes of this machine's memory each."""

ChunkChoice = int | Literal["adaptive", "off"] | None
PreemptionMode = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One combination of the compared settings; see :class:`Comparison`."""

    workers: int
    sequences: int
    chunk: ChunkChoice
    blocks: int | None
    policy: PolicyName
    preemption: PreemptionMode
    dispatch: Dispatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The cross product of the compared settings, on equal requests.

    Attributes:
        workers, dispatch, max_sequences, chunk_sizes, kv_blocks, policies, preemptions: values to
            compare. Chunk size None is the whole token budget; KV blocks None is what fits on the
            device.
        target_itl_s: target of adaptive chunks.
        host_blocks: KV blocks of a worker's host memory, where a preemption mode swaps; None: as
            many as on the device.
        prefix_cache: workers keep the KV of preempted and ended sequences while they have room. No
            two requests share a prefix, so it helps only preempted ones.
        cost: of a step.
        trace: file of requests; None draws them.
        requests, rate: number and arrivals per second of drawn requests.
        per_worker: requests and rate count per worker.
        burstiness, prompt, output, lanes, tenants: see :class:`Generator`.
        max_batch_tokens, block_size: of the engine. Block size None is 16, or larger in a fleet
            that would need too much memory.
        exchange_s, wake_s, claim_batch, level, seed: see :class:`Scenario`.
    """

    workers: tuple[int, ...]
    dispatch: tuple[Dispatch, ...]
    max_sequences: tuple[int, ...]
    chunk_sizes: tuple[ChunkChoice, ...]
    kv_blocks: tuple[int | None, ...]
    policies: tuple[PolicyName, ...] = (PolicyName.FCFS,)
    preemptions: tuple[PreemptionMode, ...] = ("recompute",)
    target_itl_s: float = 0.05
    host_blocks: int | None = None
    prefix_cache: bool = True
    cost: CostModel
    trace: Path | None
    requests: int
    rate: float
    per_worker: bool
    burstiness: float
    prompt: Lengths
    output: Lengths
    lanes: dict[Lane, float]
    tenants: dict[str, float]
    deadlines: tuple[float, float] | None = None
    max_batch_tokens: int
    block_size: int | None
    exchange_s: float
    wake_s: float = 0.0
    claim_batch: int
    level: ServiceLevel
    seed: int

    def __post_init__(self) -> None:
        if min(self.workers) < 1 or max(self.workers) > 1000:
            sizes = ", ".join(map(str, self.workers))
            raise ConfigurationError(f"workers is {sizes}; allowed: 1 to 1000")
        if not 0 <= self.exchange_s <= 10:
            raise ConfigurationError(f"exchange is {self.exchange_s} s; allowed: 0 to 10")
        if not 0 <= self.wake_s <= 10:
            raise ConfigurationError(f"wake is {self.wake_s} s; allowed: 0 to 10")
        if self.claim_batch < 1:
            raise ConfigurationError(f"claim_batch is {self.claim_batch}; allowed: 1 or more")

    def scenarios(self) -> list[Scenario]:
        """All combinations; their names tell the differences."""
        return [
            Scenario(
                name=self._name(variant),
                requests=self.workload(variant.workers),
                workers=variant.workers,
                dispatch=variant.dispatch,
                config=self._config(variant),
                cost=self.cost,
                level=self.level,
                exchange_s=self.exchange_s,
                wake_s=self.wake_s,
                claim_batch=self.claim_batch,
                seed=self.seed,
            )
            for variant in self._variants()
        ]

    def _variants(self) -> Iterator[Variant]:
        for workers, sequences, chunk, blocks, policy, preemption, dispatch in itertools.product(
            self.workers, self.max_sequences, self.chunk_sizes, self.kv_blocks, self.policies,
            self.preemptions, self.dispatch,
        ):  # fmt: skip
            yield Variant(
                workers=workers,
                sequences=sequences,
                chunk=chunk,
                blocks=blocks,
                policy=policy,
                preemption=preemption,
                dispatch=dispatch,
            )

    def workload(self, workers: int) -> Iterable[SimRequest]:
        """The requests for a fleet of this size."""
        if self.trace is not None:
            return read_trace(self.trace)
        share = workers if self.per_worker else 1
        return Generator(
            count=self.requests * share,
            rate=self.rate * share,
            burstiness=self.burstiness,
            prompt=self.prompt,
            output=self.output,
            lanes=self.lanes,
            tenants=self.tenants,
            deadlines=self.deadlines,
            seed=self.seed,
        )

    def num_requests(self, workers: int) -> int:
        """Number of requests; 0 if only the end of the trace tells."""
        return 0 if self.trace else self.requests * (workers if self.per_worker else 1)

    def _name(self, variant: Variant) -> str:
        parts = [variant.dispatch.value.replace("-", "_"), f"w{variant.workers}"]
        if len(self.max_sequences) > 1:
            parts.append(f"s{variant.sequences}")
        if len(self.chunk_sizes) > 1:
            parts.append(f"c{variant.chunk or 'all'}")
        if len(self.kv_blocks) > 1:
            parts.append(f"kv{variant.blocks or 'all'}")
        if len(self.policies) > 1:
            parts.append(variant.policy.value)
        if len(self.preemptions) > 1:
            parts.append(variant.preemption)
        return "_".join(parts)

    def _config(self, variant: Variant) -> EngineConfig:
        size, blocks = self._pool(variant)
        context = self.cost.context
        budget, chunk = self.max_batch_tokens, variant.chunk
        chunking = Chunking(chunk) if isinstance(chunk, str) else Chunking.FIXED
        if chunking is Chunking.OFF:
            budget = context + variant.sequences
        swaps = variant.preemption != "recompute"
        host = blocks if self.host_blocks is None else self.host_blocks
        return EngineConfig(
            block_size=size,
            num_blocks=blocks,
            max_batch_tokens=budget,
            max_sequences=variant.sequences,
            chunk_size=chunk if isinstance(chunk, int) else budget,
            max_model_len=context,
            eos_token_ids=frozenset(),
            prefix_cache=self.prefix_cache,
            policy=variant.policy,
            chunking=chunking,
            target_itl_s=self.target_itl_s,
            preemption=variant.preemption,
            num_host_blocks=host if swaps else 0,
        )

    def _pool(self, variant: Variant) -> tuple[int, int]:
        """Tokens per KV block, and the number of blocks."""
        size = self.block_size
        if size is None:
            size = self._block_size(variant.workers) if variant.blocks is None else 16
        elif size < 1:
            raise ConfigurationError(f"block_size is {size}; allowed: 1 or more")
        blocks = self.cost.kv_blocks(size) if variant.blocks is None else variant.blocks
        return size, blocks

    def _block_size(self, workers: int) -> int:
        """16 tokens, or enough that the bookkeeping of all pools fits into memory."""
        size = 16
        while workers * self.cost.kv_blocks(size) > _MOST_BLOCKS:
            size *= 2
        return size


def compare(
    comparison: Comparison, progress: Callable[[str, int, int], None] | None = None
) -> list[Outcome]:
    """Simulate every combination in turn.

    Args:
        comparison: what to run.
        progress: called with the scenario, the requests so far, and their total (0: unknown).
    """
    outcomes = []
    for scenario in comparison.scenarios():
        total = comparison.num_requests(scenario.workers)

        def tell(done: int, name: str = scenario.name, total: int = total) -> None:
            if progress is not None:
                progress(name, done, total)

        outcomes.append(simulate(scenario, tell))
    return outcomes


def report(outcomes: list[Outcome]) -> Report:
    """Report the figures of all scenarios; checks that no request and no token was lost."""
    figures: dict[str, Number] = {}
    checks: list[Check] = []
    for outcome in outcomes:
        figures.update(outcome.figures())
        checks.extend(outcome.checks())
    notes = (
        "time is virtual: engine and order of claims are the real ones, step times are modelled",
        "no two prompts begin alike, and no worker, request or connection fails",
    )
    return Report(f"{len(outcomes)} scenarios", figures, tuple(checks), notes)
