"""Which rights this user lacks for what a producer or a worker does.

The commands of a role come from its scripts, so the list cannot be out of date. Each is tried
without changing anything: on a key that does not exist, or with an argument that Redis refuses
after checking the rights. (``ACL DRYRUN`` would need an administrator's rights, and Redis 7.)
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from redis.exceptions import NoPermissionError, ResponseError

from penstock.shared.keys import GROUP, Keys
from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.script_loader import load_script, script_names

from .findings import Finding, Level
from .redis_probe import RedisProbe, is_denial

__all__ = ["ROLES", "Rights", "look_at_default_user", "look_at_rights", "needed_commands"]

ROLES = ("producer", "worker")
"""The roles that run scripts in production; the header of each script names its roles."""

_DIRECT = {"producer": {"HMGET", "XRANGE"}, "worker": {"HMGET", "XREAD", "XREADGROUP"}}

# In each, the key's name stands for None.
_HARMLESS: Mapping[str, tuple[str | None, ...]] = {
    "DEL": (None,),
    "EXISTS": (None,),
    "HDEL": (None, "f"),
    "HEXISTS": (None, "f"),
    "HGET": (None, "f"),
    "HGETALL": (None,),
    "HINCRBY": (None, "f", "not a number"),
    "HMGET": (None, "f"),
    "HSET": (None, "f", "v", "a field without a value"),
    "PEXPIRE": (None, "1000"),
    "PEXPIREAT": (None, "1"),
    "PTTL": (None,),
    "RENAME": (None, None),
    "COPY": (None, None),
    "SMEMBERS": (None,),
    "TIME": (),
    "XACK": (None, GROUP, "0-1"),
    "XADD": (None, "not an id", "f", "v"),
    "XCLAIM": (None, GROUP, "c", "0", "0-1", "JUSTID"),
    "XDEL": (None, "0-1"),
    "XGROUP": ("CREATE", None, GROUP, "0"),
    "XINFO": ("CONSUMERS", None, GROUP),
    "XLEN": (None,),
    "XPENDING": (None, GROUP),
    "XRANGE": (None, "-", "+"),
    "XREAD": ("COUNT", "1", "STREAMS", None, "0"),
    "XREADGROUP": ("GROUP", GROUP, "c", "COUNT", "1", "STREAMS", None, ">"),
    "XREVRANGE": (None, "+", "-", "COUNT", "1"),
    "ZADD": (None, "not a number", "m"),
    "ZRANGE": (None, "0", "-1"),
    "ZCOUNT": (None, "0", "0"),
    "ZRANGEBYSCORE": (None, "-inf", "+inf"),
    "ZREM": (None, "m"),
    "ZSCAN": (None, "0"),
    "ZSCORE": (None, "m"),
}


@dataclass(frozen=True, slots=True)
class Rights:
    """What this user may not do.

    Attributes:
        scripts: may not run scripts at all.
        commands: commands that are denied.
        keys: key patterns that are denied.
        channels: may not publish, or subscribe, to the channels of this shard.
    """

    scripts: bool
    commands: frozenset[str]
    keys: tuple[str, ...]
    publish: bool
    subscribe: bool


def needed_commands(role: str) -> set[str]:
    """Every command that a role runs, in scripts and outside; without pub/sub."""
    headers = (load_script(name).header for name in script_names())
    commands = [header.commands for header in headers if header.role == role]
    return (_DIRECT[role].union(*commands)) - {"PUBLISH"}


async def find_rights(probe: RedisProbe, keys: Keys) -> Rights:
    """Try everything that any role needs.

    Raises:
        RedisUnavailable: the server cannot be reached.
    """
    scratch = f"doctor-{secrets.token_hex(8)}"
    record = keys.request(scratch)
    names = sorted(set().union(*(needed_commands(role) for role in ROLES)))
    # The first write is a DEL, so that a full server does not refuse the others.
    names.sort(key=lambda name: name != "DEL")
    commands: list[tuple[str, ...]] = [
        (name, *(record if word is None else word for word in _HARMLESS[name])) for name in names
    ]
    families = _families(keys, scratch)
    commands += [command for _, command in families]
    channels = (keys.channel(scratch), keys.inbox(scratch))
    commands += [("PUBLISH", channel, "") for channel in channels]
    words: list[str | int] = []
    for command in commands:
        words.append(len(command))
        words.extend(command)
    # One key declared: if a declared one is denied, so is the script as a whole.
    (reply,) = await probe.calls([load_script("probe").call(keys.prefix, id=scratch, words=words)])
    can_subscribe = await _can_subscribe(probe, keys.channel(scratch))
    if isinstance(reply, ResponseError):
        no_key = "key" in str(reply)
        closed_keys = ("request:*",) if no_key else ()
        return Rights(not no_key, frozenset(), closed_keys, False, not can_subscribe)
    errors = [text.decode(errors="replace") for text in reply]
    denied = frozenset(name for name, text in zip(names, errors, strict=False) if is_denial(text))
    of_keys, of_channels = errors[len(names) : -len(channels)], errors[-len(channels) :]
    closed = tuple(
        pattern
        for (pattern, command), text in zip(families, of_keys, strict=True)
        if is_denial(text) and command[0] not in denied
    )
    return Rights(False, denied, closed, any(map(is_denial, of_channels)), not can_subscribe)


def _families(keys: Keys, scratch: str) -> list[tuple[str, tuple[str, ...]]]:
    """A command that changes nothing for every kind of key, each fit for the key's type."""
    found: list[tuple[str, tuple[str, ...]]] = [
        ("log:*", ("XDEL", keys.log(scratch), "0-1")),
        ("compacting:*", ("XDEL", keys.compacting(scratch), "0-1")),
        ("queue:*", ("XDEL", keys.queue(Lane.NORMAL, scratch), "0-1")),
        ("owned:*", ("HDEL", keys.owned(scratch), scratch)),
    ]
    sets = (
        keys.lanes,
        keys.leases,
        keys.deadlines,
        keys.ended,
        keys.fingerprints,
        *map(keys.tenants, Lane),
    )
    streams = (keys.bell, keys.dead_letters, *map(keys.continued, Lane), keys.suspects)
    lasting: list[tuple[str, ...]] = [("ZREM", key, scratch) for key in sets]
    lasting += [
        ("HDEL", key, scratch)
        for key in (keys.virtual_time, keys.sweep, keys.counters, keys.model_card)
    ]
    lasting += [("XDEL", key, "0-1") for key in streams]
    return found + [(command[1].removeprefix(keys.prefix), command) for command in lasting]


