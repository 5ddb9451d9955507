"""Real workers behind a proxy, requests whose right output is known, and a verdict on them all."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.shared.scripts.script_loader import load_script
from penstock.tools.chaos.checks.final_checks import check_end_state, drain_workers
from penstock.tools.chaos.checks.storm_counts import Findings
from penstock.tools.chaos.environment import Environment, open_environment
from penstock.tools.chaos.faults.worker_fleet import Machine
from penstock.tools.chaos.options import StormOptions
from penstock.tools.chaos.storm.run_case import CaseRunner
from penstock.tools.chaos.storm.storm_requests import Case, SyntheticOracle, Workload

ON_TIME_MS = 10_000


@dataclass
class Rig:
    """What a directed fault test works with."""

    env: Environment
    options: StormOptions
    findings: Findings = field(default_factory=Findings)
    number: int = 0
    started: int = 0

    def cases(self, count: int, **changes: Any) -> list[Case]:
        """Cases that are to be completed; ``changes`` replace fields of each."""
        oracle = SyntheticOracle(self.options.tokens)
        workload = Workload(oracle, self.options.seed, 1.0, slow=False)
        found: list[Case] = []
        while len(found) < count:
            case = workload.case(self.number)
            self.number += 1
            if case.cancel_after_s is None and not case.may_expire:
                found.append(replace(case, **changes))
        return found

    def start(self, cases: Sequence[Case]) -> asyncio.Task[None]:
        """Submit, read and judge cases side by side."""

        async def run() -> None:
            runner = CaseRunner(self.env, self.findings, ends_by=lambda due_ms: due_ms + ON_TIME_MS)
            await asyncio.gather(*(runner.run(case) for case in cases))

        self.started += len(cases)
        return asyncio.create_task(run())

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition, which may be a coroutine, and replace machines meanwhile."""
        deadline = asyncio.get_running_loop().time() + 60
        while True:
            holds = condition()
            if await holds if inspect.isawaitable(holds) else holds:
                return
            assert asyncio.get_running_loop().time() < deadline, f"not within 60 s: {what}"
            self.env.fleet.replace_ended()
            await asyncio.sleep(0.002)

    async def owned(self, machine: Machine) -> list[str]:
        """Requests that a machine's engine owns."""
        name = machine.worker_id
        if name is None:
            return []
        key = self.env.keys.owned(name)
        return [raw.decode() for raw in await self.env.direct.redis.hkeys(key)]

    async def busy(self) -> Machine | None:
        """A machine that owns a request, if there is one."""
        for machine in self.env.fleet.machines:
            if machine.ready and await self.owned(machine):
                return machine
        return None

    async def attempts(self, request_id: str) -> int:
        """How often a request was claimed."""
        key = self.env.keys.request(request_id)
        return int(await self.env.direct.redis.hget(key, "attempts"))

    async def end(self) -> None:
        """Send the workers home; nothing may be wrong, and nothing may be left."""
        await drain_workers(self.env, self.findings)
        await check_end_state(self.env, self.findings, exclusive=True)
        self.check()

    def check(self) -> None:
        """Nothing was wrong so far."""
        assert not self.findings.found, "\n".join(map(str, self.findings.violations))


@contextlib.asynccontextmanager
async def open_rig(folder: Path, **options: Any) -> AsyncIterator[Rig]:
    """A rig with workers that serve; options as for :class:`StormOptions`."""
    given: dict[str, Any] = {"faults": frozenset(), "workers": 2, "in_flight": 16, "step_ms": 5.0}
    chosen = StormOptions(**{**given, "tokens": 60, "lease_ms": 1000, **options})
    async with open_environment(chosen, folder) as env:
        yield Rig(env, chosen)


def digest_of(script: str) -> bytes:
    """What a request that runs this script holds."""
    return load_script(script).digest.encode()


def mutated(folder: Path, path: str, old: str, new: str) -> str:
    """A search path on which penstock is this tree with one piece of text replaced.

    Compiled modules come with it, since each process that starts there would compile them anew.
    """
    package = folder / "site" / "penstock"
    package.mkdir(parents=True)
    changed = path.split("/")[0]
    for part in ("gpu_worker", "kernels", "producer", "shared", "tools"):
        (installed,) = import_module(f"penstock.{part}").__path__
        if part == changed:
            shutil.copytree(installed, package / part)
        else:
            (package / part).symlink_to(installed)
    change(str(folder / "site"), path, old, new)
    return str(folder / "site")


def change(site: str, path: str, old: str, new: str) -> None:
    """Replace text in a file that :func:`mutated` has copied."""
    file = Path(site) / "penstock" / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
