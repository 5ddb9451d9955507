"""The Redis server of a storm: its own, which it may kill, or a given one on loopback.

The storm's own server writes an append-only file with ``appendfsync always``, so every write that
it acknowledged survives a kill. With ``everysec`` a busy disk may delay a write by two seconds. A
kill then loses acknowledged writes, which no client can repair.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from penstock.shared.errors import ConfigurationError, RedisUnavailable
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import find_server
from penstock.shared.redis.address import redact_url
from penstock.shared.redis.opening import open_client

__all__ = ["KillableServer", "OwnServer", "Server", "given_server", "through"]

_START_TIMEOUT_S = 60.0
_PUBSUB_LIMIT = "pubsub 32768 16384 1"
"""Hard and soft limit of a subscriber's output buffer in bytes, and seconds above the soft one."""


class Server:
    """A server that the storm uses and does not kill.

    Args:
        url: its address, with a user who may do everything.
        storm_url: its address with the user of workers and clients; None: the same.

    Attributes:
        url: the first one.
        storm_url: the second one.
    """

    def __init__(self, url: str, storm_url: str | None = None) -> None:
        self.url = url
        self.storm_url = storm_url or url
        self._before: list[tuple[str, str]] = []

    @property
    def host(self) -> str:
        """Host of the address."""
        return urlsplit(self.url).hostname or "127.0.0.1"

    @property
    def port(self) -> int:
        """Port of the address."""
        return urlsplit(self.url).port or 6379

    @property
    def encrypted(self) -> bool:
        """Whether a proxy cannot read what passes."""
        return urlsplit(self.url).scheme == "rediss"

    def client(self, timeout_s: float = 2.0) -> Redis:
        """A client without proxy and without retries."""
        return open_client(self.url, timeout_s=timeout_s)

    async def command(self, *words: str) -> Any:
        """Run one command.

        Raises:
            RedisUnavailable: the server does not answer, or refuses.
        """
        client = self.client()
        try:
            return await client.execute_command(*words)  # type: ignore[no-untyped-call]
        except ResponseError as error:
            raise RedisUnavailable(f"Redis refused {' '.join(words[:2])}: {error}") from error
        except (RedisError, OSError) as error:
            raise RedisUnavailable(
                f"cannot reach Redis at {redact_url(self.url)}: {error}; start the server, or give "
                "no --redis for one of the storm's own"
            ) from error
        finally:
            await client.aclose()

    async def limit_subscribers(self) -> None:
        """Make the server disconnect slow subscribers much sooner than by default.

        Raises:
            RedisUnavailable: the server refuses CONFIG.
        """
        name = "client-output-buffer-limit"
        values = await self.command("CONFIG", "GET", name)
        before = values[name] if isinstance(values, dict) else values[1]
        text = before.decode() if isinstance(before, bytes) else str(before)
        self._before.append((name, text))
        await self.command("CONFIG", "SET", name, _PUBSUB_LIMIT)

    async def restore(self) -> None:
        """Restore the configuration."""
        while self._before:
            name, value = self._before.pop()
            await self.command("CONFIG", "SET", name, value)


@contextlib.asynccontextmanager
async def given_server(url: str) -> AsyncIterator[Server]:
    """Use a given server during the block.

    Raises:
        ConfigurationError: its address is not on loopback.
        RedisUnavailable: it does not answer.
    """
    _check_loopback(url)
    server = Server(url)
    await server.command("PING")
    try:
        yield server
    finally:
        with contextlib.suppress(RedisUnavailable):
            await server.restore()


def _check_loopback(url: str) -> None:
    parts = urlsplit(url)
    host = parts.hostname or ""
    with contextlib.suppress(ValueError):
        if parts.scheme == "redis" and (
            host == "localhost" or ipaddress.ip_address(host).is_loopback
        ):
            return
    raise ConfigurationError(
        f"a storm runs on this machine alone: {host or url!r} is not a loopback address; "
        "give redis://127.0.0.1:PORT, or no --redis for a server of its own"
    )


class KillableServer(Server, ABC):
    """A server that the storm starts and may kill.

    Attributes:
        kills: number of kills.
        down_s: total downtime in seconds.
        longest_down_s: longest downtime in seconds.
    """

    def __init__(self, url: str, storm_url: str | None = None) -> None:
        super().__init__(url, storm_url)
        self.kills = 0
        self.down_s = 0.0
        self.longest_down_s = 0.0

    @abstractmethod
    async def kill_and_restart(self, pause_s: float) -> None:
        """Kill it, and start it again after a pause.

        Raises:
            RedisUnavailable: it does not restart.
        """

    def note_outage(self, seconds: float) -> None:
        """Count a kill after which nothing answered for so long."""
        self.kills += 1
        self.down_s += seconds
        self.longest_down_s = max(self.longest_down_s, seconds)

    async def limit_subscribers(self) -> None:
        """Do nothing: its configuration has these limits."""


class OwnServer(KillableServer):
    """One server of the storm's own.

    Args:
        folder: of its data; the caller removes it.
        lines: of its configuration, after its own.
        password: of its user ``default``; None: a new one.

    Attributes:
        lines: the same.
    """

    def __init__(
        self, folder: Path, lines: Iterable[str] = (), password: str | None = None
    ) -> None:
        self._password = password or secrets.token_urlsafe(18)
        super().__init__(f"redis://:{self._password}@127.0.0.1:{free_port()}/0")
        self._binary = find_server()
        self._folder = folder
        self.lines = list(lines)
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            await self.start()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill()

    async def kill_and_restart(self, pause_s: float) -> None:
        """Kill it; after a pause restart it on its port with its data.

        Raises:
            RedisUnavailable: it does not restart.
        """
        began = time.monotonic()
        self.kill()
        try:
            await asyncio.sleep(pause_s)
        finally:
            await self.start()
        self.note_outage(time.monotonic() - began)

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Kill it, and leave it dead."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    async def start(self, *lines: str) -> None:
        """Start it with its data.

        Args:
            *lines: of its configuration, for this time.

        Raises:
            RedisUnavailable: it does not start.
        """
        with (self._folder / "redis.log").open("ab") as log:
            self._process = process = spawn_bound(
                [self._binary.path, "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                new_session=True,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write("\n".join([*self._configuration(), *self.lines, *lines, ""]).encode())
        client = self.client(timeout_s=1.0)
        deadline = time.monotonic() + _START_TIMEOUT_S
        try:
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    facts: dict[str, Any] = await client.info()
                    # INFO answers while the server still reads its file; most commands do not.
                    if int(facts["process_id"]) == process.pid and not facts["loading"]:
                        return
                except (RedisError, OSError):
                    pass  # not up yet
                await asyncio.sleep(0.01)
        finally:
            await client.aclose()
        tail = (self._folder / "redis.log").read_text(errors="replace").splitlines()[-5:]
        raise RedisUnavailable(f"the storm's Redis server did not start: {' | '.join(tail)}")

    def _configuration(self) -> list[str]:
        return [
            "bind 127.0.0.1",
            "protected-mode yes",
            f"port {self.port}",
            "daemonize no",
            'save ""',
            "maxmemory-policy noeviction",
            "appendonly yes",
            "appendfsync always",
            f"client-output-buffer-limit {_PUBSUB_LIMIT}",
            f"requirepass {self._password}",
        ]


def through(url: str, port: int) -> str:
    """The address with a proxy's loopback port in place of its own."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user}{at}127.0.0.1:{port}"))
