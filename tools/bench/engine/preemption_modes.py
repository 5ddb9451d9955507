"""Swap against recompute under KV pressure, and ``auto`` against the better one."""

from __future__ import annotations

import dataclasses
import random
import time
from dataclasses import dataclass

import torch

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionMode
from penstock.gpu_worker.engine.scheduling.scheduler_config import PreemptionChoice
from penstock.gpu_worker.engine.stats import EngineStats
from penstock.gpu_worker.engine_process.model_interface import ServingModel
from penstock.gpu_worker.model.build import build_model
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane
from penstock.shared.settings import load_settings

from ...report import Number, Report
from ...rounds import Machine, Progress, Rounds
from ..options import PreemptionOptions

__all__ = ["bench_preemption"]

_BLOCK_SIZE = 16
_WITHIN = 1.1
"""The limit of ``auto``'s time over the better mode's."""

_MODES: tuple[PreemptionChoice, ...] = ("swap", "recompute", "auto")

_URGENT_EVERY = 6
_URGENT_PROMPT = 16
_URGENT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Load:
    """A load to serve.

    Attributes:
        name: part of the figures' names.
        context: tokens of a request, half of them prompt.
        displaced: enough KV memory and a prefix cache, but places for half of the requests. Every
            few steps a short urgent request displaces a running one. Otherwise there are places for
            all, and too little KV memory.
    """

    name: str
    context: int
    displaced: bool = False


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The cost of serving a load.

    Attributes:
        seconds: CPU time.
        copying_s: wall-clock seconds in which swaps held up steps.
        stats: the engine's counters at the end.
    """

    seconds: float
    copying_s: float
    stats: EngineStats


def bench_preemption(options: PreemptionOptions, progress: Progress = lambda *_: None) -> Report:
    """All three in turn, ``rounds`` times for each load, with a real model on this CPU.

    Where KV is short, half of a context is prompt and half is output, and the pool holds
    ``pool_percent`` of what all requests will need. Running sequences outgrow it and are preempted
    with contexts of every length. Times are CPU time of the process, which other processes on a
    busy machine disturb least.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigurationError: its context is too short.
    """
    threads = torch.get_num_threads()
    progress("loading", 0, 0)
    machine, rounds = Machine(), Rounds()
    loads = [_Load(str(context), context) for context in options.contexts]
    loads.append(_Load("displaced", max(options.contexts), displaced=True))
    total, done = len(loads) * options.rounds * len(_MODES), 0
    try:
        model = _model(options)
        with calm_collector():
            for load in loads:
                _run(model, options, load, "swap", -1)  # warm-up: first calls allocate
                for number in range(options.rounds):
                    # The modes take turns at being first: none always inherits another's caches.
                    first = number % len(_MODES)
                    seconds = {}
                    for mode in (*_MODES[first:], *_MODES[:first]):
                        outcome = _run(model, options, load, mode, number)
                        seconds[mode] = outcome.seconds
                        _add(rounds, f"{mode}_{load.name}", outcome)
                        done += 1
                        progress(f"{mode}, {load.name}", done, total)
                    better = min(seconds["swap"], seconds["recompute"])
                    rounds.add(f"auto_over_better_{load.name}", seconds["auto"] / better)
                    gain = seconds["recompute"] / seconds["swap"]
                    rounds.add(f"recompute_over_swap_{load.name}", gain)
    finally:
        torch.set_num_threads(threads)
    what = (
        f"numbers: {options.requests} requests of so many tokens, half of them prompt, in a pool "
        f"for {options.pool_percent} % of them, no prefix cache; displaced: room for all and a "
        f"prefix cache, places for half, and every {_URGENT_EVERY} steps an urgent request takes "
        "one; CPU seconds of the process"
    )
    return rounds.report(
        "preempt",
        machine,
        at_most=[(f"auto_over_better_{load.name}", _WITHIN) for load in loads],
        notes=(model.summary, what),
    )


def _add(rounds: Rounds, which: str, outcome: _Outcome) -> None:
    stats = outcome.stats
    figures: dict[str, Number] = {
        "cpu_s": outcome.seconds,
        "copying_percent": 100 * outcome.copying_s / outcome.seconds,
        "preemptions": sum(stats.preemptions.values()),
        "swapped_share": _share(stats),
        "computed_tokens": stats.computed_tokens,
        "swapped_mib": (stats.swapped_out_bytes + stats.swapped_in_bytes) / 2**20,
    }
    for name, value in figures.items():
        rounds.add(f"{name}_{which}", value)


def _share(stats: EngineStats) -> float:
    """Share of the preemptions that were swaps."""
    total = sum(stats.preemptions.values())
    swaps = sum(n for (*_, how), n in stats.preemptions.items() if how is PreemptionMode.SWAP)
    return swaps / total if total else 0.0


def _model(options: PreemptionOptions) -> ServingModel:
    longest = max(options.contexts)
    settings = load_settings(
        {
            "model.path": options.model,
            "model.device": "cpu",
            "model.dtype": "float32",
            "model.max_model_len": longest,
            "engine.max_sequences": options.requests,
            "engine.block_size": _BLOCK_SIZE,
            "engine.threads": options.threads,
            "engine.chunking": "fixed",
            "engine.preemption": "swap",
        }
    )
    try:
        return build_model(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"--contexts {longest}: {error}") from error


def _run(
    model: ServingModel,
    options: PreemptionOptions,
    load: _Load,
    mode: PreemptionChoice,
    number: int,
) -> _Outcome:
    config = _config(model.config, options, load, mode)
    engine, rng = Engine(config, model.new_text_stream), random.Random(number)
    for index in range(options.requests):
        prompt = load.context // 2 + rng.randrange(-4, 5)
        engine.add(_request(f"r{index}", rng, prompt, load.context - prompt, Lane.BATCH))
    cpu, began, steps, copying = time.process_time(), time.perf_counter(), 0, 0.0
    while plan := engine.schedule():
        output = model.runner.run(plan)
        copying += output.swap_s or 0.0
        engine.collect(plan, output)
        now = time.perf_counter()
        engine.observe(plan, now - began)
        began, steps = now, steps + 1
        if load.displaced and steps % _URGENT_EVERY == 0 and engine.has_work:
            name = f"urgent{steps}"
            engine.add(_request(name, rng, _URGENT_PROMPT, _URGENT_TOKENS, Lane.CRITICAL))
    return _Outcome(time.process_time() - cpu, copying, engine.stats())


def _config(
    config: EngineConfig, options: PreemptionOptions, load: _Load, mode: PreemptionChoice
) -> EngineConfig:
    if load.displaced:
        return dataclasses.replace(
            config, max_sequences=options.requests // 2, prefix_cache=True, preemption=mode
        )
    blocks_each = -(-load.context // _BLOCK_SIZE)
    wanted = options.requests * blocks_each * options.pool_percent // 100
    num_blocks = min(config.num_blocks, max(wanted, blocks_each))
    return dataclasses.replace(config, num_blocks=num_blocks, prefix_cache=False, preemption=mode)


def _request(id: str, rng: random.Random, prompt: int, tokens: int, lane: Lane) -> EngineRequest:
    return EngineRequest(
        id=id,
        lane=lane,
        tenant="default",
        prompt_ids=tuple(rng.randrange(3, 1000) for _ in range(prompt)),
        options=SamplingOptions(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        seed=0,
        arrival=0.0,
    )
