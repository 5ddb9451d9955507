"""A server that refuses for now: nobody is blamed, nothing is given up, nothing runs twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError
from waiting import wait_until
from workers import WorkerFactory, WorkerProcess

from penstock.producer import Producer
from penstock.shared.errors import RedisUnavailable
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.server_binary import ServerBinary, find_servers
from penstock.shared.protocol.states import Reason
from penstock.shared.redis.batch_connection import BatchConnection
from penstock.shared.redis.server_check import check_durability
from penstock.shared.redis.transient_errors import is_transient
from penstock.shared.scripts.script_loader import Command
from penstock.shared.synthetic import synthetic_tokens

TOKENS = 300


class Refusing:
    """A server that can be made to refuse, in each of the ways there are.

    Args:
        url: its address.
        folder: where it keeps its data.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._folder = folder

    @contextlib.asynccontextmanager
    async def refuses(self, how: str) -> AsyncIterator[None]:
        """It does, until this is left."""
        ways = {
            "busy": self._busy,
            "replica": self._replica,
            "disk": self._disk,
            "no_replicas": self._no_replicas,
        }
        async with redis.asyncio.Redis.from_url(self.url) as client, ways[how](client):
            yield

    @contextlib.asynccontextmanager
    async def _busy(self, client: redis.asyncio.Redis) -> AsyncIterator[None]:
        await client.config_set("lua-time-limit", 1)
        async with redis.asyncio.Redis.from_url(self.url) as other:
            script = asyncio.create_task(other.eval("while true do end", 0))
            try:
                await _until_refused(lambda: client.exists("key"))
                yield
            finally:
                await client.script_kill()
            with pytest.raises(ResponseError, match="killed"):
                await script

    @contextlib.asynccontextmanager
    async def _replica(self, client: redis.asyncio.Redis) -> AsyncIterator[None]:
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        await _until_refused(lambda: client.delete("key"))
        yield
        await client.execute_command("REPLICAOF", "NO", "ONE")

    @contextlib.asynccontextmanager
    async def _disk(self, client: redis.asyncio.Redis) -> AsyncIterator[None]:
        in_the_way = self._folder / "dump.rdb"
        in_the_way.mkdir()
        await client.config_set("save", "3600 1")
        await client.bgsave()
        await _until_refused(lambda: client.delete("key"))
        yield
        await client.config_set("save", "")
        in_the_way.rmdir()

    @contextlib.asynccontextmanager
    async def _no_replicas(self, client: redis.asyncio.Redis) -> AsyncIterator[None]:
        await client.config_set("min-replicas-to-write", 1)
        await _until_refused(lambda: client.delete("key"))
        yield
        await client.config_set("min-replicas-to-write", 0)


