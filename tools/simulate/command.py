"""The command ``penstock simulate``."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import typer

from penstock.shared.errors import ConfigurationError
from penstock.shared.policy_name import PolicyName
from penstock.shared.protocol.states import Lane

from ..report_view import show_progress
from .arrivals import Lengths, write_trace
from .dispatch import Dispatch
from .fitted_step_time import fit_costs, read_steps
from .measures import ServiceLevel
from .report.comparison import ChunkChoice, Comparison, PreemptionMode, compare, report
from .report.comparison_plot import plot, require_matplotlib
from .report.table import show
from .step_time import (
    HARDWARE,
    MODELS,
    ConstantCost,
    CostModel,
    Roofline,
    calibrated,
    read_metrics,
)

__all__ = ["simulate"]

_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", bound=enum.StrEnum)


def simulate(
    workers: Annotated[str, typer.Option(help="Sizes of the fleet, such as 8,64.")] = "8",
    dispatch: Annotated[
        str, typer.Option(help="Of pull, round-robin, least-loaded.")
    ] = "pull,round-robin,least-loaded",
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests as JSON lines: arrival, prompt_len, output_len, ..."),
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests to draw, where there is no trace.")
    ] = 2000,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 20.0,
    per_worker: Annotated[
        bool, typer.Option("--per-worker", help="Requests and rate are for each worker.")
    ] = False,
    burstiness: Annotated[
        float, typer.Option(help="Variation of the time between requests; 1 is Poisson.")
    ] = 1.0,
    prompt: Annotated[
        str,
        typer.Option(
            help="Lengths of prompts: const:N, uniform:LOW:HIGH, exp:MEAN or lognormal:MEAN:SIGMA."
        ),
    ] = "lognormal:512:1:max=8192",
    output: Annotated[
        str, typer.Option(help="Lengths of outputs, in the same form.")
    ] = "lognormal:128:1:max=2048",
    lanes: Annotated[
        str, typer.Option(help="Mix of lanes, by weight.")
    ] = "critical=1,normal=4,batch=1",
    tenants: Annotated[str, typer.Option(help="Mix of tenants, by weight.")] = "a=1,b=1",
    deadlines: Annotated[
        str | None,
        typer.Option(help="Seconds to the deadline, LEAST:MOST; who is late is counted."),
    ] = None,
    hardware: Annotated[str, typer.Option(help="Device: h200, a100 or cpu.")] = "h200",
    model: Annotated[str, typer.Option(help="Shape of the model: 7b, 70b or demo.")] = "7b",
    step_ms: Annotated[
        float | None, typer.Option(help="Every step takes this long, whatever the device.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="A scrape of a worker's /metrics: scale step times to its mean step."),
    ] = None,
    steps: Annotated[
        Path | None,
        typer.Option(help="A worker's log of steps (worker.step_log): fit step times to it."),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Mean context of a sequence in the run of --calibrate.")
    ] = 512,
    max_sequences: Annotated[str, typer.Option(help="Of a worker; several compare.")] = "64",
    chunk_size: Annotated[
        str,
        typer.Option(
            help="Prompt tokens of a sequence in a step, all, adaptive or off; several compare."
        ),
    ] = "all",
    target_itl_ms: Annotated[float, typer.Option(help="What adaptive chunks steer for.")] = 50.0,
    policy: Annotated[
        str, typer.Option(help=f"Of {', '.join(PolicyName)}; several compare.")
    ] = str(PolicyName.FCFS),
    preemption: Annotated[
        str, typer.Option(help="Of recompute, swap, auto; several compare.")
    ] = "recompute",
    host_blocks: Annotated[
        str, typer.Option(help="KV blocks in host memory to swap to; all: as on the device.")
    ] = "all",
    kv_blocks: Annotated[
        str, typer.Option(help="KV blocks of a worker, or all that fit; several compare.")
    ] = "all",
    max_batch_tokens: Annotated[int, typer.Option(help="Token budget of a step.")] = 2048,
    block_size: Annotated[
        int | None,
        typer.Option(help="Tokens per KV block; 16 if not given, more in a large fleet."),
    ] = None,
    prefix_cache: Annotated[
        bool, typer.Option(help="Preempted work may find its KV again, as long as there is room.")
    ] = True,
    exchange_ms: Annotated[float, typer.Option(help="One round trip with Redis.")] = 1.0,
    wake_ms: Annotated[
        float, typer.Option(help="From the bell until a worker that hears it asks for work.")
    ] = 0.0,
    claim_batch: Annotated[int, typer.Option(help="Most requests claimed at once.")] = 16,
    slo_ttft_ms: Annotated[float, typer.Option(help="Good is a first token within this.")] = 1000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="And further ones this far apart.")] = 50.0,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: figures, checks, notes.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Write a PNG; needs the extra plot.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Write the requests of the first fleet as a trace.")
    ] = None,
) -> None:
    """Compare fleets and settings in virtual time.

    The real scheduler and the real order of claims serve drawn or recorded requests; a model of
    the device gives the time of a step. Exit code 0: every request ended once with its tokens;
    1: not so, which is a bug; 2: the input is wrong.
    """
    if picture is not None:
        require_matplotlib()
    comparison = Comparison(
        workers=_list("--workers", workers, _whole),
        dispatch=_list("--dispatch", dispatch, _one_of(Dispatch)),
        max_sequences=_list("--max-sequences", max_sequences, _whole),
        chunk_sizes=_list("--chunk-size", chunk_size, _chunk),
        kv_blocks=_list("--kv-blocks", kv_blocks, _int_or_all),
        policies=_list("--policy", policy, _one_of(PolicyName)),
        preemptions=_list("--preemption", preemption, _preemption),
        target_itl_s=target_itl_ms / 1000,
        host_blocks=_single("--host-blocks", host_blocks, _int_or_all),
        prefix_cache=prefix_cache,
        cost=_cost(hardware, model, step_ms, calibrate, steps, context),
        trace=trace,
        requests=requests,
        rate=rate,
        per_worker=per_worker,
        burstiness=burstiness,
        prompt=Lengths(prompt),
        output=Lengths(output),
        lanes=_mix("--lanes", lanes, _one_of(Lane)),
        tenants=_mix("--tenants", tenants, str),
        deadlines=_span("--deadlines", deadlines),
        max_batch_tokens=max_batch_tokens,
        block_size=block_size,
        exchange_s=exchange_ms / 1000,
        wake_s=wake_ms / 1000,
        claim_batch=claim_batch,
        level=ServiceLevel(ttft_s=slo_ttft_ms / 1000, itl_s=slo_itl_ms / 1000),
        seed=seed,
    )
    if save_trace is not None:
        write_trace(comparison.workload(comparison.workers[0]), save_trace)
    with show_progress() as progress:
        outcomes = compare(comparison, progress)
    found = report(outcomes)
    if picture is not None:
        plot(outcomes, picture)
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=2, allow_nan=False))
    else:
        show(outcomes, found)
    raise typer.Exit(0 if found.ok else 1)


def _cost(
    hardware: str,
    model: str,
    step_ms: float | None,
    scrape: Path | None,
    steps: Path | None,
    context: int,
) -> CostModel:
    given = {"--step-ms": step_ms, "--calibrate": scrape, "--steps": steps}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ConfigurationError(
            f"{' and '.join(names)} are given, and each says what a step takes: leave one"
        )
    if step_ms is not None:
        if not 0 < step_ms < 1e6:
            raise ConfigurationError(f"--step-ms is {step_ms}; allowed: above 0, below 1000000")
        return ConstantCost(step_ms / 1000)
    if hardware not in HARDWARE:
        raise ConfigurationError(f"--hardware is {hardware!r}; known: {', '.join(HARDWARE)}")
    if model not in MODELS:
        raise ConfigurationError(f"--model is {model!r}; known: {', '.join(MODELS)}")
    if context < 1:
        raise ConfigurationError(f"--context is {context}; allowed: 1 or more tokens")
    device = Roofline(HARDWARE[hardware], MODELS[model])
    if steps is not None:
        return fit_costs(read_steps(steps), device)
    return device if scrape is None else calibrated(device, read_metrics(scrape), context)


def _list(flag: str, text: str, kind: Callable[[str], _Value]) -> tuple[_Value, ...]:
    try:
        values = tuple(kind(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{flag} is {text!r}: {error}") from None
    if len(set(values)) < len(values):
        raise ConfigurationError(f"{flag} is {text!r}: a value stands there twice")
    return values


def _single(flag: str, text: str, kind: Callable[[str], _Value]) -> _Value:
    value, *more = _list(flag, text, kind)
    if more:
        raise ConfigurationError(f"{flag} is {text!r}; allowed: one value, it is not compared")
    return value


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is no whole number") from None


def _int_or_all(text: str) -> int | None:
    return None if text == "all" else _whole(text)


def _chunk(text: str) -> ChunkChoice:
    words: dict[str, ChunkChoice] = {"all": None, "adaptive": "adaptive", "off": "off"}
    return words[text] if text in words else _whole(text)


def _one_of(kind: type[_Choice]) -> Callable[[str], _Choice]:
    def parse(text: str) -> _Choice:
        if text not in list(kind):
            raise ValueError(f"{text!r} is none of {', '.join(kind)}")
        return kind(text)

    return parse


def _preemption(text: str) -> PreemptionMode:
    for mode in get_args(PreemptionMode):
        if text == mode:
            found: PreemptionMode = mode
            return found
    raise ValueError(f"{text!r} is none of {', '.join(get_args(PreemptionMode))}")


def _span(flag: str, text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        least, most = map(float, text.split(":"))
    except ValueError:
        raise ConfigurationError(f"{flag} is {text!r}; allowed: LEAST:MOST in seconds") from None
    return least, most


def _mix(flag: str, text: str, kind: Callable[[str], _Value]) -> dict[_Value, float]:
    mix: dict[_Value, float] = {}
    for part in text.split(","):
        name, equals, weight = part.strip().partition("=")
        try:
            mix[kind(name)] = float(weight) if equals else 1.0
        except ValueError as error:
            raise ConfigurationError(f"{flag} is {text!r}: {error}") from None
    return mix
