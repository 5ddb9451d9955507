"""The compile server: a program that compiles each constraint in a process of its own.

A constraint is untrusted input to native code, and a few kilobytes of it can overflow a stack. A
chat template can make its compiler compute without end. So both are compiled here first, under
limits, in a process that may crash. The server forks one process for each of them. It has one
thread and little memory, so a fork is safe, takes about a millisecond, and shares the words of the
model's tokenizer.

The argument is the descriptor of a Unix socket. Standard input brings one JSON object, see
:class:`Setup`. Each message on the socket is one byte, the kind of a job, and a descriptor: the
socket of that job. The first constraint makes the words; some vocabularies take a minute, and most
workers never need them.

A rendering job is a conversation: see :mod:`.render_loop`. Any other is a JSON object of ``field``
and ``source`` up to the end of file. The answer is a newline once the job has a process, and then a
JSON object of ``outcome`` and ``message``. A process that crashes sends only the newline.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from llguidance import LLTokenizer

from .chat_template import compile_chat_template
from .matcher import ConstraintError, compile_matcher, word_list
from .render_loop import serve_renders

__all__ = [
    "CHAT_TEMPLATE",
    "COMPILED",
    "CONSTRAINT_JOB",
    "REFUSED",
    "RENDER_JOB",
    "TEMPLATE_JOB",
    "TIMED_OUT",
    "Setup",
    "main",
]

COMPILED, REFUSED, TIMED_OUT = "compiled", "refused", "timed out"
CHAT_TEMPLATE = "chat_template"
"""The ``field`` of a job that is no constraint."""
CONSTRAINT_JOB, TEMPLATE_JOB, RENDER_JOB = b"c", b"t", b"r"

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Setup:
    """What the server is told once.

    Attributes:
        tokenizer: see :func:`.matcher.word_list`.
        vocab_size: see there.
        eos_token_ids: see there.
        limit_s: seconds that compiling may take, of a clock and of the CPU.
        stack_bytes: stack of a compiling thread.
        memory_bytes: address space that compiling may take.
    """

    tokenizer: str
    vocab_size: int
    eos_token_ids: list[int]
    limit_s: float
    stack_bytes: int
    memory_bytes: int

    def to_json(self) -> bytes:
        """For standard input."""
        return json.dumps(asdict(self)).encode()


def main() -> int:
    """Serve until the socket is closed; returns the exit code."""
    jobs = socket.socket(fileno=int(sys.argv[1]))
    setup = Setup(**json.load(sys.stdin.buffer))
    words: LLTokenizer | None = None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the owner's affair
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    prctl = _prctl()
    server = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(jobs, 1, 1)
        if not data:
            return 0
        job = socket.socket(fileno=descriptors[0])
        if data == CONSTRAINT_JOB and words is None:
            with suppress(ConstraintError):  # the engine process then refuses the constraint itself
                words = word_list(setup.tokenizer, setup.vocab_size, setup.eos_token_ids)
        try:
            pid = os.fork()
        except OSError:
            pid = -1  # the machine is out of processes: this job gets no answer
        if pid == 0:
            if prctl is not None:
                prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() == server:
                jobs.close()
                os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # crashes are told to the client
                if data == RENDER_JOB:
                    _limit_memory(setup)
                    serve_renders(job)
                else:
                    _compile(job, words, setup)
            os._exit(0)
        job.close()


def _compile(job: socket.socket, words: LLTokenizer | None, setup: Setup) -> None:
    """In a process of its own."""
    _limit_time(setup)
    _limit_memory(setup)
    data = b""
    while part := job.recv(_READ_BYTES):
        data += part
    order = json.loads(data)
    job.sendall(b"\n")
    answer = {"outcome": TIMED_OUT, "message": ""}

    def work() -> None:
        try:
            if order["field"] == CHAT_TEMPLATE:
                compile_chat_template(order["source"])
            elif words is not None:
                compile_matcher(words, order["field"], order["source"])
            answer["outcome"] = COMPILED
        except ConstraintError as error:
            answer.update(outcome=REFUSED, message=str(error))
        except BaseException:  # a panic of the library is no Exception
            os._exit(1)

    threading.stack_size(setup.stack_bytes)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(setup.limit_s)
    with suppress(OSError):
        job.sendall(json.dumps(answer).encode())


def _limit_time(setup: Setup) -> None:
    # The thread is waited for no longer than `limit_s`. Should it hold the interpreter lock, then
    # the kernel ends the process a second later.
    signal.setitimer(signal.ITIMER_REAL, setup.limit_s + 1)
    _limit(resource.RLIMIT_CPU, int(setup.limit_s) + 1)


def _limit_memory(setup: Setup) -> None:
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_AS, _address_space() + setup.memory_bytes)


def _limit(kind: int, value: int) -> None:
    with suppress(ValueError, OSError):  # a lower limit is set already, or the system has none
        resource.setrlimit(kind, (value, value))


def _address_space() -> int:
    """Bytes of this process; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def _prctl() -> Callable[..., int] | None:
    """Where there is none (not on Linux), a fork outlives the server by its time limit at most."""
    return ctypes.CDLL(None).prctl if sys.platform == "linux" else None


if __name__ == "__main__":
    sys.exit(main())
