"""Workers that die, stall, drain or lose their connection: every stream stays whole.

A real model proves that KV and sampling state are rebuilt; where only processes, leases and
connections matter, the synthetic model does, which starts at once.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from durable_redis import start_durable_redis
from slow_steps import slow_steps
from waiting import is_running, wait_until
from workers import WorkerFactory, WorkerProcess

from penstock.gpu_worker.model.loading.checkpoint_folder import find_checkpoint
from penstock.producer import Producer, Result
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.ports import free_port
from penstock.shared.protocol.states import Lane
from penstock.shared.synthetic import synthetic_tokens
from penstock.tools.chaos.faults.process_table import children

KEYS = Keys("demo")
TOKENS = 120
KNOWN = str(find_checkpoint("demo"))
"""A changed copy of the code has a copy of the demo model, too, and would have to examine it."""
PROMPTS = ("The list type", "def parse(", "Return the name of", "class Queue", "A file object")


async def submit_all(producer: Producer) -> list[str]:
    """Long seeded requests, greedy and sampled, that always run to ``TOKENS`` tokens."""
    ids = []
    for number, prompt in enumerate(PROMPTS):
        request_id = f"r{number}"
        await producer.submit(
            prompt,
            id=request_id,
            max_tokens=TOKENS,
            temperature=0.0 if number % 2 else 0.9,
            seed=number,
            ignore_eos=True,
        )
        ids.append(request_id)
    return ids


async def read_all(producer: Producer, ids: Sequence[str]) -> list[Result]:
    """Live readers of all streams at once; a gap or a repeat raises inside the reader."""
    return list(await asyncio.gather(*(producer.stream(i).collect() for i in ids)))


Output = tuple[tuple[int, ...], str]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Output]:
    """What an undisturbed worker gives."""

    async def run(url: str) -> list[Output]:
        async with Producer(url) as producer:
            results = await read_all(producer, await submit_all(producer))
        return [(result.token_ids, result.text) for result in results]

    with EmbeddedRedis() as server:
        workers = WorkerFactory(server.url, tmp_path_factory.mktemp("undisturbed"))
        try:
            workers.engine("undisturbed")
            return asyncio.run(run(server.url))
        finally:
            workers.close()


SYNTHETIC: dict[str, Any] = {"model__path": "synthetic", "model__synthetic_step_ms": 10}
SUPERVISED_SYNTHETIC = {
    "PENSTOCK_MODEL__PATH": "synthetic",
    "PENSTOCK_MODEL__SYNTHETIC_STEP_MS": "10",
    "PENSTOCK_QUEUE__MODEL": "demo",
}


def expected_of_synthetic() -> list[Output]:
    outputs = (
        synthetic_tokens(number, [ord(letter) for letter in prompt], TOKENS)
        for number, prompt in enumerate(PROMPTS)
    )
    return [(tokens, "".join(map(chr, tokens))) for tokens in outputs]


async def owned_by(redis_url: str, worker: WorkerProcess, ids: Sequence[str]) -> set[str]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        owners = {i: (await client.hget(KEYS.request(i), "worker")).decode() for i in ids}
    return {i for i, owner in owners.items() if owner == worker.worker_id}


async def busiest(
    redis_url: str, workers: Sequence[WorkerProcess], ids: Sequence[str]
) -> tuple[WorkerProcess, set[str]]:
    """The worker that owns the most, and what it owns."""
    shares = [(worker, await owned_by(redis_url, worker, ids)) for worker in workers]
    return max(shares, key=lambda share: len(share[1]))


async def wait_for_tokens(redis_url: str, ids: Sequence[str], count: int) -> None:
    """Until every request has ``count`` tokens in its log."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            counts = [int(await client.hget(KEYS.request(i), "tokens") or 0) for i in ids]
            if min(counts) >= count:
                return
            await asyncio.sleep(0.005)
    pytest.fail(f"not {count} tokens each: {counts}")


def check_whole(results: Sequence[Result], expected: Sequence[Output]) -> None:
    assert [(r.token_ids, r.text) for r in results] == list(expected)
    assert {r.end.n for r in results} == {TOKENS}


async def check_nothing_left(redis_url: str) -> None:
    """Nothing waits, nothing is owned, and only the documented constant keys have no TTL."""
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        counters = await client.hgetall(KEYS.counters)
        waiting = {k: v for k, v in counters.items() if not k.startswith(b"ended:")}
        assert all(int(value) == 0 for value in waiting.values()), waiting
        assert await client.zcard(KEYS.deadlines) == 0
        constant = {
            KEYS.lanes, KEYS.virtual_time, KEYS.leases, KEYS.counters, KEYS.bell, KEYS.sweep,
            KEYS.fingerprints, KEYS.model_card,
            KEYS.ingress(), *map(KEYS.tenants, Lane),
        }  # fmt: skip
        async for key in client.scan_iter():
            name = key.decode()
            if name not in constant:
                assert await client.pttl(key) > 0, name


