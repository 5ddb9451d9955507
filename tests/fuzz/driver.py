"""``make fuzz``: malformed cases at every entrance, a million in all, resumable.

    python tests/fuzz/driver.py --cases 1000000 [TARGET ...]

The cases are shared out by :data:`SHARES`, so that a slow target takes no longer than a fast one.
Case N of a target is made by a dice with the seed ``TARGET:N``, so that a case is named by its
number. Each target's next number is kept in ``.fuzz/progress.json``. What fails is written to
``.fuzz/TARGET-N.txt``, with the case and the error; whoever mends it adds the case to
``corpus.py``. A batch that takes two minutes hangs. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fuzz.live_worker import LiveWorker  # noqa: E402
from fuzz.script_calls import Scripts  # noqa: E402
from fuzz.targets import (  # noqa: E402
    Checkpoints,
    Constraints,
    Entries,
    Events,
    Payloads,
    Readers,
    SettingsTrees,
    Target,
    Values,
)

STATE = HERE.parents[1] / ".fuzz"
HANG_S = 120.0
SLICE = 20_000

SHOW_S = 20.0

TARGETS: dict[str, Callable[[], Target]] = {
    "payloads": Payloads, "entries": Entries, "values": Values, "events": Events,
    "readers": Readers, "settings": SettingsTrees, "scripts": Scripts, "worker": LiveWorker,
    "checkpoints": Checkpoints, "constraints": Constraints,
}  # fmt: skip

SHARES = {
    "payloads": 200, "entries": 150, "values": 160, "events": 150, "readers": 100, "settings": 30,
    "scripts": 180, "worker": 24, "checkpoints": 2, "constraints": 4,
}  # fmt: skip
"""Of 1,000 cases, about in proportion to how many the target runs a second."""


def run_slice(name: str, first: int, count: int, seconds: float, pipe: Any) -> None:
    """Run cases ``[first, first + count)`` or as many as there is time for; report each batch."""
    faulthandler.enable()
    target = TARGETS[name]()
    target.open()
    give_up, at = time.monotonic() + seconds, first
    try:
        while at < first + count and time.monotonic() < give_up:
            stop = min(at + target.batch, first + count)
            numbered = [(n, target.case(random.Random(f"{name}:{n}"))) for n in range(at, stop)]
            began = [at]
            failures = []
            try:
                target.run_batch(numbered, began)
            except Exception:
                failures.append(failure(name, numbered, began[0], traceback.format_exc()))
                target.close()
                target = TARGETS[name]()
                target.open()
            # What follows a failure in its batch is run, too, but for itself.
            stop = began[0] + 1 if failures and type(target).run_batch is Target.run_batch else stop
            at = stop
            pipe.send((at, failures, getattr(target, "worst_gap_s", 0.0)))
    finally:
        target.close()


def failure(name: str, cases: list[tuple[int, Any]], number: int, trace: str) -> str:
    """Write a failed case down; returns its file."""
    STATE.mkdir(exist_ok=True)
    file = STATE / f"{name}-{number}.txt"
    case = dict(cases).get(number)
    file.write_text(f"{case!r}\n\n{trace}", errors="backslashreplace")
    return str(file)


class Progress:
    """The next number of each target."""

    def __init__(self) -> None:
        self._file = STATE / "progress.json"
        self.next: dict[str, int] = {}
        if self._file.exists():
            self.next = json.loads(self._file.read_text())

    def save(self, name: str, at: int) -> None:
        """Note how far a target has come."""
        self.next[name] = at
        STATE.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(self.next))


def fuzz(name: str, cases: int, seconds: float, progress: Progress) -> tuple[int, list[str], float]:
    """Run one target in processes of its own; returns cases run, failures, and the worst gap."""
    first = at = progress.next.get(name, 0)
    failures: list[str] = []
    worst, give_up, show_at = 0.0, time.monotonic() + seconds, time.monotonic() + SHOW_S
    while at < cases and time.monotonic() < give_up:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        count = min(SLICE, cases - at)
        left = give_up - time.monotonic()
        child = multiprocessing.Process(target=run_slice, args=(name, at, count, left, theirs))
        child.start()
        theirs.close()
        stop = at + count
        while at < stop:
            try:
                if not ours.poll(HANG_S):
                    failures.append(failure(name, [], at, f"hangs within 500 cases from {at} on"))
                    child.kill()
                    at += 500
                    break
                at, found, gap = ours.recv()
            except EOFError:
                child.join()
                if child.exitcode:
                    failures.append(failure(name, [], at, f"the process ended: {child.exitcode}"))
                    at += 500
                break
            failures += found
            worst = max(worst, gap)
            progress.save(name, at)
            if time.monotonic() > show_at:
                show_at = time.monotonic() + SHOW_S
                print(f"{name}: {at} of {cases}, {len(failures)} failures", file=sys.stderr)
        child.join(5)
        child.kill()
    progress.save(name, at)
    return at - first, failures, worst


def main() -> int:
    """Fuzz the targets one after the other; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--cases", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seconds", type=float, default=14_400.0, help="for each target")
    asked = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    progress, bad = Progress(), 0
    names = asked.targets or list(TARGETS)
    whole = sum(SHARES[name] for name in names)
    for name in names:
        began = time.monotonic()
        cases = asked.cases * SHARES[name] // whole
        ran, failures, worst = fuzz(name, cases, asked.seconds, progress)
        took = time.monotonic() - began
        gap = f", neighbours' worst gap {worst:.3f} s" if worst else ""
        print(
            f"{name}: {ran} cases in {took:.0f} s ({ran / max(took, 0.001):.0f} a second), "
            f"{progress.next[name]} in all, {len(failures)} failures{gap}", flush=True,
        )  # fmt: skip
        for file in failures[:20]:
            print(f"  {file}", flush=True)
        bad += len(failures)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
