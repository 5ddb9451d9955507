"""The order of an examination."""

from __future__ import annotations

import statistics
import time
from enum import StrEnum

from redis.exceptions import ResponseError

from penstock.shared.errors import RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import require_url
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.redis.transient_errors import ClusterUnavailable
from penstock.shared.scripts.operations import Bounds
from penstock.shared.scripts.script_loader import Call, load_script
from penstock.shared.settings import Settings

from ..report import Number
from .findings import Diagnosis, Finding, Level
from .gateway_findings import look_at_api_keys
from .redis_probe import RedisProbe
from .rights import ROLES, look_at_default_user, look_at_rights
from .server_findings import ServerFacts, look_at_server
from .shard_findings import Shard

__all__ = ["Role", "examine"]

_ROUNDS = 30


class Role(StrEnum):
    """Whose work the user that is examined is to do."""

    ALL = "all"
    PRODUCER = "producer"
    WORKER = "worker"


async def examine(settings: Settings, *, role: Role = Role.ALL, repair: bool = False) -> Diagnosis:
    """Look at the server and the shard of these settings.

    Args:
        settings: of interest are the sections ``redis`` and ``queue``.
        role: whose rights this user must have.
        repair: set wrong counters right; everything else only looks.

    Raises:
        RedisUnavailable: no address is given, or the server cannot be reached.
    """
    keys = Keys(settings.queue.model, settings.queue.shard)
    link = RetryingClient(
        require_url(settings.redis),
        socket_timeout_s=settings.redis.socket_timeout_s,
        outage_s=0.0,
    )
    try:
        return await _examine(RedisProbe(link), keys, settings, role, repair)
    finally:
        await link.aclose()


async def _examine(
    probe: RedisProbe, keys: Keys, settings: Settings, role: Role, repair: bool
) -> Diagnosis:
    queue = settings.queue
    # First of all, since it finds the node that everything else is asked of.
    slot = await _look_at_slot(probe, keys)
    skew_ms, now_ms = await _clock(probe)
    info = await probe.info()
    facts = ServerFacts(
        info={} if isinstance(info, ResponseError) else info,
        config=await probe.config(),
        skew_ms=skew_ms,
        ping_ms=await _median_ms(probe, ("PING",)),
        script_ms=await _script_ms(probe),
        max_queued_bytes=int(queue.max_queued_bytes),
    )
    findings = list(look_at_server(facts))
    if (api_keys := await look_at_api_keys(probe, settings.gateway.host)) is not None:
        findings.append(api_keys)
    figures = _figures(facts)
    subject = f"{probe.address}, model {keys.model}, shard {keys.shard}"
    findings.append(slot)
    if slot.level is Level.ERROR:
        return Diagnosis(subject, tuple(findings), figures)
    findings.append(await look_at_default_user(probe))
    findings += await look_at_rights(probe, keys, ROLES if role is Role.ALL else (role.value,))
    shard = Shard(probe, keys, Bounds.of(queue), now_ms)
    findings += await shard.look(repair=repair)
    return Diagnosis(subject, tuple(findings), {**figures, **shard.figures})


async def _clock(probe: RedisProbe) -> tuple[float | None, int]:
    """The server's clock minus ours in ms (None: not allowed to see it), and its time in ms."""
    before = time.time()
    (reply,) = await probe.commands(("TIME",))
    after = time.time()
    ours = (before + after) / 2 * 1000
    if isinstance(reply, ResponseError):
        return None, int(ours)
    theirs = int(reply[0]) * 1000 + int(reply[1]) / 1000
    return theirs - ours, int(theirs)


async def _median_ms(probe: RedisProbe, command: tuple[str, ...]) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        await probe.commands(command)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


async def _script_ms(probe: RedisProbe) -> float | None:
    """Median time of a script that does nothing; None if this user may not run scripts."""
    call = Call(load_script("probe"), (), ())
    (reply,) = await probe.calls([call])
    if isinstance(reply, ResponseError):
        return None
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        await probe.calls([call])
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


async def _look_at_slot(probe: RedisProbe, keys: Keys) -> Finding:
    try:
        await probe.commands(("EXISTS", keys.request("doctor")))
    except RedisUnavailable as error:
        if not isinstance(error.__cause__, ClusterUnavailable):
            raise
        return Finding(
            "cluster", Level.ERROR, str(error.__cause__),
            "no node of the cluster serves this shard",
            "look at CLUSTER INFO and CLUSTER SLOTS: every slot needs a node",
        )  # fmt: skip
    info = await probe.info()
    if isinstance(info, ResponseError) or not info.get("cluster_enabled"):
        return Finding("cluster", Level.OK, "no cluster")
    where = f"found by way of it at {probe.node}" if probe.node else "here"
    return Finding(
        "cluster", Level.NOTE, f"a node of a cluster; this shard's slot is {where}",
        "clients go to that node by themselves; should it fail, they look for its successor at the "
        "address that they were given",
        "let that address be a name of all nodes, and move the slot only while the shard is idle",
    )  # fmt: skip


def _figures(facts: ServerFacts) -> dict[str, Number]:
    figures: dict[str, Number] = {"ping_ms": facts.ping_ms}
    if facts.script_ms is not None:
        figures["script_ms"] = facts.script_ms
    if facts.skew_ms is not None:
        figures["clock_skew_ms"] = facts.skew_ms
    named = {
        "used_memory_bytes": "used_memory",
        "maxmemory_bytes": "maxmemory",
        "connected_clients": "connected_clients",
        "connected_replicas": "connected_slaves",
    }
    for figure, name in named.items():
        if name in facts.info:
            figures[figure] = int(facts.info[name])
    return figures
