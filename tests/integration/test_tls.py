"""Workers and clients over TLS, with users of the templates and nobody else."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from certificates import acl_rules, self_signed, speaks_tls
from waiting import wait_until
from workers import WorkerFactory

from penstock.producer import BlockingProducer, Producer
from penstock.shared.errors import RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import find_servers
from penstock.shared.synthetic import synthetic_tokens

SERVERS = [binary for binary in find_servers() if speaks_tls(binary)]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    """``127.0.0.1:port?trust`` of a server that speaks TLS alone and knows two users."""
    certificate, key = self_signed(tmp_path)
    (tmp_path / "users.acl").write_text(
        acl_rules("default.acl") + acl_rules("operator.acl", "boss", "boss-pw", "-")
        + acl_rules("worker.acl", "worker", "worker-pw", "-")
    )  # fmt: skip
    port = free_port()
    options = {
        "bind": "127.0.0.1", "port": 0, "tls-port": port, "tls-cert-file": certificate,
        "tls-key-file": key, "tls-auth-clients": "no", "aclfile": tmp_path / "users.acl",
        "save": "", "dir": tmp_path,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (tmp_path / "redis.log").open("wb") as log:
        server = spawn_bound([SERVERS[0].path, *words], stdout=log)
    address = f"127.0.0.1:{port}/0?ssl_ca_certs={certificate}"

    def answers() -> bool:
        assert server.poll() is None, (tmp_path / "redis.log").read_text()
        try:
            with redis.Redis.from_url(f"rediss://boss:boss-pw@{address}") as boss:
                return bool(boss.ping())
        except redis.ConnectionError:
            return False

    wait_until(answers, "the server answers")
    yield address
    server.kill()
    server.wait(60)


@pytest.mark.skipif(not SERVERS, reason="no Redis server of this machine was built with TLS")
def test_a_stream_survives_its_worker_and_its_connections(place: str, tmp_path: Path) -> None:
    url = f"rediss://worker:worker-pw@{place}"
    workers = WorkerFactory(url, tmp_path)
    settings = {"worker__lease_ms": 600, "model__path": "synthetic", "model__synthetic_step_ms": 10}
    try:
        with redis.Redis.from_url(f"rediss://boss:boss-pw@{place}") as boss:
            first = workers.engine("first", **settings)
            with BlockingProducer(url) as producer:
                for id in ("a", "b"):
                    producer.submit([7], id=id, seed=1, max_tokens=200, ignore_eos=True)
                wait_until(lambda: int(boss.hget(Keys("demo").request("a"), "tokens") or 0), "runs")
                first.kill()
                second = workers.engine("second", **settings)
                for kind in ("normal", "pubsub"):
                    boss.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
                for id in ("a", "b"):
                    tokens = producer.result(id, timeout=60).token_ids
                    assert tokens == tuple(synthetic_tokens(1, [7], 200))
                assert second.metric("redeliveries_total") == 2
    finally:
        workers.close()


@pytest.mark.skipif(not SERVERS, reason="no Redis server of this machine was built with TLS")
def test_a_closed_producer_leaves_no_socket_open(place: str) -> None:
    """TLS would take leave of the server first, for which the event loop no longer runs."""

    async def subscribe() -> None:
        async with Producer(f"rediss://worker:worker-pw@{place}") as producer:
            submitted = await producer.submit("x")
            stream = producer.stream(submitted.id)
            reading = asyncio.create_task(stream.collect())
            await producer.cancel(submitted.id)
            await reading

    gc.collect()  # what others have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            asyncio.run(subscribe())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []


@pytest.mark.skipif(not SERVERS, reason="no Redis server of this machine was built with TLS")
def test_who_trusts_nobody_is_told(place: str) -> None:
    unknown = f"rediss://worker:worker-pw@{place.partition('?')[0]}"
    with pytest.raises(RedisUnavailable, match="certificate"), BlockingProducer(unknown) as client:
        client.submit("x")
