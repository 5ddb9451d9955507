"""Redis Cluster: a URL may name any node, and a slot may move while streams run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from waiting import wait_until
from workers import WorkerFactory

from penstock.producer import BlockingProducer, Producer
from penstock.shared.errors import ConfigurationError, RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import find_server
from penstock.shared.redis.cluster import Rerouted, Route, moved_to
from penstock.shared.redis.opening import open_pool
from penstock.shared.settings import load_settings
from penstock.shared.synthetic import synthetic_tokens
from penstock.tools.doctor import Level, examine

KEYS = Keys("demo")
SLOTS = 16384


class Cluster:
    """Nodes on loopback: three that divide the slots, and one that replicates the shard's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._program = find_server().path
        self._ports: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for _ in range(4):
            self._start_node()
        first, *others = self._ports
        for port in others:
            self._ask(port, "CLUSTER", "MEET", "127.0.0.1", first)
        for i, port in enumerate(self._ports[:3]):
            slots = range(SLOTS * i // 3, SLOTS * (i + 1) // 3)
            self._ask(port, "CLUSTER", "ADDSLOTS", *slots)
        wait_until(lambda: all(map(self._knows_all, self._ports)), "a cluster", 60)
        self.slot = int(self._ask(first, "CLUSTER", "KEYSLOT", KEYS.counters))
        owner = self._ports[self.slot * 3 // SLOTS]
        self.owner, self.replica = self.url(owner), self.url(self._ports[3])
        self.other = self.url(next(port for port in self._ports[:3] if port != owner))
        name = self._ask(owner, "CLUSTER", "MYID")
        self._ask(self._ports[3], "CLUSTER", "REPLICATE", name)
        wait_until(lambda: self._is_in_step(self._ports[3]), "a replica", 60)

    def url(self, port: int) -> str:
        return f"redis://127.0.0.1:{port}/0"

    def hand_over(self) -> None:
        """Have the replica become the owner, without a loss."""
        self._ask(self._ports[3], "CLUSTER", "FAILOVER")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(60)

    def _start_node(self) -> None:
        port = free_port() % 30_000 + 10_000  # the bus takes this plus 10,000
        folder = self._folder / str(port)
        folder.mkdir()
        options = (
            f"--port {port} --bind 127.0.0.1 --cluster-enabled yes --repl-diskless-sync-delay 0"
        )
        process = spawn_bound(
            [str(self._program), *options.split(), "--save", ""],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        self._ports.append(port)
        self._processes.append(process)
        wait_until(lambda: self._answers(port), "a node")

    def _ask(self, port: int, *words: str | int) -> Any:
        with redis.Redis(port=port) as client:
            return client.execute_command(*words)

    def _answers(self, port: int) -> bool:
        try:
            return bool(self._ask(port, "PING"))
        except redis.ConnectionError:
            return False

    def _knows_all(self, port: int) -> bool:
        facts = self._ask(port, "CLUSTER", "INFO")
        return "cluster_state:ok" in str(facts) and "cluster_known_nodes:4" in str(facts)

    def _is_in_step(self, port: int) -> bool:
        facts: dict[str, Any] = self._ask(port, "INFO", "replication")
        return facts.get("master_link_status") == "up"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start()
        yield made
    finally:
        made.close()


async def test_the_doctor_finds_the_node(cluster: Cluster) -> None:
    for url, words in ((cluster.owner, "slot is here"), (cluster.other, "found by way of it at")):
        diagnosis = await examine(load_settings({"redis.url": url}))
        found = {finding.name: finding for finding in diagnosis.findings}
        assert found["cluster"].level is Level.NOTE
        assert words in found["cluster"].found
        assert found["rights_worker"].level is Level.OK
        assert found["counters"].level is Level.OK


async def test_a_client_of_the_callers_is_not_moved(cluster: Cluster) -> None:
    async with redis.asyncio.Redis.from_url(cluster.other) as client:
        with pytest.raises(RedisUnavailable, match=r"does not serve this shard, 127\.0\.0\.1:\d+"):
            await Producer(client).connect()
    async with redis.asyncio.Redis.from_url(cluster.owner) as client, Producer(client) as producer:
        await producer.submit([7])


def test_a_client_of_the_whole_cluster_is_refused() -> None:
    client = redis.asyncio.RedisCluster(host="127.0.0.1")
    with pytest.raises(ConfigurationError, match="any node"):
        Producer(client)  # type: ignore[arg-type]


async def test_a_node_that_cannot_be_reached_is_forgotten(redis_url: str) -> None:
    """Then the address that was given is asked again, which may know a successor."""
    route = Route()
    route.node = ("127.0.0.1", 1)
    async with redis.asyncio.Redis.from_pool(open_pool(redis_url, route=route)) as client:
        with pytest.raises(redis.ConnectionError, match="cluster-announce-ip"):
            await client.ping()
        assert route.node is None
        assert await client.ping()


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("MOVED 1234 10.0.0.7:6380", ("10.0.0.7", 6380)),
        ("MOVED 1234 ::1:6380", ("::1", 6380)),
        ("MOVED 1234 :6380", ("here", 6380)),
        ("MOVED 1234 ?:6380", ("here", 6380)),
        ("ERR unknown command", None),
    ],
)
def test_what_moved_says(text: str, node: tuple[str, int] | None) -> None:
    assert moved_to(redis.ResponseError(text), ("here", 1)) == node
    assert issubclass(Rerouted, redis.ConnectionError)


async def test_any_node_will_do_and_the_slot_may_move(cluster: Cluster, tmp_path: Path) -> None:
    """The last test here: the cluster is another one after it."""
    workers = WorkerFactory(cluster.other, tmp_path)
    count, prompt = 400, [7, 8]
    try:
        worker = workers.supervised(
            "w", "--model", "synthetic", "--name", "demo", PENSTOCK_MODEL__SYNTHETIC_STEP_MS="5"
        )
        async with Producer(cluster.owner) as first, Producer(cluster.other) as second:
            for name, producer in (("owner", first), ("other", second)):
                await producer.submit(prompt, id=name, seed=1, max_tokens=count, ignore_eos=True)
            readers = [
                asyncio.create_task(producer.stream(name).collect())
                for producer in (first, second)
                for name in ("owner", "other")
            ]
            async with redis.asyncio.Redis.from_url(cluster.owner) as owner:
                assert await owner.exists(KEYS.request("owner"), KEYS.request("other")) == 2
                while int(await owner.hget(KEYS.request("other"), "tokens") or 0) < 20:
                    await asyncio.sleep(0.01)
            cluster.hand_over()
            results = await asyncio.wait_for(asyncio.gather(*readers), 30)
        for result in results:
            assert result.token_ids == synthetic_tokens(1, prompt, count)
            assert result.end.usage.attempts == 1  # its worker went along
        await asyncio.to_thread(_blocking, cluster.other)
        # A worker that is killed now: its supervisor was never told of the new owner.
        (engine,) = worker.children()
        await _is_continued_at_once(cluster, engine)
        assert worker.terminate() == 0
    finally:
        workers.close()


def _blocking(url: str) -> None:
    with BlockingProducer(url) as producer:
        text = producer.generate([7], seed=1, max_tokens=5, ignore_eos=True).collect()
    assert text.token_ids == synthetic_tokens(1, [7], 5)


async def _is_continued_at_once(cluster: Cluster, engine: int) -> None:
    async with Producer(cluster.other) as producer:
        await producer.submit([7], id="killed", seed=2, max_tokens=300, ignore_eos=True)
        stream = producer.stream("killed")
        await anext(stream)
        os.kill(engine, signal.SIGKILL)
        result = await asyncio.wait_for(stream.collect(), 30)
    assert result.end.usage.attempts == 2
