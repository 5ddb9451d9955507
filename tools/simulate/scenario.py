"""One run: a fleet, its settings and its requests in, figures out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.scheduling.policies.policy import Policy
from penstock.shared.protocol.states import Lane

from ..report import Check, Number
from .arrivals import SimRequest
from .dispatch import Dispatch, dispatcher
from .fleet import Fleet, Run
from .measures import LaneFigures, Recorder, ServiceLevel
from .node import EngineNode, Node
from .step_time import CostModel

__all__ = ["Outcome", "Scenario", "simulate"]

_PROGRESS_EVERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The input of a run.

    Attributes:
        name: prefix of its figures' names.
        requests: in order of arrival; iterated once.
        workers: size of the fleet.
        dispatch: how requests find their worker.
        config: of every worker's engine.
        cost: of every worker's steps.
        level: what counts as a good answer.
        exchange_s: one round trip with Redis.
        wake_s: seconds from the bell until a worker that hears it sends its claim.
        claim_batch: the most requests claimed in one exchange.
        seed: decides which worker hears the bell first.
        policy: makes a worker's admission policy; None takes the engine's own.
    """

    name: str
    requests: Iterable[SimRequest]
    workers: int
    dispatch: Dispatch
    config: EngineConfig
    cost: CostModel
    level: ServiceLevel
    exchange_s: float = 1e-3
    wake_s: float = 0.0
    claim_batch: int = 16
    seed: int = 0
    policy: Callable[[], Policy] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        scenario: the input.
        run: totals of the run.
        lanes: latencies by lane.
        total: of all lanes together.
    """

    scenario: Scenario
    run: Run
    lanes: dict[Lane, LaneFigures]
    total: LaneFigures = field(repr=False)

    @property
    def goodput(self) -> float:
        """Requests within the service level per second."""
        return _over(self.total.good, self.run.makespan_s)

    @property
    def utilisation(self) -> float:
        """Share of the workers' time spent computing."""
        return _over(self.run.busy_s, self.run.makespan_s * self.scenario.workers)

    def figures(self) -> dict[str, Number]:
        """Flat, ``<scenario>_[<lane>_]<figure>_<unit>``."""
        run, total, name = self.run, self.total, self.scenario.name
        found: dict[str, Number] = {
            "requests": run.arrived,
            "refused": total.refused,
            "goodput_rps": self.goodput,
            "good_share": total.good / total.ended,
            "late_share": total.late / total.ended,
            "throughput_tps": _over(run.output_tokens, run.makespan_s),
            "utilisation": self.utilisation,
            "batch_mean": _over(run.spans, run.steps),
            "preemptions": run.preemptions,
            "makespan_s": run.makespan_s,
            **_latencies(total),
        }
        for lane, figures in self.lanes.items():
            if figures.ended:
                share = {"good_share": figures.good / figures.ended}
                lane_figures = {**_latencies(figures), **share}
                found.update({f"{lane}_{key}": value for key, value in lane_figures.items()})
        return {f"{name}_{key}": value for key, value in found.items()}

    def checks(self) -> list[Check]:
        """Check that every request ended exactly once, with its tokens."""
        run, total, name = self.run, self.total, self.scenario.name
        return [
            Check(f"{name}_requests_not_ended", run.arrived - run.ended, 0),
            Check(f"{name}_requests_ended_twice", total.ended - run.arrived, 0),
            Check(f"{name}_tokens_amiss", abs(run.output_tokens - total.output_tokens), 0),
        ]


def _over(count: float, whole: float) -> float:
    """The quotient; 0 where the divisor is 0."""
    return count / whole if whole else 0.0


def _latencies(figures: LaneFigures) -> dict[str, Number]:
    found: dict[str, Number] = {}
    for key, histogram in (("ttft", figures.ttft), ("itl", figures.itl), ("e2e", figures.e2e)):
        found[f"{key}_mean_s"] = histogram.mean
        found[f"{key}_p50_s"] = histogram.quantile(0.5)
        found[f"{key}_p99_s"] = histogram.quantile(0.99)
    return found


def simulate(scenario: Scenario, progress: Callable[[int], None] | None = None) -> Outcome:
    """Run a scenario to its end, and check every worker's integrity.

    Args:
        scenario: what to run.
        progress: called now and then with the number of arrived requests.

    Raises:
        IntegrityError: an engine's bookkeeping is wrong (a bug).
    """
    recorder = Recorder(scenario.level, scenario.exchange_s / 2)
    nodes: list[Node] = [
        EngineNode(
            scenario.config,
            scenario.cost,
            recorder,
            None if scenario.policy is None else scenario.policy(),
        )
        for _ in range(scenario.workers)
    ]
    requests = scenario.requests if progress is None else _told(scenario.requests, progress)
    fleet = Fleet(nodes, requests, scenario.exchange_s)
    run = fleet.run(
        dispatcher(
            scenario.dispatch,
            fleet,
            max_sequences=scenario.config.max_sequences,
            claim_batch=scenario.claim_batch,
            step_tokens=scenario.config.max_batch_tokens,
            wake_s=scenario.wake_s,
            seed=scenario.seed,
        )
    )
    for node in nodes:
        node.check_integrity()
    return Outcome(scenario, run, recorder.lanes, recorder.all_lanes())


def _told(requests: Iterable[SimRequest], progress: Callable[[int], None]) -> Iterator[SimRequest]:
    for count, request in enumerate(requests):
        if count % _PROGRESS_EVERY == 0:
            progress(count)
        yield request
