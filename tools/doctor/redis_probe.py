"""The server under examination: commands whose refusal is an answer, not an error."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import AuthenticationError, ResponseError

from penstock.shared.redis.resp import Argument
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.script_loader import Call, run_calls, run_commands

__all__ = ["RedisProbe", "is_denial"]

_T = TypeVar("_T")


class RedisProbe:
    """A server that is asked things.

    Args:
        link: the connection; nothing is tried again if it was made without patience.
    """

    def __init__(self, link: RetryingClient) -> None:
        self._link = link

    @property
    def redis(self) -> Redis:
        """The client."""
        return self._link.redis

    @property
    def address(self) -> str:
        """The server's address without its password."""
        return self._link.address

    @property
    def node(self) -> str | None:
        """The node of a cluster that is examined, if the address names another one."""
        return self._link.node

    async def ask(self, send: Callable[[], Awaitable[_T]]) -> _T | ResponseError:
        """Run a command; a refusal is returned.

        Raises:
            RedisUnavailable: the server cannot be reached.
        """

        async def guarded() -> _T | ResponseError:
            try:
                return await send()
            except ResponseError as error:
                return error

        return await self._link.call(guarded)

    async def info(self) -> dict[str, Any] | ResponseError:
        """Everything INFO says."""
        return await self.ask(lambda: self.redis.info("everything"))

    async def config(self) -> dict[str, str]:
        """The server's configuration; empty if this user may not read it."""
        reply = await self.ask(lambda: self.redis.config_get("*"))
        return {} if isinstance(reply, ResponseError) else dict(reply)

    async def lets_anyone_in(self) -> bool:
        """Whether ``AUTH default`` with any password makes a connection that may run commands.

        Raises:
            RedisUnavailable: the server cannot be reached.
        """
        pool = self.redis.connection_pool
        anyone = {"username": "default", "password": secrets.token_hex(16)}
        settings = {**pool.connection_kwargs, "credential_provider": None, **anyone}

        async def send() -> bool:
            other = ConnectionPool(connection_class=pool.connection_class, **settings)
            async with Redis.from_pool(other) as client:
                try:
                    await client.ping()
                except (AuthenticationError, ResponseError):
                    return False
            return True

        return await self._link.call(send)

    async def confines(self) -> bool | None:
        """Whether there are users beside ``default``; None if this user may not see that."""
        (users,) = await self.commands(("ACL", "USERS"))
        return None if isinstance(users, ResponseError) else len(users) > 1

    async def default_may_replay(self) -> bool | None:
        """Whether the user ``default`` may run every command: Redis replays its file as that user.

        None if this user may not see that.
        """
        (users,) = await self.commands(("ACL", "LIST"))
        if isinstance(users, ResponseError):
            return None
        rules = [bytes(line).split() for line in users]
        (own,) = [words for words in rules if words[1] == b"default"]
        return b"~*" in own and own[-1] == b"+@all"

    async def commands(self, *commands: tuple[Argument, ...]) -> list[Any]:
        """Replies, raw, of commands sent together; refused ones answer with their error."""
        return await self._link.call(lambda: run_commands(self.redis, commands))

    async def calls(self, calls: Sequence[Call]) -> list[Any]:
        """The same for scripts."""
        return await self._link.call(lambda: run_calls(self.redis, calls))


def is_denial(error: object) -> bool:
    """Whether an error, or its text, says that this user may not do that."""
    text = str(error).lower()
    words = ("noperm", "no permission", "user executing the script can't")
    return any(word in text for word in words)
