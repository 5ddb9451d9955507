"""The requests that count as running here for the limits of API keys, until each is settled.

A request may outlive its gateway. Then the next gateway that its key calls looks after it: the name
of its lease says which request it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping

from penstock.shared.errors import PenstockError
from penstock.shared.local.tasks import end_tasks

from ...results import Status
from .callers import Used, tokens_of
from .limit_scripts import LimitScripts

__all__ = ["Locate", "RunningRequests", "lease_of"]

_log = logging.getLogger("penstock.gateway")

_SETTLE_EVERY_S = 1.0

Locate = Callable[[str], Awaitable[tuple[object, Status] | None]]
"""Finds a request, and its state, by its id; None if nothing is known of it."""


def lease_of(request_id: str) -> str:
    """A lease's name, which is unique and names its request."""
    return f"{uuid.uuid4().hex}.{request_id}"


class RunningRequests:
    """Leases of this process: renewed while their requests run, then settled.

    Args:
        scripts: makes the scripts' calls.
        lease_ms: how long a lease holds.
        locate: finds requests of gateways that ended.
    """

    def __init__(self, scripts: LimitScripts, lease_ms: int, locate: Locate) -> None:
        self._scripts = scripts
        self._lease_ms = lease_ms
        self._locate = locate
        self._leases: dict[str, set[str]] = {}
        self._unattended: dict[str, tuple[str, Used]] = {}
        self._claiming: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to renew and to settle; in the event loop that uses it."""
        self._spawn(self._renew())
        self._spawn(self._settle_unattended())

    async def aclose(self) -> None:
        """End. What still runs counts as running until another gateway finds its end."""
        await end_tasks(self._tasks)

    def hold(self, key_id: str, lease: str, headers: Mapping[str, str]) -> Held:
        """The permission of a request that was admitted just now."""
        self._leases.setdefault(key_id, set()).add(lease)
        return Held(self._release, key_id, lease, headers)

    def claim(self, key_id: str) -> None:
        """Take over what gateways that ended have left of a key."""
        if key_id not in self._claiming:
            self._claiming.add(key_id)
            self._spawn(self._claim(key_id))

    async def _claim(self, key_id: str) -> None:
        try:
            for lease, cost in await self._scripts.claim(key_id, lease_ms=self._lease_ms):
                self._leases.setdefault(key_id, set()).add(lease)
                used = functools.partial(self._used_by, lease, cost)
                self._unattended[lease] = key_id, used
        except PenstockError as error:
            _log.warning("what another gateway left could not be taken over: %s", error)
        finally:
            self._claiming.discard(key_id)

    async def _used_by(self, lease: str, cost: int) -> int | None:
        """See :data:`..callers.Used`; where nothing is known any more the estimate stays."""
        request_id = lease.partition(".")[2]
        found = await self._locate(request_id) if request_id else None
        if found is None:
            return cost
        end = found[1].end
        return None if end is None else tokens_of(end)

    async def _release(self, key_id: str, lease: str, used: Used | None) -> None:
        """End an admission: of a request that was never submitted, or has used this much.

        A request that goes on without its client counts as running until it has ended.
        """
        if used is None:
            await self._settle(key_id, lease, submitted=False, used=0)
            return
        self._unattended[lease] = key_id, used
        with contextlib.suppress(PenstockError):
            await self._settle_if_ended(lease)

    async def _settle_unattended(self) -> None:
        """Every second, look for the ends of requests that no answer waits for."""
        while True:
            await asyncio.sleep(_SETTLE_EVERY_S)
            for lease in list(self._unattended):
                with contextlib.suppress(PenstockError):
                    await self._settle_if_ended(lease)

    async def _settle_if_ended(self, lease: str) -> None:
        if lease not in self._unattended:
            return
        key_id, used = self._unattended[lease]
        tokens = await used()
        if tokens is not None:
            self._unattended.pop(lease, None)
            await self._settle(key_id, lease, submitted=True, used=tokens)

    async def _settle(self, key_id: str, lease: str, *, submitted: bool, used: int) -> None:
        leases = self._leases.get(key_id, set())
        leases.discard(lease)
        if not leases:
            self._leases.pop(key_id, None)
        try:
            await self._scripts.settle(key_id, lease, submitted=submitted, used=used)
        except PenstockError as error:
            _log.warning("a request of %s is settled later: %s", key_id, error)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._lease_ms / 3000)
            leases = {key_id: sorted(names) for key_id, names in self._leases.items()}
            try:
                await self._scripts.renew(leases, lease_ms=self._lease_ms)
            except PenstockError as error:
                _log.warning("what runs could not be renewed: %s", error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Held:
    """The permission for one request; see :class:`..callers.Admission`."""

    def __init__(
        self, release: Callable[[str, str, Used | None], Awaitable[None]], key_id: str, lease: str,
        headers: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._release = release
        self._key_id = key_id
        self._lease = lease
        self._used: Used | None = None
        self._is_held = True
        self.headers = headers

    def bind(self, used: Used) -> None:
        """See :class:`..callers.Admission`."""
        self._used = used

    async def release(self) -> None:
        """See :class:`..callers.Admission`."""
        if self._is_held:
            self._is_held = False
            await self._release(self._key_id, self._lease, self._used)
