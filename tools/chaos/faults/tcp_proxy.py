"""A TCP proxy on loopback that injects network faults into connections to Redis.

A fault affects the connections that are open at that moment. Later ones work, so that a client
recovers by connecting again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

__all__ = ["Proxy"]

_READ = 1 << 16
_NARROW = 4096
"""Buffers of a narrow proxy in bytes, so that unread data piles up in the server."""

_FIRST_MOMENTS_S = 0.3
"""Time to log in and to subscribe."""

_SILENT_S = 30.0
"""Longer than any client waits for a reply."""

_CUT_SHOWS_S = 1.0
"""Data in transit arrives before the end of a connection that the server closed in a pause."""


@dataclass(eq=False)
class _Pipe:
    """One connection: the client's side, the server's side, and its faults.

    Times are those of the event loop, in seconds.
    """

    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    deaf_until: float = 0.0  # half-open: nothing arrives on either side
    late_until: float = 0.0  # what the client sends is held back
    paused_from: float = 0.0  # nothing is read from the server from here on ...
    paused_until: float = 0.0  # ... to here
    delay_s: float = 0.0
    cutting: bool = False  # the next reply is dropped ...
    silently: bool = False  # ... and nothing said about it
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def abort(self) -> None:
        """End both sides with a reset."""
        for _, writer in (self.client, self.server):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Forwards connections to one server, and injects faults on request.

    Args:
        host: the server's address.
        port: the server's port.
        narrow: use small buffers, so that a pause affects the server at once.

    Attributes:
        port: its port on 127.0.0.1, once started.
        connections: accepted connections.
        resets: connections that it reset.
        cuts: replies that it dropped after the server had executed the request.
        server_cuts: paused connections that the server closed.
    """

    def __init__(self, host: str, port: int, *, narrow: bool = False) -> None:
        self._upstream = (host, port)
        self._narrow = narrow
        self._pipes: set[_Pipe] = set()
        self._server: asyncio.Server | None = None
        # With the client's side of each connection, so that one that has just come is closed, too.
        self._handlers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._choked_until = 0.0
        self._cut_on = b""
        self._cuts_left = 0
        self._silently = False
        self.port = 0
        self.connections = 0
        self.resets = 0
        self.cuts = 0
        self.server_cuts = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pipe in list(self._pipes):
            pipe.abort()
        handlers = dict(self._handlers)
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        for writer in handlers.values():
            writer.transport.abort()
        await asyncio.gather(
            *(writer.wait_closed() for writer in handlers.values()), return_exceptions=True
        )

    def lead_to(self, host: str, port: int) -> None:
        """Send later connections to another server."""
        self._upstream = (host, port)

    @property
    def open(self) -> int:
        """Number of open connections."""
        return len(self._pipes)

    # -- faults ----------------------------------------------------------------------------------

    def reset(self, chosen: Callable[[], bool] = lambda: True) -> int:
        """Reset open connections; returns how many."""
        pipes = self._choose(chosen)
        for pipe in pipes:
            pipe.abort()
        self.resets += len(pipes)
        return len(pipes)

    def deafen(self, seconds: float, chosen: Callable[[], bool] = lambda: True) -> int:
        """Half-open: both ends consider the connection open, but nothing arrives."""
        pipes = self._choose(chosen)
        for pipe in pipes:
            pipe.deaf_until = _now() + seconds
        return len(pipes)

    def hold_back(self, seconds: float, chosen: Callable[[], bool] = lambda: True) -> int:
        """Delay what clients send by this time, even if they give up meanwhile."""
        pipes = self._choose(chosen)
        for pipe in pipes:
            pipe.late_until = _now() + seconds
        return len(pipes)

    def delay(self, seconds: float, chosen: Callable[[], bool] = lambda: True) -> int:
        """Add latency in both directions until the connection ends."""
        pipes = self._choose(chosen)
        for pipe in pipes:
            pipe.delay_s = seconds
        return len(pipes)

    def cut_replies(self, holding: bytes, count: int = 1, *, silently: bool = False) -> None:
        """Drop the replies to the next requests that contain these bytes.

        The server has executed them, but the client cannot know. Its connection is then reset, or
        stays silent (``silently``).
        """
        self._cut_on, self._cuts_left, self._silently = holding, count, silently

    def choke(self, seconds: float) -> int:
        """Read nothing from the server, like a client that is too slow.

        It first resets the connections, because the kernel's buffers of a used connection could
        absorb the whole pause. It reads from new ones only in their first moments.
        """
        self._choked_until = _now() + seconds
        return self.reset()

    def heal(self) -> None:
        """Undo the faults of open connections."""
        self._choked_until = 0.0
        self._cuts_left = 0
        for pipe in self._pipes:
            pipe.deaf_until = pipe.late_until = pipe.paused_until = pipe.delay_s = 0.0

    def _choose(self, chosen: Callable[[], bool]) -> list[_Pipe]:
        return [pipe for pipe in list(self._pipes) if chosen()]

    # -- forwarding ------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer))
        self._handlers[task] = writer
        task.add_done_callback(self._handlers.pop)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        pipe = _Pipe((reader, writer), server)
        if _now() < self._choked_until:
            pipe.paused_from = _now() + _FIRST_MOMENTS_S
            pipe.paused_until = self._choked_until
        self._pipes.add(pipe)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send_up(pipe))
                group.create_task(self._send_down(pipe))
        except* (OSError, EOFError):
            pass
        except* asyncio.CancelledError:
            pass  # the proxy closes; asyncio's server would report it as an error
        finally:
            self._pipes.discard(pipe)
            for _, side in (pipe.client, pipe.server):
                side.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._narrow:
            return await asyncio.open_connection(*self._upstream)
        sock = socket.socket()
        try:
            sock.setblocking(False)
            # The sender sizes its buffer by the segment: both must be small to fill up soon.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NARROW)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1024)
            await asyncio.get_running_loop().sock_connect(sock, self._upstream)
            return await asyncio.open_connection(sock=sock, limit=_NARROW)
        except BaseException:
            sock.close()
            raise

    async def _send_up(self, pipe: _Pipe) -> None:
        """From the client to the server."""
        reader, writer = pipe.client[0], pipe.server[1]
        while data := await reader.read(_READ):
            if self._cuts_left and self._cut_on in data:
                self._cuts_left -= 1
                pipe.cutting, pipe.silently = True, self._silently
            await _wait_until(lambda: pipe.late_until)
            await _sleep(pipe.delay_s)
            if _now() >= pipe.deaf_until:
                writer.write(data)
                await writer.drain()
        # In a half-open connection the server does not notice the client's end either.
        await _wait_until(lambda: pipe.deaf_until)
        raise EOFError

    async def _send_down(self, pipe: _Pipe) -> None:
        """From the server to the client."""
        reader, writer = pipe.server[0], pipe.client[1]
        resumed_at = -_CUT_SHOWS_S
        while True:
            if pipe.paused_from <= _now() < pipe.paused_until:
                await _wait_until(lambda: pipe.paused_until)
                resumed_at = _now()
            try:
                data = await reader.read(_READ)
            except OSError:
                data = b""
            if not data:
                self.server_cuts += _now() - resumed_at < _CUT_SHOWS_S
                raise EOFError
            if pipe.cutting:
                self.cuts += 1
                if not pipe.silently:
                    pipe.abort()
                    raise EOFError
                pipe.cutting = False
                pipe.deaf_until = _now() + _SILENT_S
            await _sleep(pipe.delay_s)
            if _now() >= pipe.deaf_until:
                writer.write(data)
                await writer.drain()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _sleep(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)


async def _wait_until(when: Callable[[], float]) -> None:
    # heal() may change the time meanwhile, so there is no event to wait for.
    while (left := when() - _now()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(min(left, 0.1))
