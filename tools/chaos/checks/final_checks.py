"""After a storm: workers are sent home, and what is left is looked at."""

from __future__ import annotations

import asyncio
import time

from ..environment import Parts
from .key_recount import recount
from .storm_counts import Invariant, Ledger

__all__ = ["look", "send_home"]

_LEASES_TIMEOUT_S = 60.0


async def send_home(parts: Parts, ledger: Ledger) -> None:
    """Let the leases of lost workers end, then end the others with SIGTERM.

    All requests have ended. Findings go to the ledger.

    Raises:
        PenstockError: workers that were killed do not come back.
    """
    await parts.fleet.wait_until_ready()
    living = {machine.worker_id for machine in parts.fleet.machines}
    deadline = time.monotonic() + _LEASES_TIMEOUT_S
    leases: set[str | None] = set()
    while time.monotonic() < deadline:
        names = await parts.link.redis.zrange(parts.keys.leases, 0, -1)
        leases = {name.decode() for name in names}
        if leases <= living:
            break
        await asyncio.sleep(0.05)
    for name in leases - living:
        ledger.violated(Invariant.COUNTERS, str(name), "is gone and keeps its lease")
    await parts.fleet.finish()


async def look(parts: Parts, ledger: Ledger, *, exclusive: bool) -> None:
    """Recount Redis and read the workers' logs. Findings go to the ledger.

    Args:
        parts: of the storm, without workers by now.
        ledger: knows how every request ended.
        exclusive: the server holds nothing but this storm's keys.
    """
    await recount(parts.link.redis, parts.keys, ledger, exclusive=exclusive)
    for complaint in parts.fleet.complaints:
        ledger.violated(Invariant.WORKERS_SOUND, "fleet", complaint)
    for crash in parts.fleet.crashes():
        ledger.violated(Invariant.WORKERS_SOUND, "fleet", crash)