async def _until_refused(ask: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await ask()
            except ResponseError as error:
                if not is_transient(error):
                    raise
                return
            await asyncio.sleep(0.01)


WAYS = ("busy", "replica", "disk", "no_replicas")


@pytest.fixture(params=find_servers(), ids=lambda binary: f"{binary.kind}-{binary.version}")
def server(
    request: pytest.FixtureRequest, start_redis: Callable[..., EmbeddedRedis], tmp_path: Path
) -> Refusing:
    binary: ServerBinary = request.param
    folder = tmp_path / "data"
    return Refusing(start_redis(binary, password="", data_dir=folder).url, folder)


async def test_a_worker_keeps_what_it_runs(server: Refusing, tmp_path: Path) -> None:
    workers = WorkerFactory(server.url, tmp_path)
    settings = {"model__path": "synthetic", "model__synthetic_step_ms": 5}
    try:
        worker = await asyncio.to_thread(
            lambda: workers.engine("one", worker__lease_ms=30_000, **settings)
        )
        async with Producer(server.url, outage_s=30) as producer:
            for how in WAYS:
                await _keeps(producer, worker, server, how)
        assert "was refused" not in worker.log.read_text()
    finally:
        workers.close()


async def _keeps(producer: Producer, worker: WorkerProcess, server: Refusing, how: str) -> None:
    """A request that runs while the server refuses ends as if nothing had been."""
    submitted = await producer.submit([7], id=how, seed=1, max_tokens=TOKENS, ignore_eos=True)
    stream = producer.stream(submitted.id)
    for _ in range(5):
        await anext(stream)
    async with server.refuses(how):
        before = worker.metric("redis_errors_total")
        await asyncio.to_thread(
            wait_until,
            lambda: worker.metric("redis_errors_total") >= before + 3,
            "it was refused several times",
        )
    await asyncio.wait_for(stream.collect(), 30)  # live; a gap or a repeat raises
    result = await producer.stream(submitted.id).collect()
    assert result.token_ids == synthetic_tokens(1, [7], TOKENS)
    assert result.usage is not None
    assert result.usage.attempts == 1


async def test_a_claim_that_stops_half_way_loses_nothing(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path
) -> None:
    """The last command of a claim is denied: what it had claimed by then is claimed again."""
    url = start_redis(password="").url
    workers = WorkerFactory(url, tmp_path)
    try:
        worker = await asyncio.to_thread(
            lambda: workers.engine("one", model__path="synthetic", worker__lease_ms=60_000)
        )
        async with Producer(url) as producer, redis.asyncio.Redis.from_url(url) as client:
            await client.execute_command("ACL", "SETUSER", "default", "-xrevrange")
            submitted = await producer.submit([7], seed=1, max_tokens=5, ignore_eos=True)
            await asyncio.to_thread(
                wait_until, lambda: "claim was refused" in worker.log.read_text(), "a refusal"
            )
            await client.execute_command("ACL", "SETUSER", "default", "+xrevrange")
            result = await producer.result(submitted.id, timeout=60)
            assert result.token_ids == synthetic_tokens(1, [7], 5)
    finally:
        workers.close()


@pytest.mark.parametrize("how", WAYS)
async def test_a_client_tries_again_and_then_says_why(server: Refusing, how: str) -> None:
    async with (
        Producer(server.url, outage_s=30) as patient,
        Producer(server.url, outage_s=0.05) as hasty,
    ):
        for producer in (patient, hasty):
            await producer.connect()
        async with server.refuses(how):
            with pytest.raises(RedisUnavailable, match="answers but serves no requests now: "):
                await hasty.submit("x", id="hasty")
            submitting = asyncio.create_task(patient.submit("x", id="patient"))
            with pytest.raises(RedisUnavailable, match="serves no requests now"):
                await hasty.cancel("patient")
            assert not submitting.done()
        assert (await asyncio.wait_for(submitting, 60)).id == "patient"
        assert (await hasty.submit("x", id="hasty")).id == "hasty"


async def test_a_worker_does_not_start_on_a_busy_server(server: Refusing) -> None:
    async with server.refuses("busy"):
        with pytest.raises(RedisUnavailable, match="serves no requests now: BUSY"):
            await check_durability(server.url, "key", timeout_s=5)
    await check_durability(server.url, "key", timeout_s=5)


async def test_a_subscription_survives_a_busy_server(server: Refusing) -> None:
    async with (
        Producer(server.url, outage_s=30) as patient,
        Producer(server.url, outage_s=0.05) as hasty,
    ):
        await hasty.connect()
        submitted = await patient.submit("x")
        async with server.refuses("busy"):
            reading = asyncio.create_task(patient.stream(submitted.id).collect())
            with pytest.raises(RedisUnavailable, match="serves no requests now: BUSY"):
                await hasty.stream(submitted.id).collect()
            assert not reading.done()
        await patient.cancel(submitted.id)
        assert (await asyncio.wait_for(reading, 60)).end.reason is Reason.CLIENT


async def test_over_a_unix_socket_too(tmp_path: Path) -> None:
    path, left = tmp_path / "redis", asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(b"-BUSY Redis is busy running a script.\r\n")
        writer.close()
        await writer.wait_closed()
        left.set()

    connection = BatchConnection(f"unix://{path}", timeout_s=5)
    async with await asyncio.start_unix_server(serve, path):
        with pytest.raises(RedisConnectionError, match="BUSY"):
            await connection.exchange([Command(("PING",)).wire()])
        await asyncio.wait_for(left.wait(), 60)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ResponseError("BUSY Redis is busy running a script."), True),
        (ResponseError("MASTERDOWN BatchConnection with MASTER is down"), True),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (ReadOnlyError("You can't write against a read only replica."), True),
        (
            ResponseError(
                "Error running script (call to f_0): @user_script:1: @user_script: 1: -MISCONF no"
            ),
            True,
        ),
        (ResponseError("BUSYGROUP Consumer Group name already exists"), False),
        (ResponseError("BUSYKEY Target key name already exists."), False),
        (ResponseError("WRONGTYPE Operation against a key"), False),
        (ResponseError("ERR value is no BUSY number"), False),
        (
            ResponseError(
                "Error running script (call to f_0): @user_script:1: @user_script: 1: -OOM no"
            ),
            False,
        ),
    ],
)
def test_what_passes(error: ResponseError, passes: bool) -> None:
    assert is_transient(error) is passes
