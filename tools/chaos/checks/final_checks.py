"""After a storm: drains the workers, and checks what is left."""

from __future__ import annotations

import asyncio
import time

from ..environment import Environment
from .key_recount import recount
from .storm_counts import Findings, Invariant

__all__ = ["check_end_state", "drain_workers"]

_LEASES_TIMEOUT_S = 60.0


async def drain_workers(env: Environment, findings: Findings) -> None:
    """Let the leases of lost workers end, then end the others with SIGTERM.

    All requests have ended. It adds violations to the findings.

    Raises:
        PenstockError: workers that were killed do not come back.
    """
    await env.fleet.wait_until_ready()
    living = {machine.worker_id for machine in env.fleet.machines}
    deadline = time.monotonic() + _LEASES_TIMEOUT_S
    leases: set[str | None] = set()
    while time.monotonic() < deadline:
        names = await env.direct.redis.zrange(env.keys.leases, 0, -1)
        leases = {name.decode() for name in names}
        if leases <= living:
            break
        await asyncio.sleep(0.05)
    for name in leases - living:
        findings.violated(Invariant.COUNTERS, str(name), "is gone and keeps its lease")
    await env.fleet.finish()


async def check_end_state(env: Environment, findings: Findings, *, exclusive: bool) -> None:
    """Recount Redis and read the workers' logs. Violations go to the findings.

    Args:
        env: of the storm, without workers by now.
        findings: knows how every request ended.
        exclusive: the server holds nothing but this storm's keys.
    """
    await recount(env.direct.redis, env.keys, findings, exclusive=exclusive)
    for complaint in env.fleet.complaints:
        findings.violated(Invariant.WORKERS_SOUND, "fleet", complaint)
    for crash in env.fleet.crashes():
        findings.violated(Invariant.WORKERS_SOUND, "fleet", crash)