async def test_streams_continue_when_a_machine_is_lost(
    redis_url: str,
    workers: WorkerFactory,
    expected: list[Output],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", slow_steps(tmp_path, 0.02))
    settings = {"model__path": KNOWN, "queue__model": "demo", "worker__lease_ms": 600}
    pair = [workers.engine(name, **settings) for name in ("one", "two")]
    async with Producer(redis_url) as producer:
        ids = await submit_all(producer)
        readers = asyncio.create_task(read_all(producer, ids))
        await wait_for_tokens(redis_url, ids, 10)
        victim, orphans = await busiest(redis_url, pair, ids)
        victim.kill()
        results = await asyncio.wait_for(readers, 60)
        late = await read_all(producer, ids)
    check_whole(results, expected)
    check_whole(late, expected)
    assert {r.id for r in results if r.usage and r.usage.attempts == 2} == orphans
    (survivor,) = (worker for worker in pair if worker is not victim)
    assert survivor.metric("redeliveries_total") == len(orphans) > 0
    await check_nothing_left(redis_url)


async def test_stalled_owner_can_write_nothing(redis_url: str, workers: WorkerFactory) -> None:
    pair = [workers.engine(name, worker__lease_ms=600, **SYNTHETIC) for name in ("one", "two")]
    async with Producer(redis_url) as producer:
        ids = await submit_all(producer)
        readers = asyncio.create_task(read_all(producer, ids))
        await wait_for_tokens(redis_url, ids, 5)
        stalled, orphans = await busiest(redis_url, pair, ids)
        stalled.signal(signal.SIGSTOP)
        await wait_for_tokens(redis_url, ids, 20)
        stalled.signal(signal.SIGCONT)
        results = await asyncio.wait_for(readers, 60)
        check_whole(results, expected_of_synthetic())
        check_whole(await read_all(producer, ids), expected_of_synthetic())
    refusals = "append_refusals_total"
    wait_until(lambda: stalled.metric(refusals) >= len(orphans) > 0, "the zombie was refused")
    wait_until(lambda: stalled.metric("kv_blocks_used") == 0, "the zombie stopped computing")
    await check_nothing_left(redis_url)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
async def test_a_worker_sweeps_several_times_in_a_lease(
    redis_url: str, workers: WorkerFactory, busy: bool
) -> None:
    """Else deadlines would be kept late: storms allow each the time to the next sweep."""
    workers.engine("one", model__path="synthetic", worker__lease_ms=900)
    async with Producer(redis_url) as producer, redis.asyncio.Redis.from_url(redis_url) as client:
        if busy:
            for _ in range(8):
                await producer.submit([7], max_tokens=4000, ignore_eos=True)
        times: list[int] = []
        while len(times) < 8:
            swept = int(await client.hget(KEYS.sweep, "swept_at") or 0)
            if swept and swept not in times:
                times.append(swept)
            await asyncio.sleep(0.01)
    assert statistics.median(b - a for a, b in itertools.pairwise(times)) < 900


async def test_drain_hands_over_and_loses_nothing(
    redis_url: str,
    workers: WorkerFactory,
    expected: list[Output],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", slow_steps(tmp_path, 0.02))
    model = ("--model", KNOWN, "--name", "demo")
    pair = [workers.supervised(name, *model) for name in ("one", "two")]
    async with Producer(redis_url) as producer:
        ids = await submit_all(producer)
        readers = asyncio.create_task(read_all(producer, ids))
        await wait_for_tokens(redis_url, ids, 5)
        leaver, moved = await busiest(redis_url, pair, ids)
        began = time.monotonic()
        assert await asyncio.to_thread(leaver.terminate) == 0
        # With its supervisor, and long before the limit of a drain.
        assert time.monotonic() - began < 8
        results = await asyncio.wait_for(readers, 60)
    check_whole(results, expected)
    assert {r.id for r in results if r.usage and r.usage.attempts == 2} == moved
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        blames = [int(await client.hget(KEYS.request(i), "blames") or 0) for i in ids]
    assert blames == [0] * len(ids), "a drain is nobody's fault"
    await check_nothing_left(redis_url)


def test_drain_while_the_model_is_loaded(workers: WorkerFactory, tmp_path: Path) -> None:
    process = workers.command("loading", "--threads", "1")
    wait_until(lambda: _loads_torch(process.pid), "a model is loaded", 60)
    process.terminate()
    assert process.wait(60) == 0
    assert "ready:" not in (tmp_path / "loading.log").read_text()


def _loads_torch(supervisor: int) -> bool:
    engines = [engine for edge in children(supervisor) for engine in children(edge)]
    return any("libtorch" in Path(f"/proc/{engine}/maps").read_text() for engine in engines)


@pytest.mark.parametrize("part", ["edge", "engine"])
async def test_supervisor_gives_a_dead_childs_work_back_at_once(
    redis_url: str, workers: WorkerFactory, part: str
) -> None:
    long_lease = {"PENSTOCK_WORKER__LEASE_MS": "180000", **SUPERVISED_SYNTHETIC}
    pair = [workers.supervised(name, **long_lease) for name in ("one", "two")]
    async with Producer(redis_url) as producer:
        ids = await submit_all(producer)
        readers = asyncio.create_task(read_all(producer, ids))
        await wait_for_tokens(redis_url, ids, 5)
        victim, orphans = await busiest(redis_url, pair, ids)
        (edge,) = victim.children()
        (engine,) = children(edge)
        os.kill(edge if part == "edge" else engine, signal.SIGKILL)
        results = await asyncio.wait_for(readers, 150)  # below the lease
    check_whole(results, expected_of_synthetic())
    assert {r.id for r in results if r.usage and r.usage.attempts == 2} == orphans
    wait_until(
        lambda: not is_running(edge) and not is_running(engine), "neither outlived the other"
    )
    wait_until(lambda: [pid for pid in victim.children() if pid != edge], "a new edge process", 60)
    assert "edge process ended (signal SIGKILL); restarting" in victim.log.read_text()
    await check_nothing_left(redis_url)


async def test_edge_and_engine_end_with_their_supervisor(workers: WorkerFactory) -> None:
    worker = workers.supervised("only", **SUPERVISED_SYNTHETIC)
    (edge,) = worker.children()
    (engine,) = children(edge)
    worker.kill()
    wait_until(lambda: not is_running(edge), "the edge process ended with its supervisor")
    wait_until(lambda: not is_running(engine), "the engine process ended with its edge")


async def test_an_engine_that_says_nothing_any_more_counts_as_dead(
    redis_url: str, workers: WorkerFactory
) -> None:
    """Stopped, not killed: its edge still runs, and must not keep the lease for it."""
    pair = [
        workers.supervised(name, PENSTOCK_WORKER__HANG_TIMEOUT_S="1", **SUPERVISED_SYNTHETIC)
        for name in ("one", "two")
    ]
    async with Producer(redis_url) as producer:
        ids = await submit_all(producer)
        readers = asyncio.create_task(read_all(producer, ids))
        await wait_for_tokens(redis_url, ids, 5)
        victim, _ = await busiest(redis_url, pair, ids)
        (edge,) = victim.children()
        (engine,) = children(edge)
        os.kill(engine, signal.SIGSTOP)
        results = await asyncio.wait_for(readers, 150)
    check_whole(results, expected_of_synthetic())
    wait_until(lambda: not is_running(engine), "it was replaced", 60)
    await check_nothing_left(redis_url)


async def test_broken_connections_are_invisible(redis_url: str, workers: WorkerFactory) -> None:
    workers.engine("only", **SYNTHETIC)
    async with (
        Producer(redis_url) as producer,
        redis.asyncio.Redis.from_url(redis_url) as client,
    ):
        ids = await submit_all(producer)
        readers = asyncio.create_task(read_all(producer, ids))
        cut = {"normal": 0, "pubsub": 0}
        for step in range(5, 60, 5):
            await wait_for_tokens(redis_url, ids, step)
            for kind in cut:
                cut[kind] += await client.execute_command("CLIENT", "KILL", "TYPE", kind)
            await client.script_flush()
        results = await asyncio.wait_for(readers, 60)
    check_whole(results, expected_of_synthetic())
    assert {r.usage.attempts for r in results if r.usage} == {1}
    assert cut["normal"] >= 11, "the worker's connection was there to be cut each time"
    assert cut["pubsub"] >= 1
    await check_nothing_left(redis_url)


async def test_redis_killed_and_restarted_with_its_log(tmp_path: Path) -> None:
    port = free_port()
    server = start_durable_redis(port, tmp_path)
    url = f"redis://127.0.0.1:{port}"
    workers = WorkerFactory(url, tmp_path)
    try:
        workers.engine("only", worker__lease_ms=5000, **SYNTHETIC)
        async with Producer(url) as producer:
            ids = await submit_all(producer)
            readers = asyncio.create_task(read_all(producer, ids))
            await wait_for_tokens(url, ids, 20)
            server.kill()
            server.wait(60)
            server = start_durable_redis(port, tmp_path)
            results = await asyncio.wait_for(readers, 60)
            late = await read_all(producer, ids)
        assert [r.end.n for r in results] == [TOKENS] * len(ids)
        assert [r.token_ids for r in late] == [r.token_ids for r in results]
        await check_nothing_left(url)
    finally:
        workers.close()
        server.kill()
        server.wait(60)
