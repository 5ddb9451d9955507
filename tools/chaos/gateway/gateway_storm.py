"""Kills gateways, workers, Redis and connections under clients that resume; checks every token."""

from __future__ import annotations

import asyncio
import datetime
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.shared.keys import Keys
from penstock.shared.scripts.usage_ledger import read_ledger
from penstock.shared.settings import Settings
from penstock.shared.synthetic import synthetic_tokens

from ...report import Check, Progress, Report
from ..faults.storm_server import OwnServer
from ..faults.worker_fleet import Fleet
from ..options import worker_arguments, worker_environment
from .gateway_fleet import GatewayFleet
from .resuming_client import Answer, Violation, read_answer

__all__ = ["GatewayStormOptions", "run_gateway_storm"]

_PROMPT = (97, 98, 99)
_PAUSE_S = (0.2, 1.5)
_GATEWAYS = 2
_PATIENCE_S = 180.0
_LEDGER_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class GatewayStormOptions:
    """How hard it blows.

    Attributes:
        seconds: how long.
        clients: at the same time.
        workers: worker machines.
        tokens: of a request at most.
        seed: of faults and requests.
        lease_ms: of the workers.
    """

    seconds: float = 60.0
    clients: int = 300
    workers: int = 3
    tokens: int = 400
    seed: int = 0
    lease_ms: int = 800


@dataclass
class _Found:
    answers: list[Answer] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    client_tokens: int = 0


async def run_gateway_storm(options: GatewayStormOptions, show: Progress) -> Report:
    """Run the storm, wait for every client's last token, and check.

    Raises:
        PenstockError: Redis or the workers do not start.
    """
    settings = Settings.model_validate(
        {
            "queue": {"model": "storm"},
            "worker": {"lease_ms": options.lease_ms, "metrics_port": None},
            "model": {"path": "synthetic"},
        }
    )
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="penstock-storm-") as name:
        folder = Path(name)
        async with (
            OwnServer(folder / "redis") as server,
            Fleet(
                options.workers,
                worker_arguments(settings),
                worker_environment(settings, server.url),
                folder / "workers",
            ) as fleet,
            GatewayFleet(_GATEWAYS, server.url, folder / "gateways") as gateways,
        ):
            await fleet.wait_until_ready()
            await gateways.wait_until_ready()
            found = _Found()
            stop_at = time.monotonic() + options.seconds
            clients = [
                asyncio.create_task(_client(number, gateways, options, stop_at, found))
                for number in range(options.clients)
            ]
            faults = asyncio.create_task(_faults(rng, server, fleet, gateways, stop_at))
            try:
                while time.monotonic() < stop_at:
                    show("storm", int(options.seconds - (stop_at - time.monotonic())),
                         int(options.seconds))  # fmt: skip
                    await asyncio.sleep(0.5)
                await faults
                show("last tokens", 0, 0)
                late = await _wait_for_all(clients, fleet, gateways)
            finally:
                for task in (faults, *clients):
                    task.cancel()
                await asyncio.gather(faults, *clients, return_exceptions=True)
            found.violations += [f"{len(late)} clients never reached their end"] if late else []
            found.violations += _failures(set(clients) - late)
            ledger = await _ledger(server, Keys("storm"))
            await fleet.finish()
            return _report(options, found, ledger, server, fleet, gateways)


async def _client(
    number: int,
    gateways: GatewayFleet,
    options: GatewayStormOptions,
    stop_at: float,
    found: _Found,
) -> None:
    """Request after request, each read to its end and compared with the right one."""
    rng = random.Random(f"{options.seed}/{number}")
    turn = 0
    while time.monotonic() < stop_at:
        turn += 1
        tokens, seed = rng.randint(1, options.tokens), rng.randrange(2**31)
        body = {"model": "storm", "prompt": list(_PROMPT), "max_tokens": tokens, "seed": seed}
        try:
            answer = await read_answer(gateways.ports, f"{number}-{turn}", body, rng)
        except Violation as error:
            found.violations.append(str(error))
            continue
        right = "".join(map(chr, synthetic_tokens(seed, _PROMPT, tokens)))
        if answer.text != right:
            found.violations.append(f"{answer.key}: another text than the model gives")
        if len(answer.accepted) != 1:
            found.violations.append(f"{answer.key}: accepted at {sorted(answer.accepted)}")
        found.answers.append(answer)
        found.client_tokens += tokens


