"""Reads the Lua sources, resolves their includes, builds calls, and runs them by digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol

from redis.exceptions import NoScriptError, ResponseError

from ..redis.resp import Argument, Exchanger, KeyPair, encode
from .script_header import Header, Value

__all__ = [
    "Call",
    "Command",
    "Pipelined",
    "Script",
    "load_script",
    "read_script",
    "run_calls",
    "run_commands",
    "script_names",
]

_INCLUDE = re.compile(r"^--@include (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic operation.

    Attributes:
        name: file name without ``.lua``.
        source: Lua text with includes resolved.
        digest: SHA-1 of the source in hex, the name Redis caches it by.
        header: its keys and arguments.
    """

    name: str
    source: str
    digest: str
    header: Header

    @classmethod
    def of(cls, name: str, source: str) -> Script:
        """The script of this source."""
        digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        return cls(name, source, digest, Header.parse(source))

    def call(self, prefix: str, pairs: Sequence[KeyPair] = (), /, **values: Value) -> Call:
        """A call of this script with its arguments by name; its header gives their order.

        Args:
            prefix: what every key of the shard begins with.
            pairs: the last of its keys, if they are keys of requests.
            values: the arguments, and what else the names of its keys need.

        Raises:
            KeyError: an argument is missing.
        """
        header = self.header
        return Call(self, header.key_names(prefix, values), header.argument_values(values), pairs)


def script_names() -> tuple[str, ...]:
    """Names of all scripts."""
    folder = resources.files(__package__) / "lua"
    files = (entry.name for entry in folder.iterdir() if entry.is_file())
    return tuple(sorted(name.removesuffix(".lua") for name in files))


@cache
def load_script(name: str) -> Script:
    """Read ``lua/<name>.lua`` and put its ``--@include`` files in place.

    Raises:
        FileNotFoundError: there is no such script in the package.
    """
    return read_script(resources.files(__package__) / "lua", name)


def read_script(folder: Traversable, name: str) -> Script:
    """Read ``<name>.lua`` of a folder; what it includes is this package's.

    Raises:
        FileNotFoundError: there is no such file.
    """
    libraries = resources.files(__package__) / "lua"

    def include(text: str) -> str:
        return _INCLUDE.sub(
            lambda match: include((libraries / match.group(1)).read_text("utf-8")), text
        )

    return Script.of(name, include((folder / f"{name}.lua").read_text("utf-8")))


@dataclass(frozen=True, slots=True)
class Call:
    """A script with its keys and arguments, not yet sent.

    Attributes:
        script: the script.
        keys: the first of its keys.
        args: its arguments.
        pairs: the rest of its keys, as keys of requests.
    """

    script: Script
    keys: Sequence[str | bytes]
    args: Sequence[Argument]
    pairs: Sequence[KeyPair] = ()

    def command(self, *, by_source: bool = False) -> tuple[Argument, ...]:
        """The Redis command: EVALSHA, or EVAL with the whole source."""
        names = [name for pair in self.pairs for name in (pair.record, pair.log)]
        return (*self._head(by_source), *self.keys, *names, *self.args)

    def wire(self, *, by_source: bool = False) -> bytes:
        """The same, encoded."""
        head = (*self._head(by_source), *self.keys)
        size = b"*%d\r\n" % (len(head) + 2 * len(self.pairs) + len(self.args))
        pairs = [pair.wire for pair in self.pairs]
        return b"".join([size, encode(head), *pairs, encode(self.args)])

    def _head(self, by_source: bool) -> tuple[Argument, Argument, Argument]:
        count = len(self.keys) + 2 * len(self.pairs)
        if by_source:
            return ("EVAL", self.script.source, count)
        return ("EVALSHA", self.script.digest, count)


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

    def wire(self, *, by_source: bool = False) -> bytes:
        """The same, encoded."""
        del by_source
        return b"*%d\r\n%b" % (len(self.words), encode(self.words))


class Pipelined(Protocol):
    """The part of ``redis.asyncio.Redis`` that this module needs."""

    def pipeline(self, transaction: bool = ...) -> Any:
        """A pipeline of commands."""


async def run_calls(redis: Pipelined | Exchanger, calls: Sequence[Call | Command]) -> list[Any]:
    """Run calls in one round trip; send those the server has forgotten again by source.

    After SCRIPT FLUSH or a restart a call answers NOSCRIPT and has done nothing; only such calls
    are repeated, in their order.

    Returns:
        One reply per call. A refusal is returned as a ``ResponseError``, not raised.

    Raises:
        redis.exceptions.ConnectionError, redis.exceptions.TimeoutError: the outcome is unknown.
    """
    replies = await _run(redis, calls, by_source=False)
    missing = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
    if missing:
        again = await _run(redis, [calls[i] for i in missing], by_source=True)
        for i, reply in zip(missing, again, strict=True):
            replies[i] = reply
    return replies


async def _run(
    redis: Pipelined | Exchanger, calls: Sequence[Call | Command], *, by_source: bool
) -> list[Any]:
    if isinstance(redis, Exchanger):
        return await redis.exchange([call.wire(by_source=by_source) for call in calls])
    return await run_commands(redis, [call.command(by_source=by_source) for call in calls])


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
