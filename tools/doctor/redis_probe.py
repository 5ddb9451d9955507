"""The server under examination: commands whose refusal is an answer, not an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.shared.redis.resp import Argument
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.script_loader import Call, run_calls, run_commands

__all__ = ["Patient", "is_denial"]

_T = TypeVar("_T")


class Patient:
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
