"""The simulator against a real worker: the same traces, the same figures, and their difference.

The cost of a step is fitted in the same run to the steps of other requests (:class:`Lessons`,
before and after each trace). Machines drift, virtual ones most of all. So everything is simulated
twice: with those costs, and with the costs scaled by one factor to the machine's *pace* in the
trace. The limits apply to the second: it shows the simulator's own error, in the
order of requests and in which of them share a step.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.protocol.states import Lane
from penstock.shared.settings import Settings, load_settings

from ...report import Report
from ...rounds import Machine, Progress, Rounds
from ...simulate.arrivals import Generator, Lengths, SimRequest, write_trace
from ...simulate.dispatch import Dispatch
from ...simulate.fitted_step_time import MeasuredStep
from ...simulate.measures import LaneFigures, Recorder, ServiceLevel
from ...simulate.scenario import Outcome, Scenario, simulate
from ...simulate.step_time import HARDWARE, MODELS, Roofline
from ..engine.worker_process import worker_process
from ..options import SimulatorOptions
from .calibration import Lessons, Measured, StepReader, query_tokens, scrape
from .replay import Heard, record, replay

__all__ = ["bench_simulator"]

_ERROR_PERCENT = 20
_BATCH_TOKENS = 256
_BLOCK_SIZE = 16
_SATURATING = 400
"""Simultaneous requests whose simulation gives a worker's capacity."""

_DEVICE = Roofline(HARDWARE["cpu"], MODELS["demo"])
_LEVEL = ServiceLevel(ttft_s=1.0, itl_s=0.05)
_LANES = {Lane.CRITICAL: 1.0, Lane.NORMAL: 4.0, Lane.BATCH: 1.0}
_TENANTS = {"a": 1.0, "b": 1.0}


def bench_simulator(options: SimulatorOptions, progress: Progress = lambda *_: None) -> Report:
    """Replay traces at several loads, simulate them, and compare.

    Raises:
        ModelError: the model cannot be loaded.
        RedisUnavailable: no server can be started.
    """
    return asyncio.run(_bench(options, progress))


async def _bench(options: SimulatorOptions, progress: Progress) -> Report:
    rounds, stages = Rounds(), options.rounds * len(options.loads)
    notes = ["the worker drafts nothing, and its step log is on; all else is as it comes"]
    progress("loading", 0, 0)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        log = Path(folder) / "steps.jsonl"
        async with EmbeddedRedis() as server:
            settings = _settings(options, server.url, log)
            async with worker_process(settings) as worker:
                metrics_url = f"http://127.0.0.1:{worker.metrics_port}/metrics"
                machine, done = Machine(), 0

                def trace_done() -> None:
                    nonlocal done
                    done += 1
                    progress("replaying", done, stages)

                with calm_collector():
                    for index in range(options.rounds):
                        one = _Round(options, server.url, metrics_url, StepReader(log), index)
                        await one.play(trace_done)
                        notes.append(one.compare(rounds))
    judged = [f"{name}_at_pace_error_percent_{load}" for load in options.loads for name in _JUDGED]
    return rounds.report(
        "simulator",
        machine,
        at_most=[(name, _ERROR_PERCENT) for name in judged],
        at_least=[(name, -_ERROR_PERCENT) for name in judged],
        notes=notes,
    )


def _settings(options: SimulatorOptions, url: str, log: Path) -> Settings:
    return load_settings(
        {
            "redis.url": url,
            "model.path": options.model,
            "model.device": "cpu",
            "model.synthetic_step_ms": options.synthetic_step_ms,
            "queue.model": "bench",
            "engine.max_sequences": options.slots,
            "engine.max_batch_tokens": max(_BATCH_TOKENS, options.slots),
            "engine.block_size": _BLOCK_SIZE,
            "engine.threads": options.threads,
            "speculation.source": "off",
            "worker.metrics_port": 0,
            "worker.step_log": str(log),
            "worker.log_level": "error",
        }
    )


