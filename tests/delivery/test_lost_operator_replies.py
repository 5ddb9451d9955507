"""Replies that are lost after the server has executed: scripts of operators, starts, the gateway.

``tests/faults/test_lost_replies.py`` does the same with those that run while requests do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from delivery.fleet import MINUTE_MS, Shard
from integration.examining import find
from integration.examining import settings as settings_of
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from penstock.gpu_worker.edge.registration import ModelChangeRefused, register_model
from penstock.gpu_worker.messages import Ready
from penstock.producer import Producer, State
from penstock.producer.gateway.access.key_records import KeyRecord, Limits, digest_of
from penstock.producer.gateway.access.key_store import KeyStore
from penstock.producer.gateway.access.limit_scripts import LimitScripts, load_limit_script
from penstock.shared.errors import RedisUnavailable
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.script_loader import load_script
from penstock.shared.settings import WorkerSettings
from penstock.tools.chaos.faults.storm_server import OwnServer, through
from penstock.tools.chaos.faults.tcp_proxy import Proxy
from penstock.tools.doctor import examine

SCRIPTS = {
    **{name: load_script(name) for name in ("redrive", "rebuild_counters", "probe", "register")},
    **{name: load_limit_script(name) for name in ("admit", "renew", "settle")},
}

REPETITIONS = pytest.mark.parametrize("repetitions", [1, pytest.param(50, marks=pytest.mark.slow)])


@dataclass
class Lossy:
    """A server, a proxy that loses replies on the way to it, and a look past that proxy."""

    url: str
    proxy: Proxy
    shard: Shard

    def lose(self, script: str) -> int:
        """The next reply to this script does not arrive; how many were lost before."""
        self.proxy.cut_replies(SCRIPTS[script].digest.encode())
        return self.proxy.cuts


@pytest.fixture
async def lossy(tmp_path: Path) -> AsyncIterator[Lossy]:
    async with (
        OwnServer(tmp_path / "server") as server,
        Proxy(server.host, server.port) as proxy,
        Redis.from_url(server.url) as direct,
    ):
        for script in SCRIPTS.values():  # else the reply that is lost says that it is not loaded
            await direct.script_load(script.source)
        yield Lossy(through(server.url, proxy.port), proxy, Shard(direct))


@REPETITIONS
async def test_reply_to_a_redrive_is_lost(lossy: Lossy, repetitions: int) -> None:
    """The client sends it again, which finds that it was done: the request waits, once."""
    shard = lossy.shard
    async with Producer(lossy.url) as producer:
        for number in range(repetitions):
            name = f"x{number}"
            await shard.submit(name)
            for life in range(5):
                await shard.worker(f"{name}-{life}", lease_ms=1).claim_one()
                await shard.reap()
            before = lossy.lose("redrive")
            assert (await producer.dead_letters.redrive(name)).id == name
            assert lossy.proxy.cuts == before + 1
            assert await shard.state(name) == State.QUEUED
            assert await producer.dead_letters.count() == 0
            assert await shard.counter("requests") == 1
            await shard.check()
            worker = shard.worker(f"{name}-last")
            claim = await worker.claim_one()
            await worker.send_one(worker.ending(claim, 0, 1))
    await shard.check(ended=True)


@REPETITIONS
async def test_reply_to_a_recount_is_lost(lossy: Lossy, repetitions: int) -> None:
    """The doctor says that the server went away; what it had repaired is right."""
    shard = lossy.shard
    settings = settings_of(lossy.url)
    await shard.submit("x")
    for _ in range(repetitions):
        await shard.redis.hset(shard.keys.counters, "requests", 7)
        before = lossy.lose("rebuild_counters")
        with pytest.raises(RedisUnavailable):
            await examine(settings, repair=True)
        assert lossy.proxy.cuts == before + 1
        assert await shard.counter("requests") == 1
        await shard.check()
    assert "equal to a recount" in find(await examine(settings), "counters").found


@REPETITIONS
async def test_reply_to_a_probe_is_lost(lossy: Lossy, repetitions: int) -> None:
    """The doctor says that the server went away, and has left nothing there."""
    settings = settings_of(lossy.url)
    for _ in range(repetitions):
        before = lossy.lose("probe")
        with pytest.raises(RedisUnavailable):
            await examine(settings)
        assert lossy.proxy.cuts == before + 1
        assert await lossy.shard.redis.dbsize() == 0
    await examine(settings)


@REPETITIONS
async def test_reply_to_a_registration_is_lost(lossy: Lossy, repetitions: int) -> None:
    """A worker registers again, and its own word does not keep it out."""
    ready = Ready("a model", 16, "", 100, b"")
    settings = WorkerSettings(model_change="refuse")
    retry = Retry(NoBackoff(), 0)
    async with Redis.from_url(lossy.url, retry=retry, socket_timeout=30) as redis:
        shard = lossy.shard.with_client(redis)
        for number in range(repetitions):
            await lossy.shard.redis.delete(shard.keys.fingerprints)
            own = shard.with_model(f"model-{number}")
            before = lossy.lose("register")
            await register_model(
                own.ops, ready._replace(fingerprint=own.fingerprint), settings, asyncio.Event()
            )
            assert lossy.proxy.cuts == before + 1
            served = await lossy.shard.redis.zrange(shard.keys.fingerprints, 0, -1)
            assert served == [own.fingerprint.encode()]
        other = shard.with_model("another")
        impatient = settings.model_copy(update={"lease_ms": 1})
        with pytest.raises(ModelChangeRefused):
            await register_model(other.ops, ready, impatient, asyncio.Event())


@dataclass
class Key:
    """An API key with a limit of two requests that run at once."""

    scripts: LimitScripts
    digest: str
    id: str

    async def admit(self, lease: str) -> str:
        verdict = await self.scripts.admit(self.digest, self.id, lease, cost=5, lease_ms=MINUTE_MS)
        return verdict.verdict


@pytest.fixture
async def key(lossy: Lossy) -> AsyncIterator[Key]:
    client = RetryingClient(lossy.url)
    limits = Limits(concurrent=2, tokens_per_day=10_000)
    secret, record = await KeyStore(client).create(KeyRecord("", "acme", limits=limits))
    yield Key(LimitScripts(client), digest_of(secret), record.id)
    await client.aclose()


@REPETITIONS
@pytest.mark.parametrize("script", ["admit", "renew", "settle"])
async def test_reply_to_a_limit_is_lost(
    lossy: Lossy, key: Key, script: str, repetitions: int
) -> None:
    """What is sent again counts once: neither a place nor a token is lost or given twice."""
    for number in range(repetitions):
        lease, other = f"lease{number}", f"other{number}"
        before = lossy.lose(script)
        assert await key.admit(lease) == "ok"
        assert await key.admit(other) == "ok"
        assert await key.admit("one too many") == "full"
        assert await key.scripts.renew({key.id: [lease, other]}, lease_ms=MINUTE_MS) == 2
        for name in (lease, other):
            await key.scripts.settle(key.id, name, submitted=True, used=3)
        assert lossy.proxy.cuts == before + 1
    spent = await lossy.shard.redis.hgetall(f"ps:{{gateway}}:window:{key.id}")
    by_day = [int(value) for name, value in spent.items() if name.startswith(b"day:")]
    assert sum(by_day) == 6 * repetitions
