"""The command ``penstock chaos``."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.shared.distribution import install_command
from penstock.shared.errors import ConfigurationError

from ..measurement import finish
from ..report_view import show_progress
from .faults.fault_schedule import ALL_FAULTS, Fault
from .gateway.gateway_storm import GatewayStormOptions, run_gateway_storm
from .options import StormOptions
from .stall import StallOptions, measure_stall
from .storm.storm import Storm
from .storm.storm_report import report_storm

__all__ = ["chaos"]


def chaos(
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="How long the storm lasts.")
    ] = 30.0,
    everything: Annotated[
        bool, typer.Option("--all", help="All faults; also if none is named.")
    ] = False,
    kill: Annotated[bool, typer.Option("--kill", help="Kill workers (-9).")] = False,
    stop: Annotated[
        bool, typer.Option("--stop", help="Stop workers for longer than their lease.")
    ] = False,
    drain: Annotated[
        bool, typer.Option("--drain", help="End workers with SIGTERM and replace them.")
    ] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Reset connections.")] = False,
    cut: Annotated[
        bool, typer.Option("--cut", help="Drop replies of scripts that were executed.")
    ] = False,
    half_open: Annotated[
        bool, typer.Option("--half-open", help="Let connections stand with nothing arriving.")
    ] = False,
    late: Annotated[
        bool, typer.Option("--late", help="Deliver late, also after the sender has given up.")
    ] = False,
    redis_kill: Annotated[
        bool, typer.Option("--redis-kill", help="Kill Redis (-9) and start it again.")
    ] = False,
    flush: Annotated[bool, typer.Option("--flush", help="SCRIPT FLUSH.")] = False,
    slow_readers: Annotated[
        bool, typer.Option("--slow-readers", help="Readers that the server cuts.")
    ] = False,
    workers: Annotated[int, typer.Option(min=2, max=64, help="Worker machines.")] = 6,
    in_flight: Annotated[
        int, typer.Option(min=1, max=5000, help="Requests at the same time.")
    ] = 100,
    tokens: Annotated[
        int, typer.Option(min=1, max=10_000, help="Output tokens of a request at most.")
    ] = 100,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of requests and faults; default: a new one.")
    ] = None,
    pace: Annotated[
        float, typer.Option(min=0.1, max=20, help="Factor on the rate of faults.")
    ] = 1.0,
    model: Annotated[
        str,
        typer.Option(help="synthetic, demo, or a checkpoint's directory.", metavar="MODEL"),
    ] = "synthetic",
    redis: Annotated[
        str | None,
        typer.Option(help="A server on loopback, not to be killed; default: an own one."),
    ] = None,
    lease_ms: Annotated[
        int, typer.Option(min=200, max=60_000, help="Lease of the workers in ms.")
    ] = 800,
    logs: Annotated[
        Path | None, typer.Option(help="Directory to keep the workers' logs in.")
    ] = None,
    stall: Annotated[
        bool,
        typer.Option("--stall", help="No storm: measure how long a kill stops a stream."),
    ] = False,
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="Kill gateways, too, under clients that resume."),
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="With --stall: kills of each kind.")
    ] = 9,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: figures, checks, notes.")
    ] = False,
) -> None:
    """Let faults loose on workers, connections and Redis, and check every token afterwards.

    Real workers serve requests without pause while they are killed, stopped and cut off, on this
    machine alone. Exit code 0: every promise held; 1: one did not (each violation is told with
    its request); 2: the storm could not be started. See docs/chaos.md.
    """
    named = {
        Fault.KILL: kill, Fault.STOP: stop, Fault.DRAIN: drain, Fault.RESET: reset,
        Fault.CUT: cut, Fault.HALF_OPEN: half_open, Fault.LATE: late,
        Fault.REDIS_KILL: redis_kill, Fault.FLUSH: flush, Fault.SLOW_READERS: slow_readers,
    }  # fmt: skip
    faults = frozenset(fault for fault, wanted in named.items() if wanted)
    if everything or not faults:
        faults = ALL_FAULTS if redis is None or everything else ALL_FAULTS - {Fault.REDIS_KILL}
    _check_worker_is_installed()
    # A storm breaks connections all the time; that clients log it is no news.
    logging.getLogger("penstock").addHandler(logging.NullHandler())
    with show_progress() as show:
        if stall:
            report = _run(measure_stall(StallOptions(rounds=rounds), show))
            passed, failed = "streams go on in time", "streams stand still too long: {names}"
        elif gateway:
            storm = GatewayStormOptions(
                seconds=seconds,
                clients=in_flight,
                workers=workers,
                tokens=tokens,
                seed=secrets.randbits(31) if seed is None else seed,
                lease_ms=lease_ms,
            )
            report = _run(run_gateway_storm(storm, show))
            passed, failed = "no token lost, doubled or changed", "NOT everything held: {names}"
        else:
            options = StormOptions(
                seconds=seconds,
                faults=faults,
                workers=workers,
                in_flight=in_flight,
                tokens=tokens,
                seed=secrets.randbits(31) if seed is None else seed,
                model=model if model in ("synthetic", "demo") else str(Path(model).resolve()),
                redis=redis,
                lease_ms=lease_ms,
                pace=pace,
                logs=None if logs is None else logs.resolve(),
            )
            report = report_storm(_run(Storm(options, show).run()))
            passed = f"every promise held (seed {options.seed})"
            failed = f"NOT everything held (seed {options.seed}): {{names}}"
    finish(report, as_json, title=f"penstock chaos: {report.subject}", passed=passed, failed=failed)


def _check_worker_is_installed() -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError(
            f"a storm needs workers, which are not installed: {install_command('worker')}"
        )


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it; SIGTERM ends it as Ctrl-C does, with everything taken apart in order.

    Raises:
        KeyboardInterrupt: it was ended by a signal.
    """

    async def main() -> Any:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await work

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