class _Round:
    """The traces of all loads between lessons, and their simulation."""

    def __init__(
        self,
        options: SimulatorOptions,
        url: str,
        metrics_url: str,
        steps: StepReader,
        index: int,
    ) -> None:
        self._options, self._url, self._steps = options, url, steps
        self._seed = f"{options.seed}.{index}"
        self._rng = random.Random(self._seed)
        self._keys = Keys("bench")
        self._prompt, self._output = Lengths(options.prompt), Lengths(options.output)
        self._config = _engine_config(options, int(scrape(metrics_url)["kv_blocks_total"]))
        self._lessons = Lessons(
            url, self._keys, steps, metrics_url, prompt=self._prompt, output=self._output,
            slots=options.slots, batch_tokens=self._config.max_batch_tokens, rng=self._rng,
        )  # fmt: skip
        self._heard: dict[int, list[Heard]] = {}
        self._traced: dict[int, list[MeasuredStep]] = {}

    async def play(self, trace_done: Callable[[], None]) -> None:
        """Play lessons and traces in turn; the first lesson gives the worker's capacity."""
        options = self._options
        await self._lessons.play(options.lesson_seconds)
        saturated = self._simulate("saturated", self._draw(_SATURATING, 1e6, 0), self._measured())
        capacity = saturated.run.ended / saturated.run.makespan_s
        for load in options.loads:
            rate = capacity * load / 100
            trace = self._draw(max(20, round(rate * options.seconds)), rate, load)
            self._heard[load] = await replay(self._url, self._keys, trace, self._rng)
            self._traced[load] = await self._steps.next(query_tokens(trace))
            await self._lessons.play(options.lesson_seconds)
            trace_done()

    def _draw(self, count: int, rate: float, load: int) -> list[SimRequest]:
        seed = random.Random(f"{self._seed} {load}").getrandbits(32)
        drawn = Generator(
            count=count, rate=rate, prompt=self._prompt, output=self._output,
            lanes=_LANES, tenants=_TENANTS, seed=seed,
        )  # fmt: skip
        return [
            replace(request, id=f"{self._seed}.{load}.{request.id}", max_tokens=request.output_len)
            for request in drawn
        ]

    def _measured(self) -> Measured:
        return self._lessons.measured(_DEVICE)

    def _simulate(self, name: str, requests: Sequence[SimRequest], measured: Measured) -> Outcome:
        return simulate(
            Scenario(
                name=name, requests=sorted(requests, key=lambda request: request.arrival),
                workers=1, dispatch=Dispatch.PULL, config=self._config, cost=measured.cost,
                level=_LEVEL, exchange_s=measured.exchange_s, wake_s=measured.wake_s,
            )
        )  # fmt: skip

    def compare(self, rounds: Rounds) -> str:
        """Add both sides' figures and the simulator's error; returns its calibration."""
        measured = self._measured()
        for load, heard in self._heard.items():
            recorder = Recorder(_LEVEL, 0.0)
            record(heard, recorder)
            real = _figures(recorder.all_lanes(), recorder.last_end)
            requests = [one.request for one in heard]
            pace = _pace(measured, self._traced[load])
            paced = replace(measured, cost=measured.cost.scaled(pace))
            rounds.add(f"requests_{load}", len(requests))
            rounds.add(f"pace_{load}", pace)
            for name, value in real.items():
                rounds.add(f"{name}_{load}", value)
            for told, label in ((measured, "simulated"), (paced, "at_pace")):
                outcome = self._simulate(f"{load}", requests, told)
                for name, value in _figures(outcome.total, outcome.run.makespan_s).items():
                    rounds.add(f"{name}_{label}_{load}", value)
                    off = 100 * (value / real[name] - 1)
                    rounds.add(f"{name}_{label}_error_percent_{load}", off)
            if self._options.keep is not None:
                write_trace(requests, self._options.keep / f"load-{load}.jsonl")
        if self._options.keep is not None:
            self._lessons.write(self._options.keep / "steps.jsonl")
        return _told(measured)


def _engine_config(options: SimulatorOptions, num_blocks: int) -> EngineConfig:
    """The worker's engine configuration, as far as the simulator models it."""
    budget = max(_BATCH_TOKENS, options.slots)
    return EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=num_blocks,
        max_batch_tokens=budget,
        max_sequences=options.slots,
        chunk_size=budget,
        max_model_len=_DEVICE.context,
        eos_token_ids=frozenset(),
        preemption="recompute",
    )


_JUDGED = (
    "ttft_p50_s", "ttft_p99_s", "itl_mean_s", "itl_p50_s", "itl_p99_s", "e2e_mean_s", "e2e_p99_s",
    "throughput_tps", "makespan_s",
)  # fmt: skip


def _pace(measured: Measured, steps: Sequence[MeasuredStep]) -> float:
    """Ratio of the machine's time for these steps to the time the lessons predict."""
    return sum(step.seconds for step in steps) / sum(
        measured.cost.seconds(step.work) for step in steps
    )


def _figures(total: LaneFigures, makespan_s: float) -> dict[str, float]:
    return {
        "ttft_p50_s": total.ttft.quantile(0.5),
        "ttft_p99_s": total.ttft.quantile(0.99),
        "itl_mean_s": total.itl.mean,
        "itl_p50_s": total.itl.quantile(0.5),
        "itl_p99_s": total.itl.quantile(0.99),
        "e2e_mean_s": total.e2e.mean,
        "e2e_p99_s": total.e2e.quantile(0.99),
        "throughput_tps": total.output_tokens / makespan_s,
        "makespan_s": makespan_s,
    }


def _told(measured: Measured) -> str:
    cost = measured.cost
    return (
        f"told: a step takes {1e3 * cost.step_s:.3g} ms, and {1e3 * cost.sequence_s:.3g} ms a "
        f"sequence, {1e3 * cost.token_s:.3g} ms a token, {1e3 * cost.chunk_s:.3g} ms a prompt "
        f"chunk, {1e6 * cost.context_s:.3g} us a token of context, {1e6 * cost.pair_s:.3g} us a "
        f"query-key pair; an exchange {1e3 * measured.exchange_s:.3g} ms, waking up "
        f"{1e3 * measured.wake_s:.3g} ms"
    )