async def _faults(
    rng: random.Random, server: OwnServer, fleet: Fleet, gateways: GatewayFleet, stop_at: float
) -> None:
    """Fault after fault until the end, and of each kind one, however slow the machine is."""
    kills = {"gateway": 0, "worker": 0, "redis": 0}
    while time.monotonic() < stop_at or not all(kills.values()):
        await asyncio.sleep(rng.uniform(*_PAUSE_S))
        missing = [kind for kind, count in kills.items() if not count]
        kind = rng.choice(missing) if missing else rng.choices([*kills], (45, 45, 10))[0]
        kills[kind] += await _kill(kind, rng, server, fleet, gateways)
        fleet.replace_ended()
        gateways.replace_ended()


async def _kill(
    kind: str, rng: random.Random, server: OwnServer, fleet: Fleet, gateways: GatewayFleet
) -> bool:
    """Kill one of a kind; returns whether there was one."""
    if kind == "gateway":
        await gateways.kill(rng)
    elif kind == "redis":
        await server.kill_and_restart(rng.uniform(0.1, 1.0))
    else:
        machine = fleet.pick(rng)
        return machine is not None and fleet.kill(machine)
    return True


async def _wait_for_all(
    clients: list[asyncio.Task[None]], fleet: Fleet, gateways: GatewayFleet
) -> set[asyncio.Task[None]]:
    """Wait for every client's last token; returns those that are late."""
    late, give_up_at = set(clients), time.monotonic() + _PATIENCE_S
    while late and time.monotonic() < give_up_at:
        _, late = await asyncio.wait(late, timeout=0.5)
        fleet.replace_ended()
        gateways.replace_ended()
    return late


def _failures(ended: set[asyncio.Task[None]]) -> list[str]:
    """What clients ended with that found no violation by themselves."""
    return [f"a client failed: {task.exception()!r}" for task in ended if task.exception()]


async def _ledger(server: OwnServer, keys: Keys) -> tuple[int, int]:
    """Completed requests and their output tokens, by the usage ledger."""
    async with server.client(timeout_s=_LEDGER_TIMEOUT_S) as redis:
        seconds, _ = await redis.time()
        today = datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()
        rows = await read_ledger(redis, keys, [today - datetime.timedelta(1), today])
    done = [row.counts for row in rows if row.state == "completed"]
    return sum(c.requests for c in done), sum(c.output_tokens for c in done)


def _report(
    options: GatewayStormOptions,
    found: _Found,
    ledger: tuple[int, int],
    server: OwnServer,
    fleet: Fleet,
    gateways: GatewayFleet,
) -> Report:
    requests, tokens = len(found.answers), found.client_tokens
    figures: dict[str, Any] = {
        "requests": requests,
        "tokens": tokens,
        "resumptions": sum(answer.breaks for answer in found.answers),
        "gateway_kills": gateways.kills,
        "worker_kills": fleet.counts.engine_kills + fleet.counts.machine_kills,
        "redis_kills": server.kills,
        "gateway_restarts": gateways.restarts,
        "violations": len(found.violations),
        "ledger_requests_difference": abs(ledger[0] - requests),
        "ledger_tokens_difference": abs(ledger[1] - tokens),
    }
    return Report(
        subject=f"{options.clients} resuming clients of {_GATEWAYS} gateways",
        figures=figures,
        checks=(
            Check("violations", figures["violations"], 0),
            Check("ledger_requests_difference", figures["ledger_requests_difference"], 0),
            Check("ledger_tokens_difference", figures["ledger_tokens_difference"], 0),
            Check("requests", requests, 1, at_least=True),
            Check("gateway_kills", gateways.kills, 1, at_least=True),
            Check("worker_kills", figures["worker_kills"], 1, at_least=True),
            Check("redis_kills", server.kills, 1, at_least=True),
        ),
        notes=(f"seed {options.seed}", *found.violations[:20]),
    )
