"""Which scenarios a call of ``penstock simulate`` compares, and the report on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol import Lane
from penstock.shared.report import Check, Number, Report

from ..engine.config import EngineConfig
from .cost import CostModel, Roofline
from .fleet import Dispatch
from .measures import ServiceLevel
from .scenario import Outcome, Scenario, simulate
from .workload import Generator, Lengths, SimRequest, read_trace

__all__ = ["Comparison", "compare", "report"]

_MOST_BLOCKS = 1 << 22
"""KV blocks of a whole fleet: about 100 bytes of this machine's memory each."""

_CONSTANT_COST_TOKENS = 1 << 20
"""KV pool of a device of which nothing is known but its step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The cross product of what is to be compared, on equal requests.

    Attributes:
        workers, dispatch, max_sequences, chunk_sizes, kv_blocks: values to be compared. For a chunk
            size None is the whole token budget; for KV blocks None is what fits on the device.
        cost: of a step.
        trace: file of requests; None draws them.
        requests, rate: how many and how fast, if they are drawn.
        per_worker: requests and rate are for each worker.
        burstiness, prompt, output, lanes, tenants: see :class:`Generator`.
        max_batch_tokens, block_size: of the engine. A block size of None is 16, or larger in a
            fleet so large that it would need too much memory.
        exchange_s, claim_batch, level, seed: see :class:`Scenario`.
    """

    workers: tuple[int, ...]
    dispatch: tuple[Dispatch, ...]
    max_sequences: tuple[int, ...]
    chunk_sizes: tuple[int | None, ...]
    kv_blocks: tuple[int | None, ...]
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
    max_batch_tokens: int
    block_size: int | None
    exchange_s: float
    claim_batch: int
    level: ServiceLevel
    seed: int

    def __post_init__(self) -> None:
        if min(self.workers) < 1 or max(self.workers) > 1000:
            raise ConfigurationError(f"workers is {self.workers}; allowed: 1 to 1000")
        if not 0 <= self.exchange_s <= 10:
            raise ConfigurationError(f"exchange is {self.exchange_s} s; allowed: 0 to 10")
        if self.claim_batch < 1:
            raise ConfigurationError(f"claim_batch is {self.claim_batch}; allowed: 1 or more")

    def scenarios(self) -> list[Scenario]:
        """All combinations; a name tells what differs between them."""
        return [
            Scenario(
                name=self._name(workers, dispatch, sequences, chunk, blocks),
                requests=self.workload(workers),
                workers=workers,
                dispatch=dispatch,
                config=self._config(workers, sequences, chunk, blocks),
                cost=self.cost,
                level=self.level,
                exchange_s=self.exchange_s,
                claim_batch=self.claim_batch,
                seed=self.seed,
            )
            for workers, sequences, chunk, blocks, dispatch in itertools.product(
                self.workers, self.max_sequences, self.chunk_sizes, self.kv_blocks, self.dispatch
            )
        ]

    def workload(self, workers: int) -> Iterable[SimRequest]:
        """What a fleet of this size is asked."""
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
            seed=self.seed,
        )

    def num_requests(self, workers: int) -> int:
        """How many will arrive; 0 if only the trace's end tells."""
        return 0 if self.trace else self.requests * (workers if self.per_worker else 1)

    def _name(
        self,
        workers: int,
        dispatch: Dispatch,
        sequences: int,
        chunk: int | None,
        blocks: int | None,
    ) -> str:
        parts = [dispatch.value.replace("-", "_"), f"w{workers}"]
        if len(self.max_sequences) > 1:
            parts.append(f"s{sequences}")
        if len(self.chunk_sizes) > 1:
            parts.append(f"c{chunk or 'all'}")
        if len(self.kv_blocks) > 1:
            parts.append(f"kv{blocks or 'all'}")
        return "_".join(parts)

    def _config(
        self, workers: int, sequences: int, chunk: int | None, blocks: int | None
    ) -> EngineConfig:
        budget = max(self.max_batch_tokens, sequences)
        roofline = self.cost if isinstance(self.cost, Roofline) else None
        size = self.block_size
        if size is None:
            size = self._block_size(workers) if blocks is None else 16
        elif size < 1:
            raise ConfigurationError(f"block_size is {size}; allowed: 1 or more")
        if blocks is None:
            blocks = self._blocks_that_fit(size)
        return EngineConfig(
            block_size=size,
            num_blocks=blocks,
            max_batch_tokens=budget,
            max_sequences=sequences,
            chunk_size=budget if chunk is None else chunk,
            max_model_len=roofline.model.context if roofline else _CONSTANT_COST_TOKENS,
            eos_token_ids=frozenset(),
            prefix_cache=False,  # all prompts are made of one token: they would all hit
        )

    def _blocks_that_fit(self, block_size: int) -> int:
        if isinstance(self.cost, Roofline):
            return self.cost.kv_blocks(block_size)
        return max(1, _CONSTANT_COST_TOKENS // block_size)

    def _block_size(self, workers: int) -> int:
        """16 tokens, or so many more that the books of all pools fit into memory."""
        size = 16
        while workers * self._blocks_that_fit(size) > _MOST_BLOCKS:
            size *= 2
        return size


def compare(
    comparison: Comparison, progress: Callable[[str, int, int], None] | None = None
) -> list[Outcome]:
    """Simulate every combination, one after the other.

    Args:
        comparison: what to run.
        progress: told the scenario, how many requests have arrived, and how many will (0: unknown).
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
    """Figures of all scenarios; checks that no request and no token was lost."""
    figures: dict[str, Number] = {}
    checks: list[Check] = []
    for outcome in outcomes:
        figures.update(outcome.figures())
        checks.extend(outcome.checks())
    notes = (
        "time is virtual: engine and order of claims are the real ones, step times are modelled",
        "the prefix cache is off, and no worker, request or connection fails",
    )
    return Report(f"{len(outcomes)} scenarios", figures, tuple(checks), notes)
