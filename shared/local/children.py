"""Child processes that cannot outlive the process that started them, not even by ``kill -9``.

On Linux a small launcher requests a parent-death signal from the kernel and checks that the parent
still lives. Then it becomes the wanted program with ``exec``: same process id, no process in
between. It does not use ``preexec_fn``, which is unsafe in a process with threads.

The kernel ties the signal to the *thread* that started the child. A call outside the main thread
therefore starts the child from a dedicated thread, which lives as long as the child. Callers may
use ``asyncio.to_thread`` and thread pools freely.

Without ``prctl`` the launcher leaves a watcher process behind, which holds the read end of a pipe.
End of file means that the owner has ended.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO

__all__ = ["spawn_bound"]

_File = int | IO[bytes] | None

# `python -I -S -c` runs both launchers with: owner's pid, signal, pipe or -1, program, argv.
# Python ignores SIGPIPE and SIGXFSZ; the program must not inherit that over exec.
_PRELUDE = """\
import os, signal, sys
owner, death_signal, pipe = (int(a) for a in sys.argv[1:4])
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
"""

_BIND_BY_PRCTL = (
    _PRELUDE
    + """\
import ctypes
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG): " + os.strerror(ctypes.get_errno()))
if os.getppid() != owner:
    sys.exit(0)  # the owner died before the signal was armed
os.execv(sys.argv[4], sys.argv[5:])
"""
)

# The watcher is a child of the program: if its parent changes, the program has ended.
_BIND_BY_PIPE = (
    _PRELUDE
    + """\
import select
program = os.getpid()
if os.fork() == 0:
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)  # else a reader of the program's output would wait for us, too
    os.closerange(3, pipe)
    os.closerange(pipe + 1, 1 << 16)
    while os.getppid() == program:
        if select.select([pipe], [], [], 0.5)[0]:
            if os.getppid() == program:
                os.kill(program, death_signal)
            break
    os._exit(0)
os.close(pipe)
os.execv(sys.argv[4], sys.argv[5:])
"""
)


def spawn_bound(
    argv: Sequence[str],
    *,
    stdin: _File = None,
    stdout: _File = None,
    stderr: _File = None,
    env: dict[str, str] | None = None,
    cwd: str | Path | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
    death_signal: signal.Signals = signal.SIGKILL,
    use_pipe: bool | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program that ends with the process that started it.

    Args:
        argv: the program and its arguments; the program is looked up on ``PATH``.
        stdin: as for :class:`subprocess.Popen`, like the next four.
        stdout: see ``stdin``.
        stderr: see ``stdin``.
        env: see ``stdin``.
        cwd: see ``stdin``.
        pass_fds: see ``stdin``.
        new_session: detach from the terminal, so that Ctrl-C reaches the owner alone, which then
            ends the child in its own order.
        death_signal: the signal that the child gets when its owner dies. A signal that the child
            handles or ignores weakens the promise.
        use_pipe: watch a pipe instead of using ``prctl``; None uses ``prctl`` where it exists.

    Returns:
        The running program; ``pid`` is its own id, not a launcher's. Keep the object as long as
        the child is needed: with the pipe, dropping the object ends the child.

    Raises:
        FileNotFoundError: there is no such program.
    """
    program = shutil.which(argv[0])
    if program is None:
        raise FileNotFoundError(f"no program {argv[0]!r} on PATH")
    if use_pipe is None:
        use_pipe = not _has_prctl()

    def start(source: str, pipe: int, fds: Sequence[int]) -> subprocess.Popen[bytes]:
        facts = [str(os.getpid()), str(int(death_signal)), str(pipe)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", source, *facts, os.path.abspath(program), *argv],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            pass_fds=fds,
            start_new_session=new_session,
        )

    if not use_pipe:
        return _from_lasting_thread(lambda: start(_BIND_BY_PRCTL, -1, pass_fds))
    read_end, write_end = os.pipe()
    try:
        child = start(_BIND_BY_PIPE, read_end, [*pass_fds, read_end])
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    weakref.finalize(child, os.close, write_end)
    return child


def _has_prctl() -> bool:
    # A Python built without libffi has no ctypes.
    return sys.platform == "linux" and importlib.util.find_spec("_ctypes") is not None


def _from_lasting_thread(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a child from a thread that lives as long as the child."""
    if threading.current_thread() is threading.main_thread():
        return start()
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            child = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(child)
        # Waits without reaping: the exit status stays for the caller's poll() or wait(). If the
        # caller was faster, the child no longer exists.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=keep, name="penstock-child-owner", daemon=True).start()
    return started.result()
