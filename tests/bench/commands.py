"""Runs ``penstock bench`` in forks of a process that has imported torch and transformers."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.producer.cli.app import main

TIMEOUT_S = 110

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    # The second one names the classes of transformers that most benchmarks use.
    ["penstock.tools.bench.engine.engine_only", "penstock.tools.bench.speculation.bench_models"]
)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``penstock bench`` with these arguments."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "stdout"), Path(folder, "stderr")
        process = _PROCESSES.Process(target=_run, args=(["bench", *arguments], *paths))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), TIMEOUT_S)
        out, err = (path.read_text() for path in paths)
    return subprocess.CompletedProcess(arguments, process.exitcode, out, err)


def _run(arguments: list[str], out: Path, err: Path) -> None:
    sys.stdout, sys.stderr = out.open("w"), err.open("w")
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
