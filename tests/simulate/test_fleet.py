"""The fleet in virtual time: same seed, same run; nothing lost; nobody idle beside waiting work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulate.fleets import LEVEL, drawn, engine, fixed, scenario

from penstock.gpu_worker.engine.scheduling.policies.fcfs import FcfsPolicy
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.shared.protocol.states import Lane
from penstock.tools.simulate import ConstantCost, Dispatch, Lengths, SimRequest, simulate
from penstock.tools.simulate.dispatch import Pull, RoundRobin
from penstock.tools.simulate.fleet import Fleet, Run
from penstock.tools.simulate.measures import Recorder
from penstock.tools.simulate.node import EngineNode

DISPATCHES = pytest.mark.parametrize("dispatch", list(Dispatch))


@DISPATCHES
def test_the_same_seed_gives_the_same_run(dispatch: Dispatch) -> None:
    def figures(seed: int) -> object:
        requests = drawn(400, 150.0, seed=seed)
        return simulate(scenario(requests, dispatch=dispatch, seed=seed)).figures()

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


@DISPATCHES
def test_every_request_ends_once_with_its_tokens(dispatch: Dispatch) -> None:
    """With a KV pool so small that sequences are preempted and put back."""
    requests = list(drawn(600, 400.0, burstiness=3.0))
    config = engine(num_blocks=80, max_sequences=32, watermark=0.0)
    outcome = simulate(scenario(requests, dispatch=dispatch, config=config))
    assert all(check.ok for check in outcome.checks())
    assert outcome.run.preemptions > 0
    assert outcome.run.ended == outcome.total.ended == len(requests)
    assert outcome.run.output_tokens == sum(request.output_len for request in requests)
    for lane, figures in outcome.lanes.items():
        own = [request for request in requests if request.lane is lane]
        assert figures.ended == figures.ttft.count == figures.e2e.count == len(own)
        assert figures.itl.count == sum(request.output_len - 1 for request in own)


def test_what_can_never_fit_is_refused_and_counted() -> None:
    requests = [fixed(0.0, prompt=2000), fixed(0.1), fixed(0.2, prompt=9000)]
    outcome = simulate(scenario(requests, workers=1, config=engine(num_blocks=64)))
    assert (outcome.run.ended, outcome.total.refused, outcome.total.e2e.count) == (3, 2, 1)
    assert all(check.ok for check in outcome.checks())


def test_a_run_that_serves_nothing_has_figures() -> None:
    requests = [fixed(0.0, prompt=9000)]
    figures = simulate(scenario(requests, workers=1, exchange_s=0.0)).figures()
    assert (figures["test_refused"], figures["test_goodput_rps"]) == (1, 0.0)


class Watch(Pull):
    """Pull that looks at every event how long something has waited beside an idle worker."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet, max_sequences=2, claim_batch=4, step_tokens=512, wake_s=0.0, seed=0)
        self.idle_since = [0.0] * len(fleet.nodes)
        self.longest = 0.0

    def look(self, now: float) -> None:
        for index, since in enumerate(self.idle_since):
            room = self.room(index)
            if room.requests and not self._fleet.is_stepping(index):
                for (lane, _), queue in self._queue._queues.items():
                    if lane.rank > room.least_urgent.rank:
                        continue
                    self.longest = max(self.longest, now - max(since, queue[0].arrival))

    def arrived(self, request: SimRequest, now: float) -> None:
        self.look(now)
        super().arrived(request, now)

    def stepped(self, index: int, ended: list[SimRequest], now: float) -> None:
        self.idle_since[index] = now  # if no step follows
        self.look(now)
        super().stepped(index, ended, now)


def fleet_of(count: int, requests: Iterator[SimRequest], exchange_s: float) -> Fleet:
    recorder = Recorder(LEVEL, exchange_s / 2)
    config = engine(max_sequences=2)
    nodes = [EngineNode(config, ConstantCost(0.01), recorder) for _ in range(count)]
    return Fleet(nodes, requests, exchange_s)


