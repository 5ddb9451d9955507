"""The doctor of a server: every finding on one that has the fault, and none on one that has not."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from delivery.fleet import Shard
from integration.examining import MIB, find, settings
from redis.asyncio import Redis

from penstock.producer.cli import main
from penstock.shared.errors import RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.ports import free_port
from penstock.shared.local.server_binary import find_servers
from penstock.shared.protocol.states import Lane
from penstock.tools.doctor import Finding, Level, examine
from penstock.tools.doctor.server_findings import ServerFacts, look_at_server

# -- the server -------------------------------------------------------------------------------


async def test_a_fit_server_has_no_errors(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path
) -> None:
    for i, binary in enumerate(find_servers()):
        server = start_redis(binary, password="", data_dir=tmp_path / str(i))
        async with Redis.from_url(server.url) as client:
            await client.config_set("maxmemory", 2 << 30)
            await Shard(client).worker("w").claim(1)
        diagnosis = await examine(settings(server.url))
        # A busy machine answers late, and the doctor says so.
        noted = [f for f in diagnosis.findings if f.level > Level.OK and f.name != "latency"]
        assert noted == []
        assert diagnosis.ok
        assert diagnosis.figures["workers"] == 1
        assert 0 < diagnosis.figures["ping_ms"] < 1000
        async with Redis.from_url(server.url) as client:
            await client.config_set("appendfsync", "no")
        finding = find(await examine(settings(server.url)), "persistence")
        assert (finding.level, "everysec" in finding.remedy) == (Level.WARNING, True)


@pytest.mark.parametrize(
    ("options", "name", "level", "words"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "eviction", Level.ERROR, "throws accepted requests"),
        ({"maxmemory": MIB // 2}, "memory", Level.ERROR, "submits are refused"),
        ({"maxmemory": 100 * MIB}, "memory", Level.WARNING, "before the bound on what waits"),
        ({"maxmemory": 0}, "memory", Level.NOTE, "kernel kills the server"),
        ({"timeout": 30}, "timeouts", Level.NOTE, "closes idle connections"),
        ({"tcp-keepalive": 0}, "timeouts", Level.NOTE, "vanished"),
        (
            {"client-output-buffer-limit": "pubsub 0 0 0"},
            "pubsub_buffer", Level.WARNING, "fill the server's memory",
        ),
        (
            {"client-output-buffer-limit": "pubsub 1000 0 0"},
            "pubsub_buffer", Level.WARNING, "catch up from the log",
        ),
    ],
    ids=lambda value: "-".join(map(str, *value.items())) if isinstance(value, dict) else None,
)  # fmt: skip
async def test_a_setting_of_the_server(
    client: Redis, any_redis_url: str, options: dict[str, Any], name: str, level: Level, words: str
) -> None:
    before = {option: (await client.config_get(option))[option] for option in options}
    try:
        for option, value in options.items():
            await client.config_set(option, value)
        finding = find(await examine(settings(any_redis_url)), name)
    finally:
        for option, value in before.items():
            await client.config_set(option, value)
    assert finding.level == level
    assert words in finding.meaning


GOOD_INFO = {
    "redis_version": "7.0.15", "aof_enabled": 1, "aof_last_write_status": "ok", "role": "master",
    "rdb_last_bgsave_status": "ok", "maxmemory_policy": "noeviction", "maxmemory": 1 << 34,
    "used_memory": 1 << 20, "connected_slaves": 0, "connected_clients": 3, "maxclients": 10000,
}  # fmt: skip
GOOD_CONFIG = {
    "appendfsync": "everysec", "save": "", "timeout": "0", "tcp-keepalive": "300",
    "client-output-buffer-limit": "normal 0 0 0 slave 1 1 1 pubsub 33554432 8388608 60",
    "min-replicas-to-write": "0",
}  # fmt: skip


def look(
    info: dict[str, Any] | None = None, config: dict[str, str] | None = None, **facts: Any
) -> dict[str, Finding]:
    values: dict[str, Any] = {
        "skew_ms": 0.0, "ping_ms": 0.1, "script_ms": 0.1, "max_queued_bytes": MIB,
    }  # fmt: skip
    found = look_at_server(
        ServerFacts(
            info={**GOOD_INFO, **(info or {})},
            config={**GOOD_CONFIG, **(config or {})},
            **{**values, **facts},
        )
    )
    return {finding.name: finding for finding in found}


def test_nothing_is_found_where_nothing_is() -> None:
    assert {finding.level for finding in look().values()} == {Level.OK}


@pytest.mark.parametrize(
    ("facts", "name", "level", "words"),
    [
        ({"info": {"redis_version": "6.0.16"}}, "version", Level.ERROR, "6.2 or newer"),
        ({"info": {"loading": 1}}, "persistence", Level.ERROR, "read them"),
        ({"info": {"aof_last_write_status": "err"}}, "persistence", Level.ERROR, "refuses writes"),
        (
            {"info": {"rdb_last_bgsave_status": "err"}, "config": {"save": "60 1"}},
            "persistence", Level.ERROR, "MISCONF",
        ),
        (
            {"info": {"rdb_last_bgsave_status": "err"}},
            "persistence", Level.OK, "loses nothing",
        ),
        ({"info": {"aof_enabled": 0}}, "persistence", Level.ERROR, "every accepted request"),
        (
            {"info": {"aof_enabled": 0}, "config": {"save": "60 1"}},
            "persistence", Level.WARNING, "since the last snapshot",
        ),
        ({"config": {"appendfsync": "always"}}, "persistence", Level.NOTE, "waits for the disk"),
        ({"info": {"role": "slave"}}, "replication", Level.ERROR, "refuses writes"),
        ({"info": {"connected_slaves": 2}}, "replication", Level.NOTE, "asynchronous"),
        ({"info": {"used_memory": 15 << 30}}, "memory", Level.WARNING, "at maxmemory"),
        (
            {"info": {"maxmemory": 0, "used_memory": 9, "total_system_memory": 10}},
            "memory", Level.WARNING, "kernel",
        ),
        ({"info": {"connected_clients": 9999}}, "connections", Level.WARNING, "refused"),
        ({"skew_ms": -3_600_000.0}, "clock", Level.NOTE, "harmless"),
        ({"ping_ms": 30.0}, "latency", Level.WARNING, "round trip"),
        ({"script_ms": 30.0}, "latency", Level.WARNING, "round trip"),
    ],
)  # fmt: skip
def test_a_fact_of_the_server(facts: dict[str, Any], name: str, level: Level, words: str) -> None:
    found = look(**facts)
    assert found.pop(name).level == level
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert words in look(**facts)[name].meaning


async def test_a_replica_is_no_primary(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path
) -> None:
    # A replica writes what it is sent into a file first, so it needs a directory; without one
    # Redis 8 stands still for five seconds, again and again.
    primary, replica = start_redis(password=""), start_redis(password="", data_dir=tmp_path)
    async with Redis.from_url(primary.url) as first, Redis.from_url(replica.url) as second:
        port = first.connection_pool.connection_kwargs["port"]
        await second.execute_command("REPLICAOF", "127.0.0.1", port)
        diagnosis = await examine(settings(replica.url))
        assert find(diagnosis, "replication").level is Level.ERROR
        while not (await first.info("replication"))["connected_slaves"]:
            await asyncio.sleep(0.01)
        assert find(await examine(settings(primary.url)), "replication").level is Level.NOTE
        # Or the primary, which is stopped first, waits for it.
        await second.execute_command("REPLICAOF", "NO", "ONE")


async def test_a_cluster_node_that_serves_the_shard_and_one_that_does_not(tmp_path: Path) -> None:
    port = free_port() % 30_000 + 10_000  # the cluster bus takes this plus 10,000
    program = find_servers()[0].path
    options = ("--port", str(port), "--cluster-enabled", "yes", "--save", "")
    process = spawn_bound([str(program), *options], cwd=tmp_path)
    url = f"redis://127.0.0.1:{port}"
    try:
        async with Redis.from_url(url) as client:
            async for _ in _until(client.ping):
                pass
            finding = find(await examine(settings(url)), "cluster")
            assert finding.level is Level.ERROR
            assert "CLUSTERDOWN" in finding.found
            await client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            async for _ in _until(lambda: _cluster_is_up(client)):
                pass
        diagnosis = await examine(settings(url))
        assert find(diagnosis, "cluster").level is Level.NOTE
        assert find(diagnosis, "rights_worker").level is Level.OK
    finally:
        process.kill()
        process.wait()


async def _cluster_is_up(client: Redis) -> None:
    if "cluster_state:ok" not in str(await client.execute_command("CLUSTER", "INFO")):
        raise OSError("not yet")


async def _until(send: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    for _ in range(1000):
        try:
            await send()
            return
        except OSError:
            await asyncio.sleep(0.01)
            yield
        except Exception as error:  # redis' own connection errors are no OSError
            if "onnect" not in str(error):
                raise
            await asyncio.sleep(0.01)
            yield
    raise AssertionError("not within 10 s")


# -- the program ------------------------------------------------------------------------------


def test_the_program(
    start_redis: Callable[..., EmbeddedRedis], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_redis(password="", data_dir=tmp_path)
    address = ("--redis", server.url)
    assert main(["doctor", *address]) == 0
    shown = capsys.readouterr().out
    assert "ok      eviction         noeviction" in shown
    assert "0 errors" in shown
    assert "means: when the machine's memory is full" in shown
    assert main(["doctor", *address, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"figures", "checks", "notes", "findings"} == set(facts)
    assert all(check["ok"] and set(check) == {"name", "value", "limit", "ok"}
               for check in facts["checks"])  # fmt: skip
    subprocess.run(
        ["redis-cli", "-u", server.url, "CONFIG", "SET", "maxmemory-policy", "allkeys-lfu"],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert main(["doctor", *address]) == 1
    assert "do: CONFIG SET maxmemory-policy noeviction" in capsys.readouterr().out
    assert main(["doctor", *address, "--role", "cook"]) == 2
    capsys.readouterr()
    server.stop()
    assert main(["doctor", *address, "--json"]) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert "cannot reach Redis" in done.err


async def test_an_unreachable_server_is_told_at_once() -> None:
    with pytest.raises(RedisUnavailable, match="cannot reach"):
        await examine(settings("redis://127.0.0.1:1"))


def test_keys_that_last_are_those_of_the_keys_module() -> None:
    from penstock.tools.doctor.shard_findings import LASTING

    keys = Keys("demo")
    for key in (keys.lanes, keys.leases, keys.deadlines, keys.counters, keys.bell,
                keys.virtual_time, keys.dead_letters, *map(keys.tenants, Lane)):  # fmt: skip
        assert key.removeprefix(keys.prefix) in LASTING
