"""Gaps between tokens of streams while a long prompt is read: by adaptive chunks, and at once."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine_process.model_interface import ServingModel
from penstock.gpu_worker.model.build import build_model
from penstock.gpu_worker.model.loading.checkpoint import find_checkpoint
from penstock.shared.errors import ConfigurationError
from penstock.shared.local.gc_tuning import calm_collector
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane
from penstock.shared.settings import load_settings

from ...report import Report
from ...rounds import Machine, Progress, Rounds, percentile
from ..options import ChunkingOptions
from .token_gap_plot import plot_gaps

__all__ = ["bench_chunking"]

_PROMPT = 32
_WARM_UP_STEPS = 40
_LEAST_STEPS = 64
"""Least number of steps measured after the long prompt's arrival. With 16 streams, the one long gap
of each is more than 1 % of all gaps."""

_AUTO_TARGET = 2.5
"""``auto``'s target in multiples of a decode step; a lower target leaves the prompt no time."""

_WITHIN = 2.0
"""Limit of the 99th percentile gap over the target."""

_MODES = {"adaptive": Chunking.ADAPTIVE, "unchunked": Chunking.OFF}


@dataclass(frozen=True, slots=True)
class Reading:
    """The run from the arrival of the long prompt on.

    Attributes:
        ends_s: when each step ended, from that arrival on.
        ttft_s: when the long prompt's first token came.
        prompt_steps: number of steps that read the prompt.
    """

    ends_s: list[float]
    ttft_s: float
    prompt_steps: int

    @property
    def gaps_s(self) -> list[float]:
        """Between the tokens of each stream: every step gives one to each."""
        return [end - begin for begin, end in zip([0.0, *self.ends_s], self.ends_s, strict=False)]


def bench_chunking(options: ChunkingOptions, progress: Progress = lambda *_: None) -> Report:
    """Both ways in turn, ``rounds`` times, with a real model on this CPU in this process.

    Raises:
        ModelError: the model cannot be loaded.
        ConfigurationError: its context does not hold the prompt, or the plot cannot be drawn.
    """
    threads = torch.get_num_threads()
    progress("loading", 0, 0)
    machine, rounds = Machine(), Rounds()
    readings: dict[str, Reading] = {}
    try:
        with _long_enough(options) as path:
            model = _load(options, path)
            target_ms = options.target_itl_ms or _AUTO_TARGET * _decode_ms(model, options)
            with calm_collector():
                for number in range(options.rounds):
                    for name, chunking in _MODES.items():
                        reading = _read(model, options, chunking, target_ms / 1000, number)
                        _add(rounds, name, reading, target_ms)
                        readings[name] = reading
                        progress("long prompts", 2 * number + len(readings), 2 * options.rounds)
    finally:
        torch.set_num_threads(threads)
    rounds.add("target_itl_ms", target_ms)
    if options.plot is not None:
        gaps = {name: (reading.ends_s, reading.gaps_s) for name, reading in readings.items()}
        plot_gaps(gaps, target_ms / 1000, options.plot)
    what = (
        f"{options.streams} streams decode; gaps from the arrival of a prompt of {options.prompt} "
        f"tokens until it is read, and of {_LEAST_STEPS} steps at least"
    )
    return rounds.report(
        "chunking",
        machine,
        at_most=[("itl_p99_over_target_adaptive", _WITHIN)],
        at_least=[("itl_p99_over_target_unchunked", _WITHIN)],
        notes=(model.summary, what),
    )


def _add(rounds: Rounds, name: str, reading: Reading, target_ms: float) -> None:
    p99_ms = 1e3 * percentile(reading.gaps_s, 99)
    rounds.add(f"itl_p99_ms_{name}", p99_ms)
    rounds.add(f"itl_p50_ms_{name}", 1e3 * percentile(reading.gaps_s, 50))
    rounds.add(f"itl_p99_over_target_{name}", p99_ms / target_ms)
    rounds.add(f"prompt_ttft_ms_{name}", 1e3 * reading.ttft_s)
    rounds.add(f"prompt_steps_{name}", reading.prompt_steps)