async def _can_subscribe(probe: RedisProbe, channel: str) -> bool:
    async def send() -> bool:
        async with probe.redis.pubsub() as subscriber:
            try:
                await subscriber.subscribe(channel)
                await subscriber.get_message(timeout=1.0)
            except NoPermissionError:
                return False
        return True

    return await probe.ask(send) is True


async def look_at_rights(probe: RedisProbe, keys: Keys, roles: Iterable[str]) -> list[Finding]:
    """One finding per role: what this user lacks for it.

    Raises:
        RedisUnavailable: the server cannot be reached.
    """
    rights = await find_rights(probe, keys)
    return [_judge(role, rights, keys) for role in roles]


async def look_at_default_user(probe: RedisProbe) -> Finding:
    """Whether any client can become the user ``default``, and whether Redis can load as that user.

    Raises:
        RedisUnavailable: the server cannot be reached.
    """
    if await probe.default_may_replay() is False:
        return Finding(
            "default_user", Level.WARNING, "it lacks rights",
            "Redis loads its append-only file as this user, and most versions drop every "
            "transaction that it may not run: a restart loses all requests",
            "ACL SETUSER default ~* &* +@all; switched off and without a password, as "
            "deploy/acl/default.acl has it, nobody can become that user",
        )  # fmt: skip
    if not await probe.lets_anyone_in():
        return Finding("default_user", Level.OK, "switched off, or has a password")
    if await probe.confines() is False:
        return Finding("default_user", Level.OK, "open, and the only user: nobody is confined")
    return Finding(
        "default_user", Level.WARNING, "open: AUTH default with any password is accepted",
        "every confined user becomes one that may do everything, by one command",
        "switch it off with deploy/acl/default.acl, see docs/ingress.md",
    )  # fmt: skip


def _judge(role: str, rights: Rights, keys: Keys) -> Finding:
    lacks = [f"+{name.lower()}" for name in sorted(needed_commands(role) & rights.commands)]
    if rights.scripts:
        lacks.append("+evalsha +eval")
    lacks += [f"~{keys.prefix}{pattern}" for pattern in rights.keys]
    if rights.publish:
        lacks.append("+publish")
    if rights.subscribe and role == "producer":
        lacks.append("+subscribe")
    if (rights.publish or (rights.subscribe and role == "producer")) and not rights.scripts:
        lacks.append(f"&{keys.prefix}events:* &{keys.prefix}inbox:*")
    name = f"rights_{role}"
    if not lacks:
        return Finding(name, Level.OK, f"all that a {role} needs")
    return Finding(
        name, Level.ERROR, f"this user lacks {' '.join(lacks)}",
        f"a {role} does not work with it; a command denied in the middle of a script leaves a "
        "request that only a sweep puts right",
        "ACL SETUSER with these rights, see docs/operations.md; or examine another --role",
    )  # fmt: skip
