"""Swap against recompute under KV pressure, and whether ``auto`` finds the better one."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Sequence

import torch

from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol import Lane, SamplingOptions
from penstock.shared.report import Number, Report
from penstock.shared.settings import load_settings

from ..engine.config import EngineConfig, PreemptionChoice
from ..engine.engine import Engine
from ..engine.requests import EngineRequest
from ..engine.stats import EngineStats, PreemptionMode
from ..garbage import calm_collector
from ..model.serving import build_model
from ..serving import ServingModel
from .options import PreemptionOptions
from .rounds import Machine, Progress, Rounds

__all__ = ["bench_preemption"]

_BLOCK_SIZE = 16
_WITHIN = 1.1
"""``auto`` may take this many times what the better of the two takes."""

_MODES: tuple[PreemptionChoice, ...] = ("swap", "recompute", "auto")


def bench_preemption(options: PreemptionOptions, progress: Progress = lambda *_: None) -> Report:
    """All three in turn, ``rounds`` times for each context length, with a real model on this CPU.

    Half of a context is prompt, half is output, and the pool holds ``pool_percent`` of what all
    requests will need: so those that run outgrow it, and are preempted with contexts of every
    length. CPU time of the process, as on a busy machine the clock would tell of others.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigurationError: its context is too short.
    """
    threads = torch.get_num_threads()
    progress("loading", 0, 0)
    machine, rounds = Machine(), Rounds()
    total, done = len(options.contexts) * options.rounds * len(_MODES), 0
    try:
        model = _load(options)
        with calm_collector():
            for context in options.contexts:
                _run(model, options, context, "swap", -1)  # what is set up at a first call is
                for number in range(options.rounds):
                    # Each begins in turn, so that none has what another has left in the caches.
                    first = number % len(_MODES)
                    seconds = {}
                    for mode in (*_MODES[first:], *_MODES[:first]):
                        seconds[mode], stats = _run(model, options, context, mode, number)
                        _add(rounds, mode, context, seconds[mode], stats)
                        done += 1
                        progress(f"{mode}, contexts of {context}", done, total)
                    better = min(seconds["swap"], seconds["recompute"])
                    rounds.add(f"auto_over_better_{context}", seconds["auto"] / better)
                    gain = seconds["recompute"] / seconds["swap"]
                    rounds.add(f"recompute_over_swap_{context}", gain)
    finally:
        torch.set_num_threads(threads)
    what = (
        f"{options.requests} requests, half of each context prompt and half output, in a pool for "
        f"{options.pool_percent} % of them; CPU seconds of the process"
    )
    return rounds.report(
        "preempt",
        machine,
        at_most=[(f"auto_over_better_{context}", _WITHIN) for context in options.contexts],
        notes=(model.summary, what),
    )


def _add(rounds: Rounds, mode: str, context: int, seconds: float, stats: EngineStats) -> None:
    figures: dict[str, Number] = {
        "cpu_s": seconds,
        "preemptions": sum(stats.preemptions.values()),
        "swapped_share": _share(stats),
        "computed_tokens": stats.computed_tokens,
        "swapped_mib": (stats.swapped_out_bytes + stats.swapped_in_bytes) / 2**20,
    }
    for name, value in figures.items():
        rounds.add(f"{name}_{mode}_{context}", value)


def _share(stats: EngineStats) -> float:
    """Of the preemptions, those by swap."""
    total = sum(stats.preemptions.values())
    swaps = sum(n for (*_, how), n in stats.preemptions.items() if how is PreemptionMode.SWAP)
    return swaps / total if total else 0.0


def _load(options: PreemptionOptions) -> ServingModel:
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
            "engine.prefix_cache": False,
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
    context: int,
    mode: PreemptionChoice,
    number: int,
) -> tuple[float, EngineStats]:
    """CPU seconds that all requests take."""
    config = _squeezed(model.config, options, context, mode)
    engine, rng = Engine(config, model.new_text_stream), random.Random(number)
    prompts: Sequence[tuple[int, ...]] = [
        tuple(rng.randrange(3, 1000) for _ in range(context // 2 + rng.randrange(-4, 5)))
        for _ in range(options.requests)
    ]
    for index, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(
                id=f"r{index}",
                lane=Lane.NORMAL,
                tenant="default",
                prompt_ids=prompt,
                options=SamplingOptions(
                    max_tokens=context - len(prompt), temperature=0.0, ignore_eos=True
                ),
                seed=0,
                arrival=0.0,
            )
        )
    cpu = time.process_time()
    began = time.perf_counter()
    while plan := engine.schedule():
        engine.collect(plan, model.runner.run(plan))
        now = time.perf_counter()
        engine.observe(plan, now - began)
        began = now
    return time.process_time() - cpu, engine.stats()


def _squeezed(
    config: EngineConfig, options: PreemptionOptions, context: int, mode: PreemptionChoice
) -> EngineConfig:
    blocks_each = -(-context // _BLOCK_SIZE)
    wanted = options.requests * blocks_each * options.pool_percent // 100
    return dataclasses.replace(
        config, num_blocks=min(config.num_blocks, max(wanted, blocks_each)), preemption=mode
    )