@contextlib.contextmanager
def _long_enough(options: ChunkingOptions) -> Iterator[Path]:
    """The checkpoint; the demo model's own with a longer context than it was trained for.

    Its positions are rotations, so no table ends. Its output beyond its training makes no sense,
    but takes the same time.
    """
    source = find_checkpoint(options.model)
    if options.model != "demo":
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        path = Path(folder) / "demo"
        shutil.copytree(source, path)
        config = json.loads((path / "config.json").read_text("utf-8"))
        longest = max(config["max_position_embeddings"], _longest(options))
        config["max_position_embeddings"] = longest
        (path / "config.json").write_text(json.dumps(config), "utf-8")
        yield path


def _longest(options: ChunkingOptions) -> int:
    """Tokens of the longest sequence: the long prompt, or a stream that runs while it is read."""
    return _PROMPT + 2 * options.prompt + 16 * _LEAST_STEPS


def _load(options: ChunkingOptions, path: Path) -> ServingModel:
    block_size, longest = 16, _longest(options)
    settings = load_settings(
        {
            "model.path": str(path),
            "model.device": "cpu",
            "model.dtype": "float32",
            "model.max_model_len": longest,
            "engine.max_sequences": options.streams + 1,
            # The largest forward that either way makes.
            "engine.max_batch_tokens": longest + options.streams + 1,
            "engine.block_size": block_size,
            "engine.threads": options.threads,
            "engine.prefix_cache": False,
        }
    )
    try:
        return build_model(settings)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"--prompt {options.prompt} needs a context of {longest} tokens: {error}"
        ) from error


def _decode_ms(model: ServingModel, options: ChunkingOptions) -> float:
    """Median milliseconds of a step in which all streams decode."""
    engine = _streaming(model, options, Chunking.OFF, 1.0, "probe")
    return 1e3 * statistics.median(_step(engine, model)[0] for _ in range(_WARM_UP_STEPS))


def _read(
    model: ServingModel, options: ChunkingOptions, chunking: Chunking, target_s: float, number: int
) -> Reading:
    engine = _streaming(model, options, chunking, target_s, "stream")
    for _ in range(_WARM_UP_STEPS):
        _step(engine, model)
    rng = random.Random(number)
    engine.add(_request("long", rng, options.prompt, 1))
    ends: list[float] = []
    now, first, prompt_steps = 0.0, math.nan, 0
    while math.isnan(first) or len(ends) < _LEAST_STEPS:
        prompt_steps += math.isnan(first)
        seconds, ids = _step(engine, model)
        now += seconds
        ends.append(now)
        if "long" in ids:
            first = now
    return Reading(ends, first, prompt_steps)


def _streaming(
    model: ServingModel, options: ChunkingOptions, chunking: Chunking, target_s: float, name: str
) -> Engine:
    """An engine in which each stream decodes."""
    config = dataclasses.replace(model.config, chunking=chunking, target_itl_s=target_s)
    engine, rng = Engine(config, model.new_text_stream), random.Random(7)
    for index in range(options.streams):
        engine.add(_request(f"{name}{index}", rng, _PROMPT, config.max_model_len))
    while engine.stats().waiting[Lane.NORMAL] or engine.stats().output_tokens < options.streams:
        _step(engine, model)
    return engine


def _step(engine: Engine, model: ServingModel) -> tuple[float, set[str]]:
    """Run a step as the worker's loop does; returns its seconds and the ids with a new token."""
    began = time.perf_counter()
    plan = engine.schedule()
    assert plan is not None
    updates = engine.collect(plan, model.runner.run(plan))
    seconds = time.perf_counter() - began
    engine.observe(plan, seconds)
    return seconds, {update.id for update in updates}


def _request(id: str, rng: random.Random, prompt: int, tokens: int) -> EngineRequest:
    return EngineRequest(
        id=id,
        lane=Lane.NORMAL,
        tenant="default",
        prompt_ids=tuple(rng.randrange(3, 1000) for _ in range(prompt)),
        options=SamplingOptions(max_tokens=tokens, temperature=0.0, ignore_eos=True),
        seed=0,
        arrival=0.0,
    )
