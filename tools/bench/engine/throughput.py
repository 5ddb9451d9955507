"""The engine with a real model: against transformers, and with Redis against without."""

from __future__ import annotations

import asyncio
import random

import torch

from penstock.shared.local.cores import usable_cores
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.settings import load_settings

from ...report import Report
from ...rounds import Machine, Progress, Rounds, percentile
from ..options import EngineOptions
from ..queue.redis_cost import measure_redis_cost
from .generation import EngineSide, TransformersSide
from .traces import Trace, mixed_trace, uniform_trace

__all__ = ["bench_engine"]

_PROMPT = 32


def bench_engine(options: EngineOptions, progress: Progress = lambda *_: None) -> Report:
    """Measure tokens per second in float32 on the CPU, and the share that Redis costs.

    Raises:
        ModelError: the model cannot be loaded.
        RedisUnavailable: no server can be started.
    """
    threads = torch.get_num_threads()
    try:
        return asyncio.run(_bench(options, progress))
    finally:
        torch.set_num_threads(threads)


async def _bench(options: EngineOptions, progress: Progress) -> Report:
    settings = load_settings(
        {
            "model.path": options.model,
            "model.device": "cpu",
            "model.dtype": "float32",
            "queue.model": "bench",
            "engine.max_sequences": max(options.slots, *options.batches),
            "engine.threads": options.threads,
            # Prompts are random, but prefixes kept from the previous round would distort the next.
            "engine.prefix_cache": False,
            # Random prompts tell nothing about drafts; `penstock bench spec` measures those.
            "speculation.source": "off",
            "worker.metrics_port": "off",
            "worker.log_level": "error",
        }
    )
    progress("loading", 0, 0)
    ours = EngineSide(settings)
    choice = {options.threads} if options.threads else {1, usable_cores()}
    theirs = TransformersSide(options.model, sorted(choice))
    rounds, rng = Rounds(), random.Random(0)
    # The effect is a few percent on an unsteady machine, so it takes many pairs of turns.
    turns = 8 * options.rounds
    stages, done = options.rounds * (len(options.batches) + 1) + turns, 0
    machine = Machine()
    with calm_collector():
        for batch in options.batches:
            shape = {"count": batch, "prompt": _PROMPT, "tokens": options.tokens}
            for _ in range(options.rounds):
                trace = uniform_trace(rng, theirs.vocab_size, **shape)
                _compare(ours, theirs, rounds, trace, batch, f"{batch}")
                done += 1
                progress(f"batch of {batch}", done, stages)
        for _ in range(options.rounds):
            trace = _mixed(options, rng, theirs)
            _compare(ours, theirs, rounds, trace, options.slots, "mixed")
            done += 1
            progress("mixed lengths", done, stages)

        def pair_done() -> None:
            nonlocal done
            done += 1
            progress("through Redis", done, stages)

        await measure_redis_cost(
            settings,
            rounds,
            trace=_mixed(options, rng, theirs),
            slots=options.slots,
            threads=ours.threads,
            turns=turns,
            progress=pair_done,
        )
    notes = (
        ours.summary,
        f"{_threads(ours.threads)} for the engine, {_threads(theirs.threads)} for transformers"
        + ("" if options.threads else ", each the faster of 1 and all cores"),
    )
    return rounds.report(
        "engine",
        machine,
        at_most=[("redis_cost_percent", 3)],
        at_least=[("speedup_mixed", 2)],
        notes=notes,
    )


def _threads(count: int) -> str:
    return f"{count} CPU thread{'s' if count > 1 else ''}"


def _mixed(options: EngineOptions, rng: random.Random, side: TransformersSide) -> Trace:
    return mixed_trace(rng, side.vocab_size, count=options.requests, tokens=options.tokens)


def _compare(
    ours: EngineSide, theirs: TransformersSide, rounds: Rounds, trace: Trace, slots: int, name: str
) -> None:
    """The same trace by both, in one round."""
    tokens = sum(item.max_tokens for item in trace)
    seconds, steps = ours.run(trace, slots)
    their_seconds = theirs.run(trace, slots)
    rounds.add(f"tokens_per_s_{name}", tokens / seconds)
    rounds.add(f"step_ms_{name}", 1e3 * percentile(steps, 50))
    rounds.add(f"transformers_tokens_per_s_{name}", tokens / their_seconds)
    rounds.add(f"speedup_{name}", their_seconds / seconds)
