"""``penstock bench trace``: replays a trace to a worker behind Redis, or to the engine alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine_process.model_interface import ServingModel
from penstock.producer import Producer
from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.request import Request
from penstock.shared.settings import Settings, load_settings

from ...report import Report
from ...rounds import Machine, Progress, Rounds
from ..engine.worker_process import worker_process
from ..options import TraceOptions
from .token_times import TokenTimes
from .trace_file import TraceRequest, read_trace_file

__all__ = ["bench_trace", "engine_request"]

_WARM_UP = 4
"""Uncounted requests before the first round: first calls allocate, load scripts and connect."""
_WARM_UP_TOKENS = 8
_TIMEOUT_S = 600.0


def bench_trace(options: TraceOptions, progress: Progress = lambda *_: None) -> Report:
    """Replay a trace ``rounds`` times, past EOS, with exact output lengths.

    Raises:
        ConfigurationError: the trace cannot be read, or does not fit the model.
        ModelError: the model cannot be loaded.
        RedisUnavailable: no server can be started.
        PenstockError: a request did not complete.
    """
    requests = [
        replace(request, temperature=options.temperature, top_p=options.top_p)
        for request in read_trace_file(options.trace, options.limit)
    ]
    settings = trace_settings(options)
    rounds, machine = Rounds(), Machine()
    progress("loading", 0, 0)
    if options.in_process:
        notes = _in_process(options, settings, requests, rounds, progress)
    else:
        notes = asyncio.run(_through_redis(options, settings, requests, rounds, progress))
    tokens = sum(request.output_len for request in requests)
    rate = f"{options.rate:g} requests/s" if options.rate else "all at once"
    drawn = f"temperature {options.temperature:g}, top-p {options.top_p:g}"
    how = drawn if options.temperature else "greedy"
    notes = (*notes, f"{len(requests)} requests, {tokens} output tokens, {rate}, {how}")
    return rounds.report("trace", machine, notes=notes)


def trace_settings(options: TraceOptions) -> Settings:
    """The worker's settings for a replay: no prefix is reused, and no draft is made."""
    return load_settings(
        {
            "model.path": options.model,
            "model.device": "cpu",
            "model.dtype": options.dtype,
            "queue.model": "bench",
            **_in_profile(options),
            "engine.threads": options.threads,
            "engine.prefix_cache": False,
            "speculation.source": "off",
            "worker.metrics_port": "off",
            "worker.log_level": "error",
            **({"engine.kv_memory": options.kv_memory} if options.kv_memory else {}),
        }
    )


def _in_profile(options: TraceOptions) -> dict[str, object]:
    """What a profile decides, unless there is none."""
    given: dict[str, object] = {"worker.profile": options.profile}
    if options.profile is None:
        given["engine.max_sequences"] = options.slots
    if options.profile is None or options.quantization != "auto":
        given["model.quantization"] = options.quantization
    return given


