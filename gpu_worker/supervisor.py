"""``penstock worker``: a small process that keeps one edge process, and its engine, alive.

The moment its child dies, it gives the child's requests back to the queues. Another worker
continues them within milliseconds instead of after the lease. A crash or a kill for want of memory
may be a request's fault, an outside kill is not: it tells them apart. It restarts with backoff. A
child that lives and no longer says so is killed, and counts as crashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.redis.cluster import follow_moved
from penstock.shared.redis.opening import open_client
from penstock.shared.redis.server_check import check_durability
from penstock.shared.scripts.operations import Operations
from penstock.shared.settings import Settings

from .launch import EXIT_BROKEN, EXIT_REFUSED, Launch, describe_exit, stall_limit_s
from .monitoring.heartbeat import SilenceTimer
from .monitoring.logs import configure_logging
from .monitoring.oom import OomWatch, find_counter

__all__ = ["Supervisor", "restart_pause_s"]

_log = logging.getLogger("penstock.supervisor")

_BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_S = 60.0
"""A child that lived this long starts the backoff anew."""

_LONGEST_PAUSE_AFTER_WORK_S = 2.0
"""A child that had requests could serve. If one of them killed it, the cap on blames ends that one
after a few lives, for which the others wait, too."""

_OUTSIDE_KILLS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals sent from outside; a crash raises others. The kernel also sends SIGKILL for want of
memory, which :mod:`.monitoring.oom` notices. Kills by other programs look like kills by hand: a
request that causes them ends by the cap on attempts."""

_LOOK_S = 1.0

_START_S = 120.0
"""A child that has not shown a heartbeat by then will not: its imports take a second or two."""

_CLEAR_S = 10.0