def test_no_worker_is_idle_while_something_waits() -> None:
    """Pull conserves work: what waits beside an idle worker is claimed at once.

    That is, within the exchange that may be under way and half of the next.
    """
    exchange_s = 0.002
    fleet = fleet_of(6, iter(drawn(1500, 80.0, burstiness=4.0)), exchange_s)
    watch = Watch(fleet)
    run = fleet.run(watch)
    assert run.ended == 1500
    assert max(node.steps for node in fleet.nodes) < run.steps
    assert 0 < watch.longest <= 1.5 * exchange_s


def test_push_leaves_workers_idle_beside_waiting_work() -> None:
    """The same requests pushed in turn: the measure above does find what it is made to find."""
    fleet = fleet_of(6, iter(drawn(1500, 80.0, burstiness=4.0)), 0.002)
    idle_beside_waiting = 0

    class Watched(RoundRobin):
        def arrived(self, request: SimRequest, now: float) -> None:
            nonlocal idle_beside_waiting
            super().arrived(request, now)
            waits = any(any(node.load.waiting.values()) for node in fleet.nodes)
            idle = any(
                not fleet.is_stepping(i) and not n.open.total() for i, n in enumerate(fleet.nodes)
            )
            idle_beside_waiting += waits and idle

    assert fleet.run(Watched(fleet)).ended == 1500
    assert idle_beside_waiting > 100


def test_a_lone_request_takes_its_steps_and_exchanges() -> None:
    """By hand: claim there and back 4 ms, five steps of 10 ms, published half an exchange later."""
    outcome = simulate(scenario([fixed(1.0)], exchange_s=0.004))
    assert outcome.total.ttft.mean == pytest.approx(0.004 + 0.01 + 0.002)
    assert outcome.total.e2e.mean == pytest.approx(0.004 + 0.05 + 0.002)
    assert outcome.total.itl.mean == pytest.approx(0.01)
    assert outcome.run.busy_s == pytest.approx(0.05)


def test_a_pushed_request_saves_half_an_exchange() -> None:
    pushed = simulate(scenario([fixed(1.0)], exchange_s=0.004, dispatch=Dispatch.ROUND_ROBIN))
    assert pushed.total.ttft.mean == pytest.approx(0.002 + 0.01 + 0.002)


@pytest.mark.parametrize("dispatch", [Dispatch.PULL, Dispatch.ROUND_ROBIN])
def test_one_server_waits_as_queueing_theory_says(dispatch: Dispatch) -> None:
    """M/D/1 at load 0.7: Pollaczek and Khinchine give a mean wait of load / (2 (1 - load)) steps.

    The mean of 12,000 waits, each of which depends on the last, is good to about 4 %; allowed: 8 %.
    """
    load, step_s = 0.7, 0.01
    requests = drawn(
        12_000, load / step_s, prompt=Lengths("const:4"), output=Lengths("const:1"), seed=3
    )
    outcome = simulate(
        scenario(
            requests, workers=1, dispatch=dispatch, exchange_s=0.0,
            config=engine(max_sequences=1), cost=ConstantCost(step_s),
        )
    )  # fmt: skip
    wait = outcome.total.e2e.mean - step_s
    assert wait == pytest.approx(step_s * load / (2 * (1 - load)), rel=0.08)
    assert outcome.utilisation == pytest.approx(load, rel=0.03)


def test_urgent_lanes_wait_less_under_overload() -> None:
    lanes = {Lane.CRITICAL: 1.0, Lane.NORMAL: 1.0, Lane.BATCH: 1.0}
    outcome = simulate(scenario(drawn(2000, 800.0, lanes=lanes), config=engine(max_sequences=4)))
    waits = [outcome.lanes[lane].ttft.mean for lane in Lane]
    assert waits == sorted(waits)
    assert waits[2] > 2 * waits[0]


