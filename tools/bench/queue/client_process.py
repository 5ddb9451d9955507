"""A client process that submits requests, or reads tokens as an application does.

It is a process of its own, because the bench measures the way between two processes. Both use the
system-wide monotonic clock. It takes one line of JSON and answers with another.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio import Redis

from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk
from penstock.shared.protocol.request import Request
from penstock.shared.scripts.operations import Bounds, Operations

__all__ = ["Peer", "ages_of", "stamp"]

_SILENCE_S = 5.0


def stamp() -> str:
    """The current time as text, which travels in a chunk alone or with other stamps."""
    return f"{time.monotonic_ns():x} "


def ages_of(text: str) -> list[int]:
    """Ages of the stamps in a chunk, in ns.

    A chunk holds several stamps where the worker's edge fell behind and published them together.
    """
    now = time.monotonic_ns()
    return [now - int(stamped, 16) for stamped in text.split()]


class Peer:
    """A peer process and its one task.

    Args:
        task: ``submit`` submits ``count`` requests, one every ``pause_ms``, and answers by id with
            the time in ns at which each submit began. ``subscribe`` reads the channels of the
            requests ``ids`` until ``tokens`` tokens came, whose texts are stamps. It answers with
            their ages in ns.
        facts: of the task, and ``url`` and ``model``.
    """

    def __init__(self, task: str, **facts: object) -> None:
        command = [sys.executable, "-m", __spec__.name]
        self._process = spawn_bound(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"task": task, **facts}).encode() + b"\n")
        self._process.stdin.close()

    async def answer(self) -> Any:
        """Wait for the process's answer."""
        stdout = self._process.stdout
        assert stdout is not None
        line = await asyncio.to_thread(stdout.readline)
        await asyncio.to_thread(self._process.wait)
        return json.loads(line)


async def _submit(redis: Redis, keys: Keys, *, count: int, pause_ms: float) -> dict[str, int]:
    operations = Operations(redis, keys)
    began: dict[str, int] = {}
    for index in range(-_WARM_UP, count):
        await asyncio.sleep(pause_ms / 1000)
        request = Request(id=f"idle.{index + _WARM_UP}", prompt=tuple(range(16)))
        at = time.monotonic_ns()
        await operations.submit(request, bounds=Bounds(), default_deadline_ms=600_000)
        if index >= 0:
            began[request.id] = at
    return began


_WARM_UP = 10
"""Uncounted warm-up submits: they open connections and load scripts."""


async def _subscribe(redis: Redis, keys: Keys, *, ids: list[str], tokens: int) -> list[int]:
    ages: list[int] = []
    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(*(keys.channel(request_id) for request_id in ids))
        while len(ages) < tokens:
            message = await pubsub.get_message(timeout=_SILENCE_S)
            if message is None:
                raise TimeoutError(f"only {len(ages)} of {tokens} tokens came")
            if message["type"] != "message":
                continue
            chunk = unpack_event(message["data"])
            assert isinstance(chunk, Chunk)
            ages += ages_of(chunk.text)
    return ages


_TASKS: dict[str, Callable[..., Awaitable[Any]]] = {"submit": _submit, "subscribe": _subscribe}


async def _run(facts: dict[str, Any]) -> Any:
    task, keys = _TASKS[facts.pop("task")], Keys(facts.pop("model"))
    async with Redis.from_url(facts.pop("url")) as redis:
        return await task(redis, keys, **facts)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_run(json.loads(sys.stdin.readline())))))