class Supervisor:
    """Runs edge processes, each with its engine, one at a time, until told to stop.

    Args:
        settings: the whole tree; ``redis.url`` is resolved.
        ready_file: passed to the edge process.
    """

    def __init__(self, settings: Settings, ready_file: Path | None = None) -> None:
        self._settings = settings
        self._ready_file = ready_file
        self._stop = asyncio.Event()
        self._oom = OomWatch(None)
        self._group = 0
        self._redis, self._operations = self._connect()

    async def run(self) -> int:
        """Supervise until SIGTERM or SIGINT; returns the exit code.

        0 after a drain; 2 if configuration or model were refused.

        Raises:
            RedisUnavailable: see :func:`check_durability`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        redis = self._settings.redis
        assert redis.url is not None
        keys = Keys(self._settings.queue.model, self._settings.queue.shard)
        await check_durability(redis.url, keys.counters, timeout_s=redis.socket_timeout_s)
        failures = 0
        while True:
            worker_id = new_worker_id(self._settings.worker.name)
            began = time.monotonic()
            code = await self._run_child(worker_id)
            if code in (0, EXIT_REFUSED) or self._stop.is_set():
                return max(0, code)
            starved = code == -signal.SIGKILL and self._oom.killed_lately()
            returned = await self._release(worker_id, blame=starved or _is_crash(code), died=True)
            await self._clear()
            failures = 0 if time.monotonic() - began > _STABLE_S else failures + 1
            pause = restart_pause_s(failures, returned)
            why = describe_exit(code) + (", killed for want of memory" if starved else "")
            # The edge ends as its engine did, and has logged why. tools/chaos reads this line.
            _log.error("edge process ended (%s); restarting in %g s", why, pause)
            try:
                await asyncio.wait_for(self._stop.wait(), pause)
            except TimeoutError:
                continue
            return 0

    async def _run_child(self, worker_id: str) -> int:
        """Start an edge process and wait for its end; its exit code, negative for a signal."""
        configure_logging(
            worker_id,
            level=self._settings.worker.log_level,
            form=self._settings.worker.log_format,
        )
        read_end, write_end = os.pipe()
        argv = [sys.executable, "-m", "penstock.gpu_worker.edge", str(write_end)]
        # A session of its own: Ctrl-C reaches the supervisor alone, which then asks for a drain.
        child = spawn_bound(argv, stdin=subprocess.PIPE, pass_fds=(write_end,), new_session=True)
        os.close(write_end)
        self._group = child.pid
        assert child.stdin is not None
        child.stdin.write(Launch(self._settings, worker_id, self._ready_file).to_line())
        child.stdin.close()
        with _Heartbeats(read_end, stall_limit_s(self._settings)) as heartbeats:
            code = await self._wait_for_child(child, heartbeats)
        if self._stop.is_set() and code != 0:
            await self._release(worker_id, blame=False, died=False)
        return code

    async def _wait_for_child(self, child: subprocess.Popen[bytes], heartbeats: _Heartbeats) -> int:
        ended = asyncio.create_task(asyncio.to_thread(child.wait))
        stopped = asyncio.create_task(self._stop.wait())
        self._oom = OomWatch(find_counter())
        waiting, hangs = {ended, stopped}, False
        while len(waiting) == 2:
            _, waiting = await asyncio.wait(
                waiting, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
            )
            self._oom.look()
            if not hangs and heartbeats.have_stopped():
                hangs = True
                _log.error("the edge process shows no heartbeat any more; killing it")
                child.kill()
        if not ended.done():
            child.terminate()
            patience = self._settings.worker.drain_timeout_s * 2 + 5
            done, _ = await asyncio.wait({ended}, timeout=patience)
            if not done:
                _log.error("the edge process does not drain; killing it")
                child.kill()
        stopped.cancel()
        code = await ended
        return EXIT_BROKEN if hangs else code

    async def _clear(self) -> None:
        """Wait until the engine of a dead edge is gone, too: the next one needs its memory."""
        deadline = time.monotonic() + _CLEAR_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                # In a container orphans may be this process's to reap. (It does not block.)
                os.waitpid(-self._group, os.WNOHANG)  # noqa: ASYNC222
            try:
                os.killpg(self._group, signal.SIGKILL)
            except ProcessLookupError:
                return
            await asyncio.sleep(0.01)
        _log.warning("an engine process of the dead worker is still there; going on without it")

    async def _release(self, worker_id: str, *, blame: bool, died: bool) -> int:
        """Give its requests back; how many there were, as far as Redis said."""
        try:
            count = await follow_moved(
                lambda: self._operations.release_all(worker_id, blame=blame, died=died)
            )
            _log.warning("gave back %d requests of the dead worker", count)
            return count
        except (PenstockError, RedisError, OSError) as error:
            _log.warning("could not give back its requests (%s); the lease will", error)
            return 0
        finally:
            # Keep no connection: the next death may be far away, and an idle connection may be
            # dead without notice.
            await self._redis.aclose()

    def _connect(self) -> tuple[Redis, Operations]:
        """The client that gives work back, ready beforehand: streams stand still until it does."""
        settings = self._settings
        assert settings.redis.url is not None
        redis = open_client(settings.redis.url, timeout_s=settings.redis.socket_timeout_s)
        keys = Keys(settings.queue.model, settings.queue.shard)
        return redis, Operations(redis, keys, retention_ms=settings.queue.retention_ms)


class _Heartbeats:
    """What a child says on its pipe: a byte several times a second while all its loops turn.

    A context manager, which closes the pipe.

    Args:
        pipe: file descriptor of the read end.
        limit_s: how long it may be silent after its first byte, in seconds.
    """

    def __init__(self, pipe: int, limit_s: float) -> None:
        self._pipe = pipe
        self._limit_s = limit_s
        self._count = 0
        self._timer = SilenceTimer(time.monotonic())
        os.set_blocking(pipe, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._pipe)

    def have_stopped(self) -> bool:
        """Whether it has been silent for too long; to be called about once a second."""
        with contextlib.suppress(BlockingIOError):
            self._count += len(os.read(self._pipe, 1 << 16))
        limit_s = self._limit_s if self._count else max(self._limit_s, _START_S)
        return self._timer.look(self._count, time.monotonic()) > limit_s


def new_worker_id(name: str | None) -> str:
    """An id for one incarnation: name or host, process, and 32 random bits.

    Never reused: a worker with the id of its dead predecessor would keep that lease alive.
    """
    base = name or socket.gethostname().split(".")[0]
    return f"{base}-{os.getpid()}-{secrets.token_hex(4)}"


def restart_pause_s(failures: int, returned: int) -> float:
    """How long to wait before the next child, in seconds.

    Args:
        failures: children in a row that ended soon.
        returned: requests that the last one had.
    """
    pause = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
    return min(pause, _LONGEST_PAUSE_AFTER_WORK_S) if returned else pause


def _is_crash(code: int) -> bool:
    return code > 0 or -code not in _OUTSIDE_KILLS
