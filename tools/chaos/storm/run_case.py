"""Runs one request of a storm: submits it, reads it in every way, and perhaps cancels it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

from penstock.shared.errors import IdConflict
from penstock.shared.protocol.states import State

from ..checks.storm_counts import Findings, Invariant
from ..checks.verdict import EndsBy, judge
from ..environment import Environment
from .readers import Reading, read_jumping, read_returning, read_straight
from .storm_requests import Case, changed_payload, request_fields

__all__ = ["CaseRunner"]

_RETURN_PAUSE_S = 0.4


class CaseRunner:
    """Runs cases and judges them.

    Args:
        env: of the storm.
        findings: takes counts and violations.
        ends_by: the latest end of a request that is due at a time, both in ms of Redis' clock;
            None: not known yet.
    """

    def __init__(self, env: Environment, findings: Findings, *, ends_by: EndsBy) -> None:
        self._client = env.client
        self._slow_client = env.slow_client
        self._direct = env.direct
        self._keys = env.keys
        self._findings = findings
        self._ends_by = ends_by

    async def run(self, case: Case) -> None:
        """Run a case to its end and judge it.

        Raises:
            PenstockError: the client could not do its part.
        """
        rng = random.Random(case.seed + "/readers")
        await self._submit(case)
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(work) for work in self._readers(case, rng)]
            cancel = group.create_task(self._cancel(case))
            if case.conflicts:
                group.create_task(self._conflict(case))
        late = await read_straight(self._client, case.id, "late")
        await self._submit_again(case, late)
        judge(
            case,
            [task.result() for task in readers],
            late,
            await self._record(case.id),
            self._findings,
            cancelled=cancel.result(),
            ends_by=self._ends_by,
        )

    async def _submit(self, case: Case) -> None:
        """Submit the request, perhaps several times at once: it must run once."""
        fields = request_fields(case.request)
        answers = await asyncio.gather(
            *(self._client.submit(**fields) for _ in range(1 + case.duplicates))
        )
        self._findings.counts["duplicate_submits"] += case.duplicates
        # None, if the reply to the first was lost and it was sent again.
        fresh = [answer for answer in answers if not answer.duplicate]
        if len(fresh) > 1:
            self._findings.violated(
                Invariant.ONE_END, case.id, f"{len(fresh)} submits of it were new at the same time"
            )

    async def _submit_again(self, case: Case, late: Reading) -> None:
        """After the end, the same submit returns the state and starts nothing."""
        if not case.duplicates or late.end is None:
            return
        answer = await self._client.submit(**request_fields(case.request))
        if not answer.duplicate or answer.state is not late.end.state:
            self._findings.violated(
                Invariant.ONE_END, case.id, f"has ended {late.end.state}; a submit says {answer}"
            )

    def _readers(self, case: Case, rng: random.Random) -> list[Coroutine[Any, Any, Reading]]:
        works = [read_straight(self._client, case.id, "live")]
        works += [
            read_returning(self._client, case.id, rng, _RETURN_PAUSE_S)
            for _ in range(case.returning)
        ]
        most = case.request.options.max_tokens
        works += [
            read_jumping(self._client, case.id, rng.randint(1, most)) for _ in range(case.jumping)
        ]
        if case.slow:
            works.append(read_straight(self._slow_client, case.id, "slow"))
        return works

    async def _cancel(self, case: Case) -> bool:
        """Cancel the request if the case says so; returns whether the cancel ended it."""
        if case.cancel_after_s is None:
            return False
        await asyncio.sleep(case.cancel_after_s)
        reply = await self._client.cancel(case.id)
        self._findings.counts["cancels"] += 1
        return reply.changed or reply.state is State.CANCELLED

    async def _conflict(self, case: Case) -> None:
        fields = request_fields(case.request) | changed_payload(case.request)
        try:
            answer = await self._client.submit(**fields)
        except IdConflict:
            self._findings.counts["conflicts_refused"] += 1
        else:
            self._findings.violated(
                Invariant.ONE_END, case.id, f"another payload under its id was taken: {answer}"
            )

    async def _record(self, request_id: str) -> dict[str, str]:
        async def send() -> dict[bytes, bytes]:
            record: dict[bytes, bytes] = await self._direct.redis.hgetall(  # type: ignore[misc]
                self._keys.request(request_id)
            )
            return record

        record = await self._direct.call(send)
        return {
            name.decode(): value.decode(errors="replace")
            for name, value in record.items()
            if name not in (b"payload", b"end", b"digest")
        }
