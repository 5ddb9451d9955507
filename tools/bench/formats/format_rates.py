"""Tokens per second of one checkpoint in several number formats, at fixed batch sizes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import cast

import torch

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.model.build import build_model
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.settings import load_settings

from ...profile.floors import measure_rates
from ...report import Report
from ...rounds import Machine, Progress, Rounds
from ..engine.traces import requests_of, uniform_trace
from ..options import EngineOptions
from ..speculation.fixed_batch import Side, alternate
from .format_exactness import format_exactness
from .number_format import FULL, NumberFormat

__all__ = ["bench_formats"]

_PROMPT = 32
_WARM_UP_TOKENS = 8


def bench_formats(options: EngineOptions, progress: Progress = lambda *_: None) -> Report:
    """Decode in bfloat16 and in each of ``options.formats``, some steps in turn.

    A round is ``tokens`` output tokens of each sequence; prompts are read before it begins.

    Raises:
        ConfigurationError: a sequence is longer than the model's context.
        ModelError: the model cannot be loaded in one of the formats.
    """
    threads = torch.get_num_threads()
    progress("loading", 0, 0)
    machine, rounds = Machine(), Rounds()
    try:
        compared = (NumberFormat(FULL, options.model), *options.formats)
        sides = {each.name: _Format(options, each) for each in compared}
        stages, done = options.rounds * len(options.batches), 0
        with calm_collector():
            for _ in range(options.rounds):
                bytes_per_s = measure_rates(torch.bfloat16).bytes_per_s
                rounds.add("memory_gb_per_s", bytes_per_s / 1e9)
                for batch in options.batches:
                    _measure(options, sides, batch, rounds, bytes_per_s)
                    done += 1
                    progress(f"batch of {batch}", done, stages)
        count = sides[FULL].num_weights
        for name, side in sides.items():
            rounds.add(f"weights_mb_{name}", side.weight_bytes / 1e6)
            rounds.add(f"bytes_per_weight_{name}", side.weight_bytes / count)
        for each in options.formats if options.exactness else ():
            for figure, value in format_exactness(options.model, each, progress).items():
                rounds.add(f"{figure}_{each.name}", value)
        notes = (
            *(side.summary for side in sides.values()),
            f"{torch.get_num_threads()} CPU threads",
        )
        return rounds.report("engine, number formats", machine, notes=notes)
    finally:
        torch.set_num_threads(threads)


def _measure(
    options: EngineOptions,
    sides: dict[str, _Format],
    batch: int,
    rounds: Rounds,
    bytes_per_s: float,
) -> None:
    for side in sides.values():
        side.begin(batch, options.tokens)
    alternate([side.side for side in sides.values()], batch * options.tokens)
    full = sides[FULL].side.rate
    for name, side in sides.items():
        rounds.add(f"tokens_per_s_{name}_{batch}", side.side.rate)
        if name != FULL:
            rounds.add(f"speedup_{name}_{batch}", side.side.rate / full)
        floor_s = side.weight_bytes / bytes_per_s
        rounds.add(f"read_floor_percent_{name}_{batch}", 100 * floor_s * side.side.rate / batch)


class _Format:
    """The model in one number format, with an engine and KV of its own."""

    def __init__(self, options: EngineOptions, number_format: NumberFormat) -> None:
        served = build_model(
            load_settings(
                {
                    "model.path": number_format.model,
                    "model.device": "cpu",
                    "model.dtype": FULL,
                    "model.quantization": number_format.quantization,
                    "queue.model": "bench",
                    "engine.max_sequences": max(options.batches),
                    "engine.threads": options.threads or os.cpu_count(),
                    "engine.prefix_cache": False,
                    "speculation.source": "off",
                }
            )
        )
        self._options, self._served = options, served
        self._rng = random.Random(0)
        runner = cast(ModelRunner, served.runner)
        self._loaded = runner.loaded
        self.summary = served.summary
        self.side = Side(Engine(served.config, served.new_text_stream), runner, cpu_time=False)

    @property
    def num_weights(self) -> int:
        """What :attr:`weight_bytes` are the bytes of."""
        if self._loaded.native is not None:
            return self._loaded.native.program.num_weights
        assert self._loaded.model is not None
        return sum(tensor.numel() for tensor in self._loaded.model.state_dict().values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads; of all parameters where torch computes."""
        if self._loaded.native is not None:
            return self._loaded.native.program.weight_bytes
        assert self._loaded.model is not None
        state = self._loaded.model.state_dict().values()
        return sum(tensor.nbytes for tensor in state)

    def begin(self, batch: int, tokens: int) -> None:
        """Let ``batch`` new sequences read their prompts."""
        self.side.turn_to(self._requests(tokens), batch)
        self.side.begin()
        while self.side.tokens < batch * _WARM_UP_TOKENS:
            self.side.advance()

    def _requests(self, tokens: int) -> Iterator[EngineRequest]:
        # Twice the tokens of a round: no sequence ends and is replaced while it is measured.
        length = 2 * (tokens + _WARM_UP_TOKENS)
        limit = self._served.config.max_model_len
        if _PROMPT + length > limit:
            raise ConfigurationError(
                f"--tokens: got {tokens}, sequences of {_PROMPT + length} tokens; "
                f"the model's context is {limit}"
            )
        words = self._served.config.vocab_size or 256
        while True:
            shape = {"count": 1, "prompt": _PROMPT, "tokens": length}
            trace = uniform_trace(self._rng, words, **shape)
            name = f"{time.monotonic_ns()}"
            for request, item in zip(requests_of(trace, name), trace, strict=True):
                yield EngineRequest(
                    id=request.id,
                    lane=request.lane,
                    tenant=request.tenant,
                    prompt_ids=item.prompt_ids,
                    options=request.options,
                    seed=request.seed,
                    arrival=time.monotonic(),
                )