def test_run_is_what_the_engines_count() -> None:
    run: Run = simulate(scenario(drawn(200, 100.0))).run
    assert run.spans >= run.output_tokens >= run.steps / 2
    assert 0 < run.busy_s <= 4 * run.makespan_s


def test_a_thousand_workers_share_a_burst() -> None:
    """Each of 1,000 workers may hold one: a burst of 1,000 is over after one round."""
    requests = [fixed(0.0, id=f"b{i}") for i in range(1000)]
    outcome = simulate(
        scenario(requests, workers=1000, config=engine(max_sequences=1, num_blocks=8))
    )
    assert outcome.total.e2e.quantile(1.0) == pytest.approx(0.001 + 0.05 + 0.0005)


class ShortestFirst(FcfsPolicy):
    """A policy made for these tests: the one with the fewest tokens to give is admitted first."""

    def peek(self) -> Sequence | None:
        return min(self, key=lambda sequence: sequence.options.max_tokens, default=None)


def test_the_policy_decides_inside_a_worker() -> None:
    """Short ones wait less behind long ones, if they are let pass."""
    requests = [fixed(0.0, id=f"{output}", output=output) for output in range(20, 0, -1)]
    means = [
        simulate(
            scenario(
                requests, workers=1, dispatch=Dispatch.ROUND_ROBIN, policy=policy,
                config=engine(max_sequences=1),
            )
        ).total.e2e.mean
        for policy in (None, ShortestFirst)
    ]  # fmt: skip
    # The longest has begun when the others come. Then 1, 2, ... 19 steps follow, or 19, 18, ... 1.
    steps = [sum(k * k for k in range(1, 21)), 20 * 20 + sum(k * (20 - k) for k in range(1, 20))]
    assert means == pytest.approx([0.01 * total / 20 + 0.001 for total in steps])


def test_a_full_worker_takes_what_is_more_urgent() -> None:
    """As the real edge: urgent work displaces `batch`, which finds its KV again and goes on."""
    requests = [
        *(fixed(0.0, id=f"b{i}", output=50, lane=Lane.BATCH) for i in range(4)),
        fixed(0.1, id="late", output=5, lane=Lane.BATCH),
        fixed(0.1, id="urgent", output=5, lane=Lane.CRITICAL),
    ]
    config = engine(max_sequences=4, prefix_cache=True)
    outcome = simulate(scenario(requests, workers=1, config=config, exchange_s=0.0))
    urgent, rest = outcome.lanes[Lane.CRITICAL], outcome.lanes[Lane.BATCH]
    assert urgent.ttft.mean < 0.021  # the step that runs, and its own
    assert rest.ttft.quantile(1.0) > 0.4
    assert outcome.run.preemptions == 1


def test_the_bell_finds_who_has_room_for_that_lane() -> None:
    """One worker may take urgent work only, the other one anything: the second hears the bell."""
    requests = [
        fixed(0.0, id="runs", output=100, lane=Lane.BATCH),
        *(fixed(0.1 + i / 10, id=f"next{i}", output=2, lane=Lane.BATCH) for i in range(8)),
    ]
    outcome = simulate(
        scenario(requests, workers=2, config=engine(max_sequences=1), exchange_s=0.0)
    )
    assert outcome.total.ttft.quantile(1.0) == pytest.approx(0.01, rel=0.02)


def test_an_idle_worker_wakes_up() -> None:
    """By hand, as the lone request above, and 3 ms until the claim is sent."""
    outcome = simulate(scenario([fixed(1.0)], exchange_s=0.004, wake_s=0.003))
    assert outcome.total.ttft.mean == pytest.approx(0.003 + 0.004 + 0.01 + 0.002)


def test_ids_may_repeat_in_a_trace() -> None:
    requests = [fixed(0.0, id="same"), fixed(0.0, id="same"), fixed(0.01, id="same")]
    outcome = simulate(scenario(requests, workers=1))
    assert (outcome.run.ended, outcome.total.e2e.count) == (3, 3)
