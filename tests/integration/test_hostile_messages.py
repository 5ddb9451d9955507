"""Every message that once escaped a boundary, sent to a worker beside a neighbour's stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from fuzz.corpus import ENTRIES, PAYLOADS
from redis.asyncio import Redis
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import Reason, State
from penstock.shared.synthetic import synthetic_tokens

KEYS = Keys("demo")
TOKENS = 400


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, WorkerProcess]]:
    with EmbeddedRedis(password="") as server:
        factory = WorkerFactory(server.url, tmp_path_factory.mktemp("worker"))
        worker = factory.engine("w", model__path="synthetic", model__synthetic_step_ms=1)
        yield server.url, worker
        factory.close()


async def neighbour(producer: Producer) -> str:
    """Start a stream that runs while the hostile messages come."""
    return (await producer.submit("neighbour", max_tokens=TOKENS, ignore_eos=True)).id


async def check_neighbour(producer: Producer, id: str, worker: WorkerProcess) -> None:
    """The neighbour's stream is exact, and the worker is the same process and healthy."""
    result = await producer.result(id, timeout=60)
    expected = synthetic_tokens(Request(id=id, prompt="x").seed, [*b"neighbour"], TOKENS)
    assert result.token_ids == tuple(expected)
    assert worker.process.poll() is None
    log = worker.log.read_text()
    assert "Traceback" not in log
    assert "\nERROR forged" not in log


async def test_payloads_fail_alone(
    served: tuple[str, WorkerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each goes through submit.lua, which does not look into a payload."""
    url, worker = served
    async with Producer(url) as producer:
        beside = await neighbour(producer)
        ids = []
        for payload in PAYLOADS.values():
            with monkeypatch.context() as patch:
                patch.setattr(Request, "pack", lambda self, payload=payload: payload)
                ids.append((await producer.submit("replaced by the payload")).id)
        for name, id in zip(PAYLOADS, ids, strict=True):
            result = await producer.result(id, timeout=60, check=False)
            assert (result.state, result.reason) == (State.FAILED, Reason.INVALID), name
            assert len(result.end.message) < 3000, name
        await check_neighbour(producer, beside, worker)


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.slow)])
async def test_long_entries_hold_up_no_neighbour(
    served: tuple[str, WorkerProcess], count: int
) -> None:
    """Entries of 262,144 token ids are parsed a few at a time, between the turns of the others."""
    url, worker = served
    async with Producer(url) as producer, Redis.from_url(url) as redis:
        beside = await producer.submit("neighbour", max_tokens=60_000, ignore_eos=True)
        stream = producer.stream(beside.id)
        await anext(stream)
        ids = f"[{'1,' * 262_143}1]"
        names = [f"long{count}-{number}" for number in range(count)]
        pipe = redis.pipeline(transaction=False)
        for name in names:
            pipe.xadd(KEYS.ingress(), {"id": name, "prompt_ids": ids, "max_tokens": "1"})
        began = last = time.monotonic()
        await pipe.execute()
        worst = 0.0
        async for _ in stream:
            now = time.monotonic()
            worst, last = max(worst, now - last), now
            if await redis.exists(*map(KEYS.request, names)) == count:
                break
        took = time.monotonic() - began
        assert worst < took / 3, f"{worst:.2f} of {took:.2f} s"
        assert worker.get("/healthz")[0] == 200
        await producer.cancel(beside.id)
        for name in names:
            result = await producer.result(name, timeout=60, check=False)
            assert result.reason is Reason.PROMPT_TOO_LONG
    assert worker.process.poll() is None
    assert "stood still" not in worker.log.read_text()


async def test_entries_of_the_ingress_fail_alone(served: tuple[str, WorkerProcess]) -> None:
    """Each is refused with a terminal event, and the entry behind it is served."""
    url, worker = served
    async with Producer(url) as producer, Redis.from_url(url) as redis:
        beside = await neighbour(producer)
        for number, parts in enumerate(ENTRIES.values()):
            await redis.execute_command("XADD", KEYS.ingress(), "*", "id", f"bad-{number}", *parts)
        behind = ("id", "behind", "prompt", "x", "max_tokens", "4")
        await redis.execute_command("XADD", KEYS.ingress(), "*", *behind)
        async with asyncio.timeout(60):  # until the ingress has looked at all of them
            while not await redis.exists(KEYS.request("behind")):
                await asyncio.sleep(0.01)
        for number, name in enumerate(ENTRIES):
            result = await producer.result(f"bad-{number}", timeout=60, check=False)
            assert (result.state, result.reason) == (State.FAILED, Reason.INVALID), name
        assert (await producer.result("behind", timeout=60)).reason is Reason.LENGTH
        await check_neighbour(producer, beside, worker)
