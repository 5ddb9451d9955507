"""Reads the Lua sources, resolves their includes, and runs them by digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

from redis.exceptions import NoScriptError, ResponseError

__all__ = ["Call", "Command", "Pipelined", "Script", "load_script", "run_calls", "run_commands"]

_INCLUDE = re.compile(r"^--@include (\S+)$", re.MULTILINE)

Argument = str | bytes | int


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic operation.

    Attributes:
        name: file name without ``.lua``.
        source: Lua text with includes resolved.
        digest: SHA-1 of the source in hex, the name Redis caches it by.
    """

    name: str
    source: str
    digest: str


def load_script(name: str) -> Script:
    """Read ``scripts/<name>.lua`` and put its ``--@include`` files in place.

    Raises:
        FileNotFoundError: there is no such script in the package.
    """
    folder = resources.files(__package__) / "scripts"

    def read(path: str) -> str:
        text = (folder / path).read_text("utf-8")
        return _INCLUDE.sub(lambda match: read(match.group(1)), text)

    source = read(f"{name}.lua")
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


@dataclass(frozen=True, slots=True)
class Call:
    """A script with its keys and arguments, not yet sent."""

    script: Script
    keys: Sequence[str | bytes]
    args: Sequence[Argument]

    def command(self, *, by_source: bool = False) -> tuple[Argument, ...]:
        """The Redis command: EVALSHA, or EVAL with the whole source."""
        if by_source:
            return ("EVAL", self.script.source, len(self.keys), *self.keys, *self.args)
        return ("EVALSHA", self.script.digest, len(self.keys), *self.keys, *self.args)


@dataclass(frozen=True, slots=True)
class Command:
    """A plain command that travels with calls.

    Attributes:
        words: its name and arguments.
    """

    words: tuple[Argument, ...]

    def command(self, *, by_source: bool = False) -> tuple[Argument, ...]:
        """The same as of a :class:`Call`; it has no source."""
        del by_source
        return self.words


class Pipelined(Protocol):
    """What is needed of ``redis.asyncio.Redis`` here."""

    def pipeline(self, transaction: bool = ...) -> Any:
        """A pipeline of commands."""


async def run_calls(redis: Pipelined, calls: Sequence[Call | Command]) -> list[Any]:
    """Run calls in one round trip; those the server has forgotten are sent again by source.

    After SCRIPT FLUSH or a restart a call answers NOSCRIPT and has done nothing; only such calls
    are repeated, in their order.

    Returns:
        One reply per call. A reply may be a ``ResponseError``, raised by nobody yet.

    Raises:
        redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the outcome is unknown.
    """
    replies = await run_commands(redis, [call.command() for call in calls])
    missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    if missing:
        again = await run_commands(redis, [calls[i].command(by_source=True) for i in missing])
        for i, reply in zip(missing, again, strict=True):
            replies[i] = reply
    return replies


async def run_commands(redis: Pipelined, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
    """Run plain commands in one round trip; returns and raises as :func:`run_calls`."""
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not isinstance(reply, ResponseError):
            raise reply
    return replies
