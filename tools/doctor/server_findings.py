"""What the server's own figures and configuration tell. Pure: from INFO and CONFIG to findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.shared.errors import RedisUnavailable
from penstock.shared.redis.version import check_version

from .findings import Finding, Level

__all__ = ["ServerFacts", "look_at_server"]

_MIB = 1 << 20
_FULL, _NEARLY_FULL = 0.95, 0.75
_SKEW_MS = 1000
_SLOW_MS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What was asked of the server.

    Attributes:
        info: all of INFO; empty if this user may not see it.
        config: all of CONFIG GET; empty if this user may not see it.
        skew_ms: the server's clock minus this machine's; None if it could not be read.
        ping_ms, script_ms: median time of a PING and of an empty script.
        max_queued_bytes: the bound on waiting payload that producers here keep.
    """

    info: Mapping[str, Any]
    config: Mapping[str, str]
    skew_ms: float | None
    ping_ms: float
    script_ms: float | None
    max_queued_bytes: int


def look_at_server(facts: ServerFacts) -> Iterator[Finding]:
    """Findings about the server, whatever shards it holds."""
    if facts.info:
        yield _version(facts.info)
        yield _persistence(facts.info, facts.config)
        yield _policy(facts.info)
        yield _memory(facts.info, facts.max_queued_bytes)
        yield _replication(facts.info, facts.config)
        yield _clients(facts.info, facts.config)
    else:
        yield Finding(
            "server", Level.NOTE, "this user may not run INFO",
            "version, persistence, memory and replication were not looked at",
            "run the doctor as a user with +info +config|get",
        )  # fmt: skip
    if facts.config:
        yield _pubsub_buffer(facts.config)
        yield _timeouts(facts.config)
    elif facts.info:
        yield Finding(
            "configuration", Level.NOTE, "this user may not run CONFIG GET",
            "appendfsync, output buffers and timeouts were not looked at",
            "run the doctor as a user with +config|get, or see your provider's console",
        )  # fmt: skip
    yield _latency(facts)
    if facts.skew_ms is not None:
        yield _clock(facts.skew_ms)


def _version(info: Mapping[str, Any]) -> Finding:
    version = str(info.get("redis_version"))
    name = str(info.get("server_name", "redis"))
    shown = f"{name} {info.get('valkey_version', version)}"
    try:
        check_version(version)
    except RedisUnavailable as error:
        return Finding("version", Level.ERROR, shown, str(error), "upgrade to 7.0 or newer")
    return Finding("version", Level.OK, shown)


def _persistence(info: Mapping[str, Any], config: Mapping[str, str]) -> Finding:
    name = "persistence"
    if info.get("loading"):
        return Finding(
            name, Level.ERROR, "the server is loading its data",
            "nothing is served until it has read them", "wait, and look again",
        )  # fmt: skip
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        return Finding(
            name, Level.ERROR, "the last write of the append-only file failed",
            "the server refuses writes, or will lose them", "look at its log and its disk",
        )  # fmt: skip
    if (
        info.get("rdb_last_bgsave_status", "ok") != "ok"
        and config.get("stop-writes-on-bgsave-error", "yes") == "yes"
        and config.get("save", "x")
    ):
        return Finding(
            name, Level.ERROR, "the last snapshot failed",
            "the server refuses all writes until one succeeds (MISCONF)",
            "look at its log, disk and memory (vm.overcommit_memory=1), then BGSAVE",
        )  # fmt: skip
    if info.get("aof_enabled"):
        return _fsync(config.get("appendfsync"))
    remedy = (
        "CONFIG SET appendonly yes, appendfsync everysec, and the same in its configuration file"
    )
    if config.get("save", "") or (not config and info.get("rdb_changes_since_last_save", 0) == 0):
        return Finding(
            name, Level.WARNING, "snapshots only, no append-only file",
            "if the server dies, every request accepted since the last snapshot is lost", remedy,
        )  # fmt: skip
    return Finding(
        name, Level.ERROR, "none",
        "if the server dies, every accepted request is lost with it", remedy,
    )  # fmt: skip


def _fsync(policy: str | None) -> Finding:
    name = "persistence"
    shown = f"append-only file, appendfsync {policy or 'not known'}"
    if policy == "no":
        return Finding(
            name, Level.WARNING, shown,
            "a lost machine or power cut loses what the kernel had not written, often 30 s",
            "CONFIG SET appendfsync everysec",
        )  # fmt: skip
    if policy == "always":
        return Finding(
            name, Level.NOTE, shown,
            "nothing acknowledged is lost even in a power cut; every step waits for the disk",
        )  # fmt: skip
    return Finding(
        name, Level.OK, shown,
        "a killed server loses nothing that was acknowledged; a power cut up to about 2 s",
    )  # fmt: skip


def _policy(info: Mapping[str, Any]) -> Finding:
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy == "noeviction":
        return Finding("eviction", Level.OK, policy)
    return Finding(
        "eviction", Level.ERROR, policy,
        "when memory is full the server throws accepted requests away; workers refuse to start",
        "CONFIG SET maxmemory-policy noeviction; give caches a server of their own",
    )  # fmt: skip


