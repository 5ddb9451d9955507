"""A Redis server for users without one: found on this machine, started and stopped here.

The server listens on a free loopback port with its own password. It writes to disk only if it is
given a directory, and it ends with its owner (see :mod:`.children`). It is an ordinary Redis
server: ``redis-cli -u URL`` and clients in any language can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ..errors import ConfigurationError, RedisUnavailable
from ..settings import RedisSettings
from .children import spawn_bound
from .ports import free_port
from .server_binary import ServerBinary, find_server, remedy

__all__ = [
    "EmbeddedRedis",
    "open_redis",
    "require_url",
    "resolve_url",
]

_START_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
_PORT_ATTEMPTS = 8


class EmbeddedRedis:
    """A Redis server that lives as long as this object's ``with`` block, and no longer.

    It is a context manager, synchronous or asynchronous. The owner's death, by any signal, ends
    the server. Without ``data_dir`` nothing stays on disk.

    Args:
        binary: the program; None takes that of :func:`find_server`.
        data_dir: directory of an append-only file, flushed every second; created if missing.
        max_memory: bytes of data above which the server refuses writes; 0 for no bound. It never
            evicts, because an evicted key would be a lost request.
        password: None generates one; an empty one admits any local user.

    Attributes:
        url: address with password, while running.
        port: TCP port on 127.0.0.1, while running.
        pid: process id of the server, while running.
        binary: the server program.
    """

    def __init__(
        self,
        binary: ServerBinary | None = None,
        *,
        data_dir: Path | None = None,
        max_memory: int = 0,
        password: str | None = None,
    ) -> None:
        self.binary = binary or find_server()
        self.port = 0
        self._data_dir = data_dir
        self._max_memory = max_memory
        self._password = secrets.token_urlsafe(18) if password is None else password
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Address for any Redis client, password included.

        It names the user ``default``, because redis-cli takes the empty name in
        ``redis://:password@`` literally.
        """
        user = f"default:{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server.

        Raises:
            RedisUnavailable: it was not started, or was stopped.
        """
        if self._process is None:
            raise RedisUnavailable("the embedded Redis server is not running")
        return self._process.pid

    def start(self) -> Self:
        """Start the server; return once it answers.

        Raises:
            RedisUnavailable: it does not start; the message has the end of its log.
            ConfigurationError: its data directory cannot be created.
        """
        self._make_data_dir()
        for _ in range(_PORT_ATTEMPTS):
            # Another process may take the port before the server binds it; then try another port.
            self.port = free_port()
            self._launch()
            try:
                if self._wait_until_ready():
                    return self
            except BaseException:
                self.stop()
                raise
            self.stop()
        raise RedisUnavailable(f"no free loopback port found in {_PORT_ATTEMPTS} attempts")

    def stop(self) -> None:
        """Stop the server; it flushes ``data_dir`` first. Repeating it is harmless."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def log_tail(self, lines: int = 8) -> str:
        """Return the last lines of the server's log; empty when not running."""
        if self._log is None:
            return ""
        # The server writes through a duplicate of this descriptor, which shares its offset.
        text = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _make_data_dir(self) -> None:
        if self._data_dir is None:
            return
        try:
            self._data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the server's data directory {self._data_dir} cannot be created "
                f"({error.strerror}); "
                "set redis.embedded_dir to another, or to off"
            ) from None

    def _launch(self) -> None:
        # The log has no name, and an in-memory server's directory is removed once the server has
        # entered it: however the owner dies, nothing stays behind.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop()
        folder: contextlib.AbstractContextManager[str]
        if self._data_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="penstock-redis-")
        else:
            folder = contextlib.nullcontext(str(self._data_dir.resolve()))
        with folder as directory:
            self._process = spawn_bound(
                [self.binary.path, "-"],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                cwd=directory,
                new_session=True,
            )
        assert self._process.stdin is not None
        # Through standard input, since others can read arguments and files. If the server has
        # already ended, the wait below reports it.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(self._configuration().encode())

    def _configuration(self) -> str:
        lines = [
            "bind 127.0.0.1",
            "protected-mode yes",
            f"port {self.port}",
            "daemonize no",
            'save ""',
            "maxmemory-policy noeviction",
            f"maxmemory {self._max_memory}",
        ]
        if self._data_dir is not None:
            lines += ["appendonly yes", "appendfsync everysec"]
        if self._password:
            lines.append(f"requirepass {self._password}")
        return "\n".join(lines) + "\n"

    def _wait_until_ready(self) -> bool:
        """Wait until our own server answers; False if another process took its port."""
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        pause_s = 0.002
        reason = "no answer"
        with _connection(self.url) as client:
            while time.monotonic() < deadline:
                try:
                    facts: Any = client.info()
                    # Another process id belongs to another server, which took the port first.
                    if int(facts["process_id"]) != self._process.pid:
                        return False
                    if not facts["loading"]:
                        return True
                    # INFO answers while a large append-only file loads, which may take long.
                    deadline = max(deadline, time.monotonic() + 1)
                except redis.RedisError as error:
                    reason = str(error)
                if self._process.poll() is not None:
                    if "Address already in use" in self.log_tail():
                        return False
                    reason = f"it ended with status {self._process.returncode}"
                    break
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.05)
        log = self.log_tail().replace("\n", " | ")
        raise RedisUnavailable(
            f"{self.binary.path} (version {self.binary.version}) did not start: {reason}; "
            f"its log ends: {log or '(empty)'}; {remedy()}"
        )

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.create_task(asyncio.to_thread(self.start))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread cannot be cancelled: wait for it, then stop the server.
            await asyncio.wait([starting])
            await asyncio.to_thread(self.stop)
            raise

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.stop)


@contextlib.contextmanager
def open_redis(settings: RedisSettings) -> Iterator[str]:
    """Yield the URL of the configured server, or of one started for this block.

    Raises:
        RedisUnavailable: no server is configured and none can be started.
        ConfigurationError: its data directory cannot be created.
    """
    url = resolve_url(settings)
    if url is not None:
        yield url
        return
    with EmbeddedRedis(data_dir=settings.embedded_dir) as server:
        yield server.url


def resolve_url(settings: RedisSettings) -> str | None:
    """Return the URL of the configured server, or None if one must be started here.

    Raises:
        RedisUnavailable: no server is configured, and the settings forbid starting one.
    """
    if settings.embedded == "always":
        return None
    if settings.url is None and settings.embedded == "never":
        return require_url(settings)
    return settings.url


def require_url(settings: RedisSettings) -> str:
    """Return the URL of the configured server, for callers that cannot use a new one.

    Raises:
        RedisUnavailable: no server is configured.
    """
    if settings.url is None:
        raise RedisUnavailable(
            "no Redis server is configured: set REDIS_URL, for example to the address that "
            "`penstock worker` prints when it starts a server of its own"
        )
    return settings.url


@contextlib.contextmanager
def _connection(url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(url, socket_timeout=1, retry=Retry(NoBackoff(), 0))
    try:
        yield client
    finally:
        client.close()
