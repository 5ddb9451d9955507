"""One simulated worker: the real engine, with a cost model in place of a device."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.scheduling.policies.policy import Policy
from penstock.gpu_worker.engine.scheduling.step_features import StepFeatures
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane

from .arrivals import MOST_TOKENS, SimRequest
from .measures import Recorder
from .step_time import CostModel

__all__ = ["EngineNode", "Load", "Node"]


@dataclass(slots=True)
class Load:
    """A worker's load as of its last step, which decides its claims.

    Attributes:
        waiting: sequences in the engine that hold no KV blocks, by lane.
        available_tokens: tokens of new sequences that fit into free KV blocks.
    """

    waiting: Mapping[Lane, int]
    available_tokens: int


class Node(Protocol):
    """A worker as the fleet sees it.

    ``begin`` and ``complete`` alternate while there is work; the fleet advances the time between.

    Attributes:
        open: delivered requests that have not ended, by lane.
        load: as of the last step.
        arriving_tokens: tokens of delivered prompts whose first step has not ended.
        steps, spans, output_tokens, preemptions: totals.
    """

    open: Counter[str]
    load: Load
    arriving_tokens: int
    steps: int
    spans: int

    def deliver(self, requests: list[SimRequest]) -> None:
        """Receive requests; the next step sees them."""

    def begin(self, now: float) -> float | None:
        """Start a step; returns its end time, or None if there is nothing to do."""

    def complete(self, now: float) -> list[SimRequest]:
        """End the step; returns the requests that ended with it."""

    @property
    def output_tokens(self) -> int:
        """Tokens sampled."""

    @property
    def preemptions(self) -> int:
        """Preempted sequences."""

    def check_integrity(self) -> None:
        """Raise ``IntegrityError`` if the worker's bookkeeping is wrong."""


class _Silence:
    """A detokeniser without text, which no reader needs here."""

    def feed(self, token_id: int) -> str:
        del token_id
        return ""

    def flush(self) -> str:
        return ""


_SILENCE = _Silence()
_TOKEN = (0,)
_NOTHING: tuple[int, ...] = ()
_ZEROS = (0,) * MOST_TOKENS


@dataclass(slots=True)
class _Open:
    """A request under way, with the times of its first and latest token (-1 before)."""

    request: SimRequest
    first: float = -1.0
    last: float = -1.0


class EngineNode:
    """A worker with the production engine, scheduler, policy and KV manager.

    Args:
        config: of the engine.
        cost: model of its step times.
        recorder: records every token.
        policy: admission policy; None takes the engine's own.
    """

    def __init__(
        self,
        config: EngineConfig,
        cost: CostModel,
        recorder: Recorder,
        policy: Policy | None = None,
    ) -> None:
        self._engine = Engine(config, lambda _: _SILENCE, policy)
        self._block_size = config.block_size
        self._cost = cost
        self._recorder = recorder
        self._inbox: deque[SimRequest] = deque()
        self._open: dict[str, _Open] = {}
        self._refused: list[SimRequest] = []
        self._plan: Plan | None = None
        self._step_s = self._swap_s = 0.0
        self._previous = -2.0  # end of the last step; no entry begins with this
        self.open: Counter[str] = Counter()
        self.load = Load({}, config.num_blocks * config.block_size)
        self.arriving_tokens = 0
        self._beginning_tokens = 0
        self.steps = 0
        self.spans = 0
        self._num_added = 0

    def deliver(self, requests: list[SimRequest]) -> None:
        """Keep the requests for the next step."""
        self._inbox.extend(requests)
        self.arriving_tokens += sum(request.prompt_len for request in requests)
        self.open.update(request.lane for request in requests)

    def begin(self, now: float) -> float | None:
        """Pull the inbox and plan, as ``Worker`` does."""
        while self._inbox:
            self._add(self._inbox.popleft(), now)
        self._beginning_tokens = self.arriving_tokens
        plan = self._plan = self._engine.schedule()
        if plan is None:
            # Refusals are published although no step runs.
            return now if self._refused else None
        self.steps += 1
        self.spans += len(plan.spans)
        work = StepFeatures.of(plan)
        self._swap_s = self._cost.swap_seconds(work.swapped_blocks * self._block_size)
        self._step_s = self._cost.seconds(work) + self._swap_s
        return now + self._step_s

    def complete(self, now: float) -> list[SimRequest]:
        """Sample a token for each sampling span, and record it."""
        ended, self._refused = self._refused, []
        self.arriving_tokens -= self._beginning_tokens
        self._beginning_tokens = 0
        if self._plan is not None:
            output = StepOutput(
                tuple([_TOKEN if span.samples else _NOTHING for span in self._plan.spans]),
                swap_s=self._swap_s,
            )
            self._record(self._plan, output, ended, now)
            self._engine.observe(self._plan, self._step_s)
        stats = self._engine.stats()
        self.load.waiting = stats.waiting
        self.load.available_tokens = stats.available_tokens
        self.open.subtract(request.lane for request in ended)
        self._previous = now
        return ended

    def _record(self, plan: Plan, output: StepOutput, ended: list[SimRequest], now: float) -> None:
        recorder, requests, previous = self._recorder, self._open, self._previous
        steady = [0] * len(recorder.gaps)  # sequences with a token in the previous step
        for update in self._engine.collect(plan, output):
            entry = requests[update.id]
            request = entry.request
            if update.token_ids:
                if entry.last == previous:
                    steady[request.rank] += 1
                elif entry.last < 0:
                    entry.first = now
                    recorder.first_token(request, now)
                else:
                    recorder.gaps[request.rank].add(now - entry.last)
                entry.last = now
            if update.finish is not None:
                del requests[update.id]
                ended.append(request)
                if update.token_ids and update.start + 1 == request.output_len:
                    recorder.end(request, entry.first, now)
                else:
                    recorder.refuse(request, now)
        for rank, count in enumerate(steady):
            if count:
                recorder.gaps[rank].add(now - previous, count)

    def _add(self, request: SimRequest, now: float) -> None:
        self._num_added += 1
        name = f"{self._num_added}"  # a trace may use an id twice
        refusal = self._engine.add(
            EngineRequest(
                id=name,
                lane=request.lane,
                tenant=request.tenant,
                # The first id is unique, so no two requests share a prefix.
                prompt_ids=(self._num_added, *_ZEROS[: request.prompt_len - 1]),
                options=_options(request.output_len),
                seed=0,
                arrival=request.arrival,
                deadline=request.deadline,
            )
        )
        if refusal is None:
            self._open[name] = _Open(request)
        else:
            self._refused.append(request)
            self._recorder.refuse(request, now)

    @property
    def output_tokens(self) -> int:
        """The engine's own count."""
        return self._engine.stats().output_tokens

    @property
    def preemptions(self) -> int:
        """The engine's own count."""
        return sum(self._engine.stats().preemptions.values())

    def check_integrity(self) -> None:
        """Recount the engine's blocks and queues."""
        self._engine.check_integrity()


@cache
def _options(output_len: int) -> SamplingOptions:
    return SamplingOptions(max_tokens=output_len, ignore_eos=True)