def _memory(info: Mapping[str, Any], max_queued_bytes: int) -> Finding:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        machine = int(info.get("total_system_memory", 0))
        level = Level.WARNING if machine and used > _NEARLY_FULL * machine else Level.NOTE
        return Finding(
            "memory", level, f"{used / _MIB:.1f} MiB used, no maxmemory",
            "when the machine's memory is full the kernel kills the server, instead of submits "
            "being refused", "CONFIG SET maxmemory to what the server may have",
        )  # fmt: skip
    shown = f"{used / _MIB:.1f} of {limit / _MIB:.1f} MiB ({used / limit:.0%})"
    if used > _FULL * limit:
        return Finding(
            "memory", Level.ERROR, shown,
            "submits are refused, or will be at any moment; running requests go on",
            "raise maxmemory, shorten queue.retention_s, or wait until requests end",
        )  # fmt: skip
    if used > _NEARLY_FULL * limit:
        return Finding(
            "memory", Level.WARNING, shown, "at maxmemory submits are refused",
            "raise maxmemory, or shorten queue.retention_s",
        )  # fmt: skip
    if max_queued_bytes > limit / 2:
        return Finding(
            "memory", Level.WARNING,
            f"{shown}; queue.max_queued_bytes is {max_queued_bytes / _MIB:.0f} MiB",
            "memory can fill up before the bound on what waits refuses anything",
            "set queue.max_queued_bytes well below half of maxmemory",
        )  # fmt: skip
    return Finding("memory", Level.OK, shown)


def _replication(info: Mapping[str, Any], config: Mapping[str, str]) -> Finding:
    if info.get("role") == "slave":
        return Finding(
            "replication", Level.ERROR, "this server is a replica",
            "a replica refuses writes", "connect to the primary",
        )  # fmt: skip
    replicas = int(info.get("connected_slaves", 0))
    if not replicas:
        return Finding("replication", Level.OK, "no replica")
    needed = config.get("min-replicas-to-write", "0")
    return Finding(
        "replication", Level.NOTE, f"{replicas} replicas, min-replicas-to-write {needed}",
        "replication is asynchronous: a failover may lose the last writes. A request's owner "
        "sends its tokens again; accepted requests that no replica had are lost, and tokens "
        "already read may differ if their owner is lost, too (readers get StreamDiverged)",
        "min-replicas-to-write 1 and min-replicas-max-lag bound what can be lost",
    )  # fmt: skip


def _clients(info: Mapping[str, Any], config: Mapping[str, str]) -> Finding:
    connected = int(info.get("connected_clients", 0))
    most = int(info.get("maxclients") or config.get("maxclients") or 0)
    shown = f"{connected} of {most}" if most else str(connected)
    if most and connected > 0.9 * most:
        return Finding(
            "connections", Level.WARNING, shown, "new connections will be refused",
            "raise maxclients; one Producer per process shares its connections",
        )  # fmt: skip
    return Finding("connections", Level.OK, shown)


def _pubsub_buffer(config: Mapping[str, str]) -> Finding:
    name = "pubsub_buffer"
    words = config.get("client-output-buffer-limit", "").split()
    if "pubsub" not in words:
        return Finding(name, Level.NOTE, "not known")
    hard, soft, seconds = (int(word) for word in words[words.index("pubsub") + 1 :][:3])
    shown = f"{hard / _MIB:g} MiB, or {soft / _MIB:g} MiB for {seconds} s"
    if hard == 0 and soft == 0:
        return Finding(
            name, Level.WARNING, "no limit",
            "one reader that does not read can fill the server's memory",
            "CONFIG SET client-output-buffer-limit 'pubsub 32mb 8mb 60'",
        )  # fmt: skip
    if 0 < hard < _MIB:
        return Finding(
            name, Level.WARNING, shown,
            "readers are cut off by short bursts; they catch up from the log, with a pause",
            "CONFIG SET client-output-buffer-limit 'pubsub 32mb 8mb 60'",
        )  # fmt: skip
    return Finding(name, Level.OK, shown)


def _timeouts(config: Mapping[str, str]) -> Finding:
    timeout, keepalive = int(config.get("timeout") or 0), int(config.get("tcp-keepalive") or 0)
    shown = f"timeout {timeout} s, tcp-keepalive {keepalive} s"
    if timeout:
        return Finding(
            "timeouts", Level.NOTE, shown,
            "the server closes idle connections; they are made anew, which costs a little time",
            "CONFIG SET timeout 0",
        )  # fmt: skip
    if not keepalive:
        return Finding(
            "timeouts", Level.NOTE, shown,
            "connections of machines that vanished stay, with their buffers",
            "CONFIG SET tcp-keepalive 300",
        )  # fmt: skip
    return Finding("timeouts", Level.OK, shown)


def _latency(facts: ServerFacts) -> Finding:
    shown = f"PING {facts.ping_ms:.2f} ms"
    slowest = facts.ping_ms
    if facts.script_ms is not None:
        shown += f", script {facts.script_ms:.2f} ms (medians)"
        slowest = max(slowest, facts.script_ms)
    if slowest > _SLOW_MS:
        return Finding(
            "latency", Level.WARNING, shown,
            "every engine step makes one round trip, and every token is that much older",
            "put workers, gateways and server into one network; look at the server's SLOWLOG",
        )  # fmt: skip
    return Finding("latency", Level.OK, shown)


def _clock(skew_ms: float) -> Finding:
    shown = f"{skew_ms:+.0f} ms against this machine"
    if abs(skew_ms) < _SKEW_MS:
        return Finding("clock", Level.OK, shown)
    return Finding(
        "clock", Level.NOTE, shown,
        "harmless: deadlines and leases go by the server's clock alone; times in logs differ",
        "let both machines keep time with NTP",
    )  # fmt: skip