def warm_up(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """A few short requests of the trace, all at once."""
    return [
        replace(request, output_len=min(_WARM_UP_TOKENS, request.output_len), arrival_units=0.0)
        for request in requests[:_WARM_UP]
    ]


def _in_process(
    options: TraceOptions,
    settings: Settings,
    requests: Sequence[TraceRequest],
    rounds: Rounds,
    progress: Progress,
) -> tuple[str, ...]:
    from penstock.gpu_worker.model.build import build_model

    served = build_model(settings)
    _check_fits(served, requests)
    if not settings.engine.overlap:
        served = replace(served, overlaps=False)
    replay_in_process(served, warm_up(requests), None)
    for number in range(options.rounds):
        progress("in process", number, options.rounds)
        times = replay_in_process(served, requests, options.rate)
        times.summarise(rounds)
    return served.summary, "the engine alone, in this process"


def replay_in_process(
    served: ServingModel, requests: Sequence[TraceRequest], rate: float | None
) -> TokenTimes:
    """Replay a trace to the engine in this process, as the worker's loop drives it.

    Raises:
        PenstockError: a request failed.
    """
    engine = Engine(served.config, served.new_text_stream)
    times = TokenTimes(requests, rate)
    last: tuple[Plan, StepOutput] | None = None

    def collect() -> None:
        nonlocal last
        if last is not None:
            for update in engine.collect(*last):
                if update.token_ids:
                    times.add(int(update.id), len(update.token_ids))
            last = None

    def work_beside() -> None:
        collect()
        if (following := engine.prepare_ahead()) is not None:
            served.runner.prepare(following)

    waiting = list(reversed(list(enumerate(requests))))
    times.start()
    while True:
        while waiting and times.arrivals[waiting[-1][0]] <= times.now():
            index, request = waiting.pop()
            engine.add(engine_request(served, index, request))
        plan = engine.schedule_ahead(last[1]) if last is not None and served.overlaps else None
        if plan is None:
            collect()
            plan = engine.schedule()
        if plan is not None:
            last = plan, served.runner.run(plan, work_beside if plan.token_ids else None)
        elif waiting:
            time.sleep(max(0.0, times.arrivals[waiting[-1][0]] - times.now()))
        else:
            break
    _check(times, requests)
    return times


def engine_request(served: ServingModel, index: int, request: TraceRequest) -> EngineRequest:
    """The request at ``index`` for an engine, with its exact length."""
    asked = Request(id=str(index), prompt=request.prompt_ids, options=request.sampling)
    return EngineRequest(
        id=asked.id,
        lane=asked.lane,
        tenant=asked.tenant,
        prompt_ids=tuple(served.encode(asked)),
        options=asked.options,
        seed=asked.seed,
        arrival=time.perf_counter(),
    )


async def _through_redis(
    options: TraceOptions,
    settings: Settings,
    requests: Sequence[TraceRequest],
    rounds: Rounds,
    progress: Progress,
) -> tuple[str, ...]:
    async with EmbeddedRedis() as server:
        redis = settings.redis.model_copy(update={"url": server.url})
        settings = settings.model_copy(update={"redis": redis})
        began = time.perf_counter()
        async with worker_process(settings), Producer(server.url, model="bench") as producer:
            ready_s = time.perf_counter() - began
            await _replay_through_redis(producer, warm_up(requests), None)
            for number in range(options.rounds):
                progress("through Redis", number, options.rounds)
                times = await _replay_through_redis(producer, requests, options.rate)
                times.summarise(rounds)
        program = f"{server.binary.kind} {server.binary.version}"
    return (f"through {program} and a worker process, ready in {ready_s:.1f} s",)


async def _replay_through_redis(
    producer: Producer, requests: Sequence[TraceRequest], rate: float | None
) -> TokenTimes:
    times = TokenTimes(requests, rate)

    async def read(index: int, request: TraceRequest) -> None:
        await asyncio.sleep(max(0.0, times.arrivals[index] - times.now()))
        stream = await producer.generate(
            list(request.prompt_ids),
            timeout=_TIMEOUT_S,
            max_tokens=request.output_len,
            temperature=request.temperature,
            top_p=request.top_p,
            ignore_eos=True,
        )
        async for chunk in stream:
            times.add(index, len(chunk.token_ids))

    times.start()
    await asyncio.gather(*itertools.starmap(read, enumerate(requests)))
    _check(times, requests)
    return times


def _check(times: TokenTimes, requests: Sequence[TraceRequest]) -> None:
    wanted = sum(request.output_len for request in requests)
    if times.num_tokens != wanted:
        raise PenstockError(
            f"{times.num_tokens} of {wanted} output tokens came: a request failed or ended early; "
            "check that prompts and outputs fit the model's context and vocabulary"
        )


def _check_fits(served: ServingModel, requests: Sequence[TraceRequest]) -> None:
    """Refuse a trace whose requests the model cannot serve.

    Raises:
        ConfigurationError: a request is longer than the context, or names an unknown token.
    """
    config = served.config
    for index, request in enumerate(requests):
        length = len(request.prompt_ids) + request.output_len
        if length > config.max_model_len:
            raise ConfigurationError(
                f"requests[{index}] has {length} tokens, the model's context {config.max_model_len}"
            )
        if config.vocab_size is not None and max(request.prompt_ids) >= config.vocab_size:
            raise ConfigurationError(
                f"requests[{index}].prompt names token {max(request.prompt_ids)}, the vocabulary "
                f"ends at {config.vocab_size}"
            )
