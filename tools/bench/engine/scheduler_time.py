"""Host time of one step: ``schedule()`` and ``collect()`` with nothing else in between."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Sequence

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane

from ...report import Report
from ...rounds import Machine, Progress, Rounds
from ..options import SchedulerOptions
from .policy_cost import measure_policies, policy_limits

__all__ = ["bench_scheduler"]

_BLOCK_SIZE = 16
_PROMPT = 16
"""Prompt lengths range from this to twice this minus one, so blocks fill in turns."""

_TURNS_PER_STEP = 20
_FIXED_US = 100
_PER_SEQUENCE_US = 1


def bench_scheduler(options: SchedulerOptions, progress: Progress = lambda *_: None) -> Report:
    """CPU time of a decode step, without a device and without a detokeniser, and of an admission.

    All running sequences decode. None ends, and none is admitted, because the sequence budget is
    full. The figures are the thread's CPU time, which other processes disturb least. They are means
    over a round's steps, so they include the garbage collector's share.
    """
    machine, rounds = Machine(), Rounds()
    total = len(options.running) * len(options.waiting) * options.rounds
    done = 0
    with calm_collector():
        for running in options.running:
            engines = {count: _engine(running, count, options) for count in options.waiting}
            for _ in range(options.rounds):
                for waiting, engine in engines.items():
                    rounds.add(f"step_us_{running}_{waiting}", _step_us(engine, options.steps))
                    done += 1
                    progress(f"{running} running", done, total)
        progress("orders of admission", done, total)
        measure_policies(
            rounds, options.waiting, repeats=options.rounds, turns=_TURNS_PER_STEP * options.steps
        )
    for policy in PolicyName:
        suffix = "" if policy is PolicyName.FCFS else f"_{policy}"
        rounds.add(f"bytes_per_waiting_request{suffix}", _bytes_per_waiting(policy))
    limits = [
        (f"step_us_{running}_{waiting}", _FIXED_US + _PER_SEQUENCE_US * running)
        for running in options.running
        for waiting in options.waiting
    ]
    limits += policy_limits(options.waiting)
    notes = [_flatness(rounds, running, options.waiting) for running in options.running]
    return rounds.report("scheduler", machine, at_most=limits, notes=filter(None, notes))


def _engine(running: int, waiting: int, options: SchedulerOptions) -> Engine:
    """An engine in whose next step each of ``running`` sequences decodes."""
    steps = (options.rounds + 1) * options.steps
    blocks_each = -(-(2 * _PROMPT + steps + 2) // _BLOCK_SIZE)
    config = EngineConfig(
        block_size=_BLOCK_SIZE,
        num_blocks=2 * running * blocks_each,
        max_batch_tokens=2 * _PROMPT * running,
        max_sequences=running,
        chunk_size=2 * _PROMPT,
        max_model_len=2 * _PROMPT + steps + 8,
        eos_token_ids=frozenset({0}),
    )
    engine = Engine(config, _NullStream)
    for index in range(running + waiting):
        engine.add(_request(index))
    plan = engine.schedule()
    assert plan is not None
    engine.collect(plan, _sampled(running))  # the prompts
    _step_us(engine, options.steps)  # caches of the CPU and of the interpreter
    return engine


def _request(index: int) -> EngineRequest:
    first = 1 + 32 * index % 50_000
    return EngineRequest(
        id=f"request-{index}",
        lane=Lane.NORMAL,
        tenant="default",
        prompt_ids=tuple(range(first, first + _PROMPT + index % _PROMPT)),
        options=_OPTIONS,
        seed=index,
        arrival=0.0,
    )


_OPTIONS = SamplingOptions(max_tokens=100_000)


def _sampled(count: int) -> StepOutput:
    return StepOutput(tuple((1000 + index,) for index in range(count)))


def _step_us(engine: Engine, steps: int) -> float:
    output = _sampled(sum(engine.stats().running.values()))
    began = time.thread_time()
    for _ in range(steps):
        plan = engine.schedule()
        assert plan is not None
        engine.collect(plan, output)
    return 1e6 * (time.thread_time() - began) / steps


def _bytes_per_waiting(policy: PolicyName, count: int = 2000) -> int:
    """Bytes of a waiting request beyond its options, which requests may share."""
    engine = Engine(
        EngineConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=16,
            max_batch_tokens=16,
            max_sequences=1,
            chunk_size=16,
            max_model_len=4096,
            eos_token_ids=frozenset({0}),
            policy=policy,
        ),
        _NullStream,
    )
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index in range(count):
            engine.add(_request(index))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return round((after - before) / count)


def _flatness(rounds: Rounds, running: int, waiting: Sequence[int]) -> str:
    base = f"step_us_{running}_0"
    if 0 not in waiting:
        return ""
    ratios = [
        f"x{statistics.median(rounds.ratios(f'step_us_{running}_{count}', base)):.2f} at {count}"
        for count in waiting
        if count
    ]
    return f"{running} running, against 0 waiting: {', '.join(ratios)}" if ratios else ""


class _NullStream:
    """A detokeniser that costs a call and nothing else."""

    __slots__ = ()

    def __init__(self, prompt_ids: tuple[int, ...]) -> None:
        del prompt_ids

    def feed(self, token_id: int) -> str:
        del token_id
        return ""

    def flush(self) -> str:
        return ""
