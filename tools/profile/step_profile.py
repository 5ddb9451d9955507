"""Runs the engine's loop, times its parts, and compares steps with the machine's floors."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping, Sequence
from typing import cast

import torch

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.text_stream import TextStream
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine_process.model_interface import ServingModel
from penstock.gpu_worker.messages import StepReport, frame, packed_updates
from penstock.gpu_worker.model.build import build_model
from penstock.gpu_worker.model.loading.loaded_model import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.settings import Settings, load_settings

from ..report import Progress, Report
from ..rounds import Machine, Rounds
from .chrome_trace import write_chrome_trace
from .floors import measure_rates
from .options import ProfileOptions
from .part_timer import PartTimer, TimedModel, TimedText

__all__ = ["PARTS", "profile_steps"]

PARTS = (
    "schedule", "pack", "linears", "attention", "other_ops", "sampling", "collect", "detokenise",
    "publish",
)  # fmt: skip
"""Of a step, in their order."""

_ADVICE = {
    "weight bandwidth": "each step reads all weights: let more sequences share it "
    "(engine.max_sequences), or make them smaller (model.quantization int8 or int4, or model.dtype "
    "bfloat16)",
    "KV bandwidth": "long contexts are read at every step: model.kv_cache_dtype int8, model.dtype "
    "bfloat16, or a model with fewer KV heads",
    "FLOPs": "arithmetic: more threads (engine.threads), or where the CPU multiplies in them "
    "model.dtype bfloat16 and model.quantization int8",
    "host": "steps are short against their administration: more sequences per step "
    "(engine.max_sequences), or a larger model costs no more host time",
}

_BLOCK = 16

_Step = tuple[float, int, dict[str, float]]


def profile_steps(options: ProfileOptions, progress: Progress) -> Report:
    """Serve ``options.sequences`` equal requests and report the decode steps in which all run.

    Raises:
        ConfigurationError: the requests do not fit the model.
        ModelError: the model cannot be loaded.
    """
    progress("loading", 0, 0)
    machine = Machine()
    served = build_model(_settings(options))
    runner = cast(ModelRunner, served.runner)
    length = options.prompt + options.tokens
    if length > served.config.max_model_len:
        raise ConfigurationError(
            f"--prompt and --tokens: {length} tokens, the model's context is "
            f"{served.config.max_model_len}"
        )
    loaded = runner.loaded
    rates = measure_rates(loaded.dtype)
    steps = _run(options, served, runner, progress)
    decode = [step for step in steps if step[1] == options.sequences] or steps
    parts = _means(decode)
    step_s = sum(parts.values())
    rounds = Rounds()
    rounds.add("step_ms", 1e3 * step_s)
    rounds.add("steps", len(decode))
    for name in PARTS:
        rounds.add(f"{name}_ms", 1e3 * parts[name])
        rounds.add(f"{name}_percent", 100 * parts[name] / step_s)
    rounds.add("accounted_percent", 100 * step_s / _wall(decode))
    weights = loaded.multiplied_weights
    context = options.prompt + options.tokens / 2
    # Whole groups of tokens, as the library stores them.
    token_bytes = loaded.geometry.block_bytes(_BLOCK, loaded.dtype) / _BLOCK
    kv_bytes = options.sequences * context * token_bytes
    floors = {
        "weight bandwidth": _weight_bytes(loaded, weights) / rates.bytes_per_s,
        "KV bandwidth": kv_bytes / rates.bytes_per_s,
        "FLOPs": 2 * weights * options.sequences / rates.flops_per_s,
    }
    computing = sum(parts[name] for name in ("linears", "attention", "other_ops"))
    for name, seconds in floors.items():
        rounds.add(f"floor_{name.lower().replace(' ', '_')}_ms", 1e3 * seconds)
        rounds.add(f"floor_{name.lower().replace(' ', '_')}_percent", 100 * seconds / step_s)
    rounds.add("memory_gb_per_s", rates.bytes_per_s / 1e9)
    rounds.add("gflops_per_s", rates.flops_per_s / 1e9)
    floors["host"] = step_s - computing
    bound = max(floors, key=lambda name: floors[name])
    if options.trace is not None:
        write_chrome_trace(options.trace, [(at, n, _only_parts(found)) for at, n, found in steps])
    return rounds.report(
        "profile",
        machine,
        at_least=(("accounted_percent", 95),),
        notes=(
            served.summary,
            _load_of(options),
            f"bound: {bound}; {_ADVICE[bound]}",
            *_screen_note(loaded),
            "Redis and arrivals are outside: the engine process alone, all requests at once",
        ),
    )


def _weight_bytes(loaded: LoadedModel, weights: int) -> int:
    """What a step reads of the linear layers' weights."""
    if loaded.native is None:
        return weights * loaded.dtype.itemsize
    return loaded.native.program.weight_bytes


