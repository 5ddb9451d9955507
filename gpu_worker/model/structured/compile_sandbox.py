"""Compiles constraints in processes that may crash, before the engine process compiles them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

from penstock.shared.local.children import spawn_bound

from .compile_server import (
    CHAT_TEMPLATE,
    COMPILED,
    CONSTRAINT_JOB,
    RENDER_JOB,
    TEMPLATE_JOB,
    TIMED_OUT,
    Setup,
)
from .matcher import ConstraintError

__all__ = ["MEMORY_BYTES", "STACK_BYTES", "CompileSandbox", "UnsafeConstraint"]

_SERVER_PROGRAM = "penstock.gpu_worker.model.structured.compile_server"

STACK_BYTES = 4 << 20
"""Enough for some 1,000 rules, or 400 definitions of a schema, that each name the next."""

MEMORY_BYTES = 512 << 20

_ANY_CONSTRAINT = ("regex", "a")

_READ_BYTES = 1 << 16
_ANSWER_S = 60.0
"""More than the server's own limit: it also has to start, and may be one of many on its machine."""


class UnsafeConstraint(ConstraintError):
    """Compiling it crashed or passed a limit; the message says what to do about it."""


class CompileSandbox:
    """Tells whether a constraint compiles within limits. Thread-safe.

    The compile server is started by :meth:`start` or by the first constraint, again if it has
    ended, and ends with this process.

    Args:
        tokenizer: see :func:`.matcher.word_list`.
        vocab_size: see there.
        eos_token_ids: see there.
        limit_s: seconds that compiling may take.
        stack_bytes: stack that it may take.
        memory_bytes: memory that it may take.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        limit_s: float,
        stack_bytes: int = STACK_BYTES,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._setup = Setup(
            tokenizer, vocab_size, list(eos_token_ids), limit_s, stack_bytes, memory_bytes
        )
        self._lock = threading.Lock()
        self._server: _Server | None = None

    def check(self, field: str, source: str | Sequence[str]) -> None:
        """Compile a constraint, and throw the result away.

        Args:
            field: see :func:`.matcher.compile_matcher`.
            source: see there.

        Raises:
            ConstraintError: it is malformed or unsupported, or describes no text.
            UnsafeConstraint: compiling it crashed or passed a limit.
            RuntimeError: the compile server cannot be started.
        """
        order = json.dumps({"field": field, "source": source}).encode()
        kind = TEMPLATE_JOB if field == CHAT_TEMPLATE else CONSTRAINT_JOB
        answer = self._ask(kind, order)
        if not answer:  # the server is at fault, and not the constraint
            self.close()
            answer = self._ask(kind, order)
        if not answer:
            raise RuntimeError("the compile server does not run; its error is in the log")
        setup = self._setup
        if not answer.strip():
            raise UnsafeConstraint(
                "compiling this one crashed or took more than "
                f"{setup.stack_bytes >> 20} MiB of stack or {setup.memory_bytes >> 20} MiB of "
                "memory: nest it less deeply or make it smaller"
            )
        found = json.loads(answer)
        if found["outcome"] == TIMED_OUT:
            raise UnsafeConstraint(
                f"compiling this one took more than {setup.limit_s:g} s: make it smaller"
            )
        if found["outcome"] != COMPILED:
            raise ConstraintError(found["message"])

    def check_chat_template(self, template: str) -> None:
        """Compile a chat template, and throw the result away; see :meth:`check`."""
        self.check(CHAT_TEMPLATE, template)

    def open_renderer(self) -> socket.socket:
        """The connection to a new process as in :mod:`.render_loop`, which ends with it.

        Raises:
            RuntimeError: the compile server cannot be started.
        """
        for _ in range(2):  # the server may have ended, which is noticed by the first
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._send(RENDER_JOB, theirs)
                return ours
            except OSError:
                ours.close()
                self.close()
        raise RuntimeError("the compile server does not run; its error is in the log")

    def start(self) -> None:
        """Start the server if it does not run; does not wait until it is ready."""
        with self._lock:
            self._running_server()

    def prepare(self) -> None:
        """Start the server if it does not run, and wait until it can compile constraints.

        Its start and the words of a large vocabulary take seconds, which are no constraint's fault.

        Raises:
            RuntimeError: the compile server cannot be started.
        """
        with self._lock:
            server = self._running_server()
        if not server.has_words:
            self.check(*_ANY_CONSTRAINT)

    def close(self) -> None:
        """End the server; a later :meth:`check` starts another."""
        with self._lock:
            if self._server is not None:
                self._server.close()
            self._server = None

    def _ask(self, kind: bytes, order: bytes) -> bytes:
        """The answer to a job; empty if the server has not begun it."""
        ours, theirs = socket.socketpair()
        answer = b""
        with ours, suppress(OSError):  # it died while it read, or does not answer at all
            with theirs:
                server = self._send(kind, theirs)
            ours.settimeout(self._setup.limit_s + _ANSWER_S)
            ours.sendall(order)
            ours.shutdown(socket.SHUT_WR)
            while part := ours.recv(_READ_BYTES):
                answer += part
                server.has_words |= kind == CONSTRAINT_JOB
        return answer

    def _send(self, kind: bytes, job: socket.socket) -> _Server:
        with self._lock:
            server = self._running_server()
            socket.send_fds(server.jobs, [kind], [job.fileno()])
            return server

    def _running_server(self) -> _Server:
        if self._server is None or not self._server.runs():
            self._server = _Server(self._setup)
        return self._server


class _Server:
    """One run of the compile server, which ends when this is closed or collected.

    Attributes:
        has_words: whether it has begun to compile a constraint, for which it needs the words.
    """

    def __init__(self, setup: Setup) -> None:
        self.has_words = False
        self.jobs, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as file:
            file.write(setup.to_json())
            file.seek(0)
            command = [sys.executable, "-m", _SERVER_PROGRAM, str(theirs.fileno())]
            self._process = spawn_bound(command, stdin=file, pass_fds=(theirs.fileno(),))
        self.close = weakref.finalize(self, _end, self.jobs, self._process)

    def runs(self) -> bool:
        return self._process.poll() is None


def _end(jobs: socket.socket, process: subprocess.Popen[bytes]) -> None:
    jobs.close()  # the server reads the end of file
    process.wait()
