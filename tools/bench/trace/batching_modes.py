"""``penstock bench modes``: one engine and one load, under each batching mode in turn.

The modes add one technique after the other: no batching, static batches, continuous batching (Orca:
Yu et al., 2022). Then chunked prefill (Sarathi: Agrawal et al., 2023), the prefix cache, and
speculation.
"""

from __future__ import annotations

import dataclasses
import enum
import pydoc_data.topics
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine_process.model_interface import ServingModel
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.protocol.request import Request
from penstock.shared.settings import load_settings

from ...report import Report
from ...rounds import Machine, Progress, Rounds
from ..options import ModesOptions
from .mode_plot import plot_modes
from .token_times import TokenTimes
from .trace_file import TraceRequest
from .trace_replay import engine_request

__all__ = ["Mode", "bench_modes"]

_OWN_TOKENS = (8, 48)
"""Prompt tokens of a request behind the common prefix: least and most."""


class Mode(enum.StrEnum):
    """The modes, each the one before with one technique more."""

    NONE = "none"
    """One request at a time."""
    STATIC = "static"
    """Batches that start together; the next batch waits until the last sequence has ended."""
    CONTINUOUS = "continuous"
    """A sequence joins as soon as a place is free; a prompt is read in one step."""
    CHUNKED = "chunked"
    """Prompts are read in chunks beside decoding sequences."""
    PREFIX_CACHE = "prefix_cache"
    """Equal prefixes are computed once."""
    SPECULATION = "speculation"
    """Drafts where they are measured to pay."""


@dataclass(slots=True)
class _Steps:
    """Totals over the steps of one run."""

    steps: int = 0
    spans: int = 0
    computed: int = 0
    cached: int = 0

    def add(self, plan: Plan) -> None:
        self.steps += 1
        self.spans += len(plan.spans)
        self.computed += plan.num_tokens


def bench_modes(options: ModesOptions, progress: Progress = lambda *_: None) -> Report:
    """Serve the same requests under each mode, ``rounds`` times in turn, on this CPU.

    Figures per mode: ``output_tokens_per_s``; ``vs_none``, its ratio to no batching within a round;
    ``mean_batch``. ``latency_ms_p50``, ``_p90`` and ``_p99`` count from the start, when all
    requests wait. ``useful_percent`` is the needed tokens (those not cached) over the computed
    ones, ``utilisation_percent`` the occupied places.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigurationError: its context is too short, or the plot cannot be written.
    """
    from penstock.gpu_worker.model.build import build_model

    longest = options.prefix + _OWN_TOKENS[1] + options.tokens
    progress("loading", 0, 0)
    served = build_model(
        load_settings(
            {
                "model.path": options.model,
                "model.device": "cpu",
                "model.dtype": options.dtype,
                "engine.max_sequences": options.slots,
                "engine.threads": options.threads,
            }
        )
    )
    if longest > served.config.max_model_len:
        raise ConfigurationError(
            f"requests have up to {longest} tokens, the model's context "
            f"{served.config.max_model_len}; lower --prefix or --tokens"
        )
    rounds, machine = Rounds(), Machine()
    with calm_collector():
        for mode in (Mode.CONTINUOUS, Mode.SPECULATION):  # warm-up: first calls allocate
            _run(served, _config(served.config, mode), mode, _load(served, options, -1))
        for number in range(options.rounds):
            load = _load(served, options, number)
            for place, mode in enumerate(Mode):
                progress(mode.value, number * len(Mode) + place, options.rounds * len(Mode))
                _measure(served, options, mode, load, rounds)
    for mode in Mode:
        for ratio in rounds.ratios(f"{mode}.output_tokens_per_s", "none.output_tokens_per_s"):
            rounds.add(f"{mode}.vs_none", ratio)
    if options.plot is not None:
        plot_modes(
            {mode.value: rounds.median(f"{mode}.output_tokens_per_s") for mode in Mode},
            {mode.value: rounds.median(f"{mode}.latency_ms_p99") for mode in Mode},
            options.plot,
        )
    notes = (
        served.summary,
        f"{options.requests} requests with {options.prefix} common tokens, {options.slots} places",
    )
    return rounds.report("modes", machine, notes=notes)


def _load(served: ServingModel, options: ModesOptions, round: int) -> Sequence[TraceRequest]:
    """Prompts from Python's documentation: a prefix of the round's own, then a piece for each."""
    draw = random.Random(f"modes {round}")
    topics = pydoc_data.topics.topics
    text = " ".join(topics[name] for name in draw.sample(sorted(topics), 12))
    ids = list(served.encode(Request(id="modes", prompt=text)))
    most = options.prefix + options.requests * _OWN_TOKENS[1]
    ids *= -(-most // len(ids))
    prefix, at, requests = tuple(ids[: options.prefix]), options.prefix, []
    for _ in range(options.requests):
        own = draw.randint(*_OWN_TOKENS)
        output = draw.randint(options.tokens // 8, options.tokens)
        requests.append(TraceRequest(prefix + tuple(ids[at : at + own]), output, 0.0))
        at += own
    return requests


def _config(config: EngineConfig, mode: Mode) -> EngineConfig:
    """The engine's configuration under a mode."""
    order = list(Mode)
    place = order.index(mode)
    changes: dict[str, object] = {}
    if place < order.index(Mode.CHUNKED):
        whole = config.max_model_len + config.max_sequences
        changes |= {"chunking": Chunking.OFF, "max_batch_tokens": whole, "chunk_size": whole}
    if place < order.index(Mode.PREFIX_CACHE):
        changes["prefix_cache"] = False
    if place < order.index(Mode.SPECULATION):
        changes["speculation"] = None
    if mode is Mode.NONE:
        changes["max_sequences"] = 1
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def _measure(
    served: ServingModel,
    options: ModesOptions,
    mode: Mode,
    load: Sequence[TraceRequest],
    rounds: Rounds,
) -> None:
    config = _config(served.config, mode)
    times, steps = _run(served, config, mode, load)
    tokens = sum(len(request.prompt_ids) + request.output_len - 1 for request in load)
    times.summarise(rounds, f"{mode}.")
    rounds.add(f"{mode}.mean_batch", steps.spans / steps.steps)
    rounds.add(f"{mode}.useful_percent", 100 * (tokens - steps.cached) / steps.computed)
    places = 1 if mode is Mode.NONE else options.slots
    rounds.add(f"{mode}.utilisation_percent", 100 * steps.spans / (steps.steps * places))


def _run(
    served: ServingModel, config: EngineConfig, mode: Mode, load: Sequence[TraceRequest]
) -> tuple[TokenTimes, _Steps]:
    """Serve all requests; those of a static batch are added when the batch before has ended."""
    engine = Engine(config, served.new_text_stream)
    times, steps = TokenTimes(load, None), _Steps()
    size = config.max_sequences if mode is Mode.STATIC else len(load)
    requests = [engine_request(served, index, request) for index, request in enumerate(load)]
    times.start()
    for begin in range(0, len(requests), size):
        for request in requests[begin : begin + size]:
            engine.add(dataclasses.replace(request, arrival=time.perf_counter()))
        while plan := engine.schedule():
            steps.add(plan)
            for update in engine.collect(plan, served.runner.run(plan)):
                if update.token_ids:
                    times.add(int(update.id), len(update.token_ids))
    steps.cached = engine.stats().prefix_hit_tokens
    return times, steps