def _screen_note(loaded: LoadedModel) -> tuple[str, ...]:
    if loaded.native is None or not loaded.native.program.has_screen:
        return ()
    return ("floors are of steps that compute all logits; these find the largest by a screen",)


def _load_of(options: ProfileOptions) -> str:
    lengths = f"{options.prompt} + {options.tokens} tokens each"
    threads = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{options.sequences} sequences, {lengths}, {threads}"


def _settings(options: ProfileOptions) -> Settings:
    return load_settings(
        {
            "model.path": options.model,
            "model.device": "cpu",
            "model.dtype": options.dtype,
            "model.quantization": options.quantization,
            "model.native": options.native,
            "engine.max_sequences": options.sequences,
            "engine.threads": options.threads,
            "engine.prefix_cache": False,
            "speculation.source": "off",
        }
    )


def _run(
    options: ProfileOptions, served: ServingModel, runner: ModelRunner, progress: Progress
) -> list[_Step]:
    timer = PartTimer()
    model = TimedModel(runner.loaded, timer)
    runner.loaded = model  # type: ignore[assignment]

    def timed_text(prompt_ids: tuple[int, ...]) -> TextStream:
        return TimedText(served.new_text_stream(prompt_ids), timer)

    engine = Engine(served.config, timed_text)
    for request in _requests(options, served):
        engine.add(request)
    steps: list[_Step] = []
    for number in itertools.count():
        progress("steps", number, options.tokens)
        began = time.perf_counter()
        with timer.part("schedule"):
            plan = engine.schedule()
        if plan is None:
            return steps
        run_began = time.perf_counter()
        output = runner.run(plan)
        run_ended = time.perf_counter()
        timer.add("pack", model.began - run_began)
        timer.add("sampling", run_ended - model.ended)
        detokenised = timer.seconds.get("detokenise", 0.0)
        with timer.part("collect"):
            updates = engine.collect(plan, output)
        timer.add("collect", detokenised - timer.seconds.get("detokenise", 0.0))
        with timer.part("publish"):
            frame(StepReport(packed_updates(updates), engine.load()))
        ended = time.perf_counter()
        taken = timer.take()
        parts = {name: taken.get(name, 0.0) for name in PARTS}
        steps.append((began, plan.num_tokens, {**parts, "wall": ended - began}))
    raise AssertionError("steps end")


def _requests(options: ProfileOptions, served: ServingModel) -> list[EngineRequest]:
    rng, words = random.Random(0), served.config.vocab_size or 256
    sampling = SamplingOptions(max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
    found = []
    for index in range(options.sequences):
        prompt = tuple(rng.randrange(1, words) for _ in range(options.prompt))
        asked = Request(id=str(index), prompt=prompt, options=sampling)
        found.append(
            EngineRequest(
                id=asked.id,
                lane=asked.lane,
                tenant=asked.tenant,
                prompt_ids=prompt,
                options=asked.options,
                seed=asked.seed,
                arrival=time.perf_counter(),
            )
        )
    return found


def _means(steps: Sequence[_Step]) -> Mapping[str, float]:
    return {name: sum(parts[name] for _, _, parts in steps) / len(steps) for name in PARTS}


def _only_parts(found: Mapping[str, float]) -> Mapping[str, float]:
    return {name: found[name] for name in PARTS}


def _wall(steps: Sequence[_Step]) -> float:
    return sum(parts["wall"] for _, _, parts in steps) / len(steps)
