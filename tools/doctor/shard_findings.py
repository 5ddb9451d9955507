"""What a shard holds: workers, waiting work, dead letters, counters, and what was left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import ResponseError

from penstock.shared.keys import GROUP, Keys
from penstock.shared.protocol.states import Lane
from penstock.shared.quoting import one_line
from penstock.shared.redis.resp import field_pairs
from penstock.shared.scripts.operations import Bounds
from penstock.shared.scripts.script_loader import load_script

from ..report import Number
from .findings import Finding, Level
from .redis_probe import RedisProbe, is_denial

__all__ = ["Shard"]

_MOST_TENANTS = 200
_MOST_KEYS = 100_000
_MOST_RECOUNTED = 20_000
_SCAN = 1000
_SUMMARY_CHARS = 300

LASTING = (
    "tenants:critical", "tenants:normal", "tenants:batch", "lanes", "virtual_time", "sweep",
    "leases", "counters", "bell", "dead_letters", "deadlines", "readers", "ingress_tenants",
    "ingress", "fingerprints", "model",
)  # fmt: skip
"""Keys without expiry by design."""

LASTING_PREFIXES = ("queue:", "continued:", "suspects", "owned:", "ingress:")
"""The same, for as long as requests wait or run, or a tenant has an ingress stream."""


@dataclass
class Shard:
    """One shard under examination; :meth:`look` fills ``figures``.

    Args:
        probe: the server.
        keys: names of the shard.
        bounds: what may wait, according to the settings here.
        now_ms: the server's time.
    """

    probe: RedisProbe
    keys: Keys
    bounds: Bounds
    now_ms: int
    figures: dict[str, Number] = field(default_factory=dict)

    async def look(self, *, repair: bool = False) -> list[Finding]:
        """Examine it.

        Args:
            repair: set wrong counters right.

        Raises:
            RedisUnavailable: the server cannot be reached.
        """
        keys = self.keys
        replies = await self.probe.commands(
            ("ZRANGE", keys.leases, "0", "-1", "WITHSCORES"),
            ("HGETALL", keys.counters),
            ("XLEN", keys.dead_letters),
            ("ZRANGE", keys.fingerprints, "0", "-1", "WITHSCORES"),
            ("HMGET", keys.model_card, "summary"),
        )
        for reply in replies:
            if isinstance(reply, ResponseError):
                return [_denied(reply) if is_denial(reply) else _unreadable(reply)]
        leases, counters, letters, models, summary = replies
        waiting = int(counters.get(b"requests", 0))
        self.figures.update(
            queued_requests=waiting,
            queued_tokens=int(counters.get(b"tokens", 0)),
            queued_bytes=int(counters.get(b"bytes", 0)),
            dead_letters=letters,
        )
        for lane in Lane:
            self.figures[f"queued_requests_{lane.value}"] = int(
                counters.get(f"requests:{lane.value}".encode(), 0)
            )
        return [
            await self._workers(leases, waiting),
            _models(models, self.now_ms),
            *_steps(*summary),
            await self._queue(waiting),
            _letters(letters),
            await self._counters(repair=repair),
            await self._leftovers(),
        ]

    async def _workers(self, leases: list[bytes], waiting: int) -> Finding:
        ends = {
            name.decode(): float(until)
            for name, until in zip(leases[::2], leases[1::2], strict=True)
        }
        live = [name for name, until in ends.items() if until > self.now_ms]
        lapsed = [name for name, until in ends.items() if until <= self.now_ms]
        sizes = await self.probe.commands(
            *(("HLEN", self.keys.owned(name)) for name in (*live, *lapsed))
        )
        running = sum(size for size in sizes if isinstance(size, int))
        self.figures.update(workers=len(live), lapsed_leases=len(lapsed), running_requests=running)
        shown = f"{len(live)} with a lease, running {running} requests"
        if not live and lapsed and running:
            return Finding(
                "workers", Level.WARNING, f"none; {len(lapsed)} fell silent owning {running}",
                "their requests wait for another worker's sweep", "start a worker",
            )  # fmt: skip
        if not live and waiting:
            return Finding(
                "workers", Level.WARNING, "none, and requests wait",
                "no worker generates or sweeps: deadlines pass unnoticed", "start a worker",
            )  # fmt: skip
        if not live:
            return Finding("workers", Level.NOTE, "none", "nothing is served until one starts")
        if lapsed:
            return Finding(
                "workers", Level.NOTE, f"{shown}; {len(lapsed)} fell silent just now",
                "the others take over within a second",
            )  # fmt: skip
        return Finding("workers", Level.OK, shown)

    async def _queue(self, waiting: int) -> Finding:
        oldest = await self._oldest_ms()
        if oldest is not None:
            self.figures["oldest_waiting_ms"] = oldest
        age = "" if oldest is None else f", the oldest for {oldest / 1000:.1f} s"
        shown = f"{waiting} waiting{age}"
        used = {
            "max_queued_requests": (waiting, self.bounds.requests),
            "max_queued_tokens": (self.figures["queued_tokens"], self.bounds.tokens),
            "max_queued_bytes": (self.figures["queued_bytes"], self.bounds.bytes),
        }
        full = [name for name, (now, most) in used.items() if most and now > 0.9 * most]
        if full:
            return Finding(
                "queue", Level.WARNING, f"{shown}; over 90 % of {', '.join(full)}",
                "submits are refused soon, or already", "add workers, or raise the bound",
            )  # fmt: skip
        return Finding("queue", Level.OK, shown)

    async def _oldest_ms(self) -> int | None:
        """How long the request at the head of any queue waits there; None if none does."""
        keys = self.keys
        rows = await self.probe.commands(
            *(("ZRANGE", keys.tenants(lane), "0", str(_MOST_TENANTS)) for lane in Lane)
        )
        queues = [*map(keys.continued, Lane), keys.suspects]
        for lane, tenants in zip(Lane, rows, strict=True):
            if not isinstance(tenants, ResponseError):
                queues += [keys.queue(lane, tenant.decode()) for tenant in tenants]
        groups = await self.probe.commands(*(("XINFO", "GROUPS", queue) for queue in queues))
        heads = []
        for queue, found in zip(queues, groups, strict=True):
            last = None if isinstance(found, ResponseError) else _last_delivered(found)
            if last is not None:
                heads.append(("XRANGE", queue, f"({last}", "+", "COUNT", "1"))
        entries = await self.probe.commands(*heads) if heads else []
        ages = [
            self.now_ms - int(rows[0][0].partition(b"-")[0])
            for rows in entries
            if not isinstance(rows, ResponseError) and rows
        ]
        return max(0, *ages) if ages else None

    async def _counters(self, *, repair: bool) -> Finding:
        (alive,) = await self.probe.commands(("ZCARD", self.keys.deadlines))
        if isinstance(alive, ResponseError):
            if is_denial(alive):
                return _denied(alive, "counters")
            return _unreadable(alive)
        self.figures["unended_requests"] = alive
        if alive > _MOST_RECOUNTED and not repair:
            return Finding(
                "counters", Level.NOTE, f"not recounted: {alive} requests have not ended",
                "a recount holds the server for about 10 us each", "--repair recounts anyway",
            )  # fmt: skip
        mode = "repair" if repair else "check"
        call = load_script("rebuild_counters").call(self.keys.prefix, mode=mode)
        (reply,) = await self.probe.calls([call])
        if isinstance(reply, ResponseError):
            return _unreadable(reply)
        _, wrong = reply
        self.figures["wrong_counters"] = wrong
        if not wrong:
            return Finding("counters", Level.OK, "equal to a recount")
        if repair:
            return Finding("counters", Level.NOTE, f"{wrong} were wrong and are right now")
        return Finding(
            "counters", Level.ERROR, f"{wrong} differ from a recount",
            "bounds on what waits and autoscaling go by wrong numbers; this comes from keys "
            "deleted by hand or from commands denied in the middle of scripts",
            "penstock doctor --repair sets them right",
        )  # fmt: skip

    async def _leftovers(self) -> Finding:
        keys, cursor, seen = self.keys, 0, 0
        left: list[str] = []
        while True:
            (page,) = await self.probe.commands(
                ("SCAN", cursor, "MATCH", keys.prefix.replace("{", "\\{") + "*", "COUNT", _SCAN)
            )
            if isinstance(page, ResponseError):
                return Finding(
                    "leftovers", Level.NOTE, "this user may not run SCAN",
                    "keys were not looked at", "run the doctor as a user with +scan +pttl",
                )  # fmt: skip
            cursor, names = page[0], [name.decode() for name in page[1]]
            seen += _SCAN
            doubtful = [name for name in names if not _lasts(name.removeprefix(keys.prefix))]
            ttls = await self.probe.commands(*(("PTTL", name) for name in doubtful))
            left += [name for name, ttl in zip(doubtful, ttls, strict=True) if ttl == -1]
            if cursor == 0 or seen >= _MOST_KEYS:
                break
        self.figures["keys_without_expiry"] = len(left)
        part = "" if cursor == 0 else f" among the first {_MOST_KEYS} of the server"
        if not left:
            return Finding("leftovers", Level.OK, f"none{part}")
        shown = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        return Finding(
            "leftovers", Level.WARNING, f"{len(left)} keys without expiry{part}: {shown}",
            "nothing will ever delete them; penstock leaves no such key on purpose",
            "if the sweep of a running worker does not clear them within a minute, DEL them",
        )  # fmt: skip


def _models(rows: list[bytes], now_ms: int) -> Finding:
    pairs = zip(rows[::2], rows[1::2], strict=True)
    until = {name.decode(errors="replace"): float(end) for name, end in pairs}
    served = [name for name, end in until.items() if end > now_ms]
    gone = [name for name in until if name not in served]
    if len(served) > 1:
        return Finding(
            "model", Level.WARNING, f"{len(served)} are served: {', '.join(served)}",
            "a rolling change is under way: a new request may get either, and a stream continues "
            "only on workers of its own model", "stop the workers of the old model to end it",
        )  # fmt: skip
    if gone and served:
        return Finding(
            "model", Level.NOTE, f"{served[0]}; gone: {', '.join(gone)}",
            "streams of a model that is gone wait ten leases for a worker of it, and then end",
        )  # fmt: skip
    return Finding("model", Level.OK, f"fingerprint {served[0]}" if served else "none is served")


def _steps(summary: bytes | None) -> Iterator[Finding]:
    """What computes the steps of the worker that started last, in its own words."""
    if summary is None:
        return
    shown = one_line(summary.decode(errors="replace"), _SUMMARY_CHARS)
    if "on cpu" in shown and shown.endswith("computed by torch"):
        yield Finding(
            "steps", Level.NOTE, shown,
            "PyTorch computes a step on a CPU several times slower than the native library",
            "read the worker's log at its start, which says why; often a C++ compiler is missing",
        )  # fmt: skip
    else:
        yield Finding("steps", Level.OK, shown)


def _letters(count: int) -> Finding:
    if not count:
        return Finding("dead_letters", Level.OK, "none")
    return Finding(
        "dead_letters", Level.WARNING, f"{count}",
        "these requests were given up, since workers kept dying with them; payloads are kept",
        "penstock dlq list; mend the cause, then penstock dlq redrive",
    )  # fmt: skip


def _denied(error: ResponseError, name: str = "shard") -> Finding:
    return Finding(
        name, Level.NOTE, f"not looked at: {error}",
        "this user may not look there", "run the doctor as a user with more rights",
    )  # fmt: skip


def _unreadable(error: ResponseError) -> Finding:
    return Finding(
        "shard", Level.ERROR, f"its keys cannot be read: {error}",
        "one of them was overwritten by something else",
        "find which key it is (TYPE) and DEL it; sweeps put right what they can",
    )  # fmt: skip


def _lasts(name: str) -> bool:
    return name in LASTING or name.startswith(LASTING_PREFIXES)


def _last_delivered(groups: list[Any]) -> str | None:
    for group in groups:
        facts = dict(field_pairs(group))
        if facts[b"name"] == GROUP.encode():
            return str(facts[b"last-delivered-id"].decode())
    return None
