"""Many requests through the real engine in virtual time: nothing is lost, and nothing stays."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator

import pytest
from simulate.fleets import drawn, engine, scenario

from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.shared.policy_name import PolicyName
from penstock.tools.simulate import HARDWARE, MODELS, Lengths, Roofline, SimRequest, simulate

MILLION = pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
SAMPLES = 10


class Samples:
    """How many objects live, and how much CPU was used, at each tenth of the requests."""

    def __init__(self, requests: Iterable[SimRequest], count: int) -> None:
        self._requests, self._every = requests, count // SAMPLES
        self.blocks: list[int] = []
        self.cpu_s: list[float] = []

    def __iter__(self) -> Iterator[SimRequest]:
        for index, request in enumerate(self._requests):
            if index % self._every == 0:
                self.blocks.append(sys.getallocatedblocks())
                self.cpu_s.append(time.process_time())
            yield request


@pytest.mark.parametrize("count", [20_000, MILLION])
@pytest.mark.parametrize("policy", [PolicyName.FCFS, PolicyName.FAIR])
def test_a_long_run_leaves_nothing_behind(policy: PolicyName, count: int) -> None:
    """Pools are so small that sequences are swapped and computed again all the time."""
    config = engine(
        max_sequences=64, num_blocks=60, num_host_blocks=30, preemption="swap", watermark=0.0,
        policy=policy, chunking=Chunking.ADAPTIVE,
    )  # fmt: skip
    requests = drawn(
        count, 500.0, burstiness=3.0, output=Lengths("uniform:1:15"), prompt=Lengths("exp:40"),
        tenants={f"t{index}": 1 for index in range(20)}, deadlines=(0.1, 20.0),
    )  # fmt: skip
    samples = Samples(requests, count)
    cost = Roofline(HARDWARE["a100"], MODELS["7b"])
    outcome = simulate(scenario(samples, config=config, cost=cost))
    assert all(check.ok for check in outcome.checks())
    assert outcome.run.preemptions > count / 1000
    # After a fifth, all that is kept for long is there. Had each request since left one object
    # behind, four fifths of their number would show; a busy moment keeps some thousands.
    early, late = samples.blocks[2], samples.blocks[-1]
    assert late - early < max(5000, count // 20)
    # As fast at the end as at the begin: no queue or table has grown.
    tenths = [end - begin for begin, end in zip(samples.cpu_s, samples.cpu_s[1:], strict=False)]
    assert min(tenths[-3:]) < 2 * min(tenths[:3])
