"""Requests with a common prefix: the prefix cache saves time and changes no token."""

from __future__ import annotations

import dataclasses
import random
import time

import torch

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.stats import EngineStats
from penstock.gpu_worker.engine_process.model_interface import ServingModel
from penstock.gpu_worker.model.build import build_model
from penstock.shared.errors import ConfigurationError, IntegrityError
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane
from penstock.shared.settings import load_settings

from ...report import Report
from ...rounds import Machine, Progress, Rounds
from ..options import PrefixOptions

__all__ = ["bench_prefix"]

_Outputs = dict[str, list[int]]


def bench_prefix(options: PrefixOptions, progress: Progress = lambda *_: None) -> Report:
    """The same requests with the cache and without, in turn, ``rounds`` times, on this CPU.

    All requests wait from the start and decode greedily. Every round has a new prefix and an
    empty cache, so its first request computes the prefix.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigurationError: its context is too short.
        IntegrityError: the cache changed an output.
    """
    threads = torch.get_num_threads()
    progress("loading", 0, 0)
    machine, rounds = Machine(), Rounds()
    try:
        model = _model(options)
        with calm_collector():
            _serve(model, options, -1, cached=True)  # warm-up: first calls allocate
            for number in range(options.rounds):
                _measure(rounds, model, options, number)
                progress("prefixes", number + 1, options.rounds)
    finally:
        torch.set_num_threads(threads)
    what = (
        f"{options.requests} requests of {options.shared} shared and {options.own} own prompt "
        f"tokens and {options.tokens} of output; CPU seconds of the process; outputs are equal"
    )
    return rounds.report("prefix", machine, notes=(model.summary, what))


def _measure(rounds: Rounds, model: ServingModel, options: PrefixOptions, number: int) -> None:
    seconds: dict[bool, float] = {}
    outputs: dict[bool, _Outputs] = {}
    for cached in (True, False) if number % 2 else (False, True):
        seconds[cached], stats, outputs[cached] = _serve(model, options, number, cached=cached)
        name = "cached" if cached else "uncached"
        rounds.add(f"cpu_s_{name}", seconds[cached])
        rounds.add(f"computed_tokens_{name}", stats.computed_tokens)
        if cached:
            rounds.add("hit_rate", stats.prefix_hit_tokens / stats.prefix_query_tokens)
    if outputs[True] != outputs[False]:
        changed = sorted(id for id in outputs[True] if outputs[True][id] != outputs[False].get(id))
        raise IntegrityError(f"the prefix cache changed the outputs of {', '.join(changed)}")
    rounds.add("speedup", seconds[False] / seconds[True])


def _model(options: PrefixOptions) -> ServingModel:
    context = options.shared + options.own + options.tokens
    settings = load_settings(
        {
            "model.path": options.model,
            "model.device": "cpu",
            "model.dtype": "float32",
            "model.max_model_len": context,
            "engine.max_sequences": options.slots,
            "engine.threads": options.threads,
            "engine.chunking": "fixed",
        }
    )
    try:
        return build_model(settings)
    except ConfigurationError as error:
        raise ConfigurationError(f"prompt and output of {context} tokens: {error}") from error


def _serve(
    model: ServingModel, options: PrefixOptions, number: int, *, cached: bool
) -> tuple[float, EngineStats, _Outputs]:
    """CPU seconds, the engine's counts and the outputs of one run over the requests."""
    rng = random.Random(number)
    vocab_size = model.config.vocab_size
    assert vocab_size is not None
    shared = [rng.randrange(vocab_size) for _ in range(options.shared)]
    config = dataclasses.replace(model.config, prefix_cache=cached)
    engine = Engine(config, model.new_text_stream)
    outputs: _Outputs = {}
    for index in range(options.requests):
        own = [rng.randrange(vocab_size) for _ in range(options.own)]
        request = EngineRequest(
            id=f"r{index}",
            lane=Lane.NORMAL,
            tenant="bench",
            prompt_ids=(*shared, *own),
            options=SamplingOptions(temperature=0.0, max_tokens=options.tokens, ignore_eos=True),
            seed=0,
            arrival=float(index),
        )
        outputs[request.id] = []
        refusal = engine.add(request)
        assert refusal is None, refusal
    began = time.process_time()
    while plan := engine.schedule():
        for update in engine.collect(plan, model.runner.run(plan)):
            outputs[update.id] += update.token_ids
    return time.process_time() - began, engine.stats(), outputs
