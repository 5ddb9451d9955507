"""The doctor: every finding on a server that has the fault, and none on one that has not."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from delivery.fleet import Shard
from redis.asyncio import Redis

from penstock.producer.cli import main
from penstock.producer.doctor import Diagnosis, Finding, Level, Role, examine
from penstock.producer.doctor.rights import ROLES, needed_commands
from penstock.producer.doctor.server import ServerFacts, look_at_server
from penstock.shared.children import spawn_bound
from penstock.shared.embedded import EmbeddedRedis
from penstock.shared.errors import RedisUnavailable
from penstock.shared.keys import Keys
from penstock.shared.protocol import Lane
from penstock.shared.server_binary import find_servers
from penstock.shared.settings import Settings, load_settings

MIB = 1 << 20
ACL_FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "acl"


def settings(url: str, **values: Any) -> Settings:
    flags = {name.replace("__", "."): value for name, value in values.items()}
    return load_settings({"redis.url": url, **flags})


def find(diagnosis: Diagnosis, name: str) -> Finding:
    (finding,) = [finding for finding in diagnosis.findings if finding.name == name]
    return finding


@pytest.fixture
async def client(any_redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(any_redis_url) as connection:
        yield connection


async def dump(client: Redis) -> dict[bytes, tuple[bytes | None, bool]]:
    return {
        key: (await client.dump(key), await client.pttl(key) > 0)
        async for key in client.scan_iter(count=1000)
    }


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
        assert [f for f in diagnosis.findings if f.level > Level.OK] == []
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
        ({"maxmemory": 100 * MIB}, "memory", Level.WARNING, "before the bound at the door"),
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] % 30_000 + 10_000  # the cluster bus takes this plus 10,000
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


# -- rights -----------------------------------------------------------------------------------


async def limited(client: Redis, url: str, *rules: str) -> str:
    await client.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pw", *rules)
    return url.replace("//", "//limited:pw@")


@pytest.mark.parametrize("role", ROLES)
async def test_every_denied_command_is_named(client: Redis, any_redis_url: str, role: str) -> None:
    assert len(needed_commands(role)) > 10
    for command in sorted(needed_commands(role)):
        url = await limited(client, any_redis_url, "~*", "&*", "+@all", f"-{command.lower()}")
        if command == "TIME":  # its error is the doctor's own, too
            continue
        finding = find(await examine(settings(url)), f"rights_{role}")
        assert finding.level is Level.ERROR, command
        assert f"lacks +{command.lower()}" in finding.found


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (("~ps:{demo.0}:[^r]*", "&*", "+@all"), "~ps:{demo.0}:r:*"),
        (("~*", "&*", "+@all", "-evalsha", "-eval"), "+evalsha +eval"),
        (("~*", "&*", "+@all", "-publish"), "+publish"),
        (("~*", "&*", "+@all", "-subscribe"), "+subscribe"),
        (("~*", "resetchannels", "+@all"), "&ps:{demo.0}:c:*"),
        (("~*", "resetchannels", "&ps:{demo.0}:c:*", "+@all"), "&ps:{demo.0}:i:*"),
        (("~ps:{demo.0}:[^w]*", "&*", "+@all"), "~ps:{demo.0}:wl"),
        (("~ps:{demo.0}:[^q]*", "&*", "+@all"), "~ps:{demo.0}:q:*"),
    ],
)
async def test_other_rights_that_are_missing(
    client: Redis, any_redis_url: str, rules: tuple[str, ...], words: str
) -> None:
    url = await limited(client, any_redis_url, *rules)
    assert words in find(await examine(settings(url)), "rights_producer").found


async def test_what_the_doctor_asks_for_is_enough(client: Redis, any_redis_url: str) -> None:
    """A user with these rights and no others does everything a producer and a worker do."""
    commands = set().union(*(needed_commands(role) for role in ROLES))
    rules = [f"+{command.lower()}" for command in commands]
    url = await limited(
        client, any_redis_url, "~ps:{demo.0}:*", "resetchannels", "&ps:{demo.0}:c:*",
        "&ps:{demo.0}:i:*", "+evalsha", "+eval", "+publish", "+subscribe", "+ping", *rules,
    )  # fmt: skip
    diagnosis = await examine(settings(url))
    assert find(diagnosis, "rights_producer").level is Level.OK
    assert find(diagnosis, "rights_worker").level is Level.OK
    assert find(diagnosis, "server").level is Level.NOTE  # no INFO
    assert find(diagnosis, "leftovers").level is Level.NOTE  # no SCAN
    async with Redis.from_url(url) as connection:
        shard = Shard(connection)
        worker = shard.worker("w")
        for name in ("done", "cancelled", "released"):
            await shard.submit(name)
        claims = {claim.id: claim for claim in await worker.claim(3)}
        assert await worker.send_one(worker.ending(claims["done"], 0, 2)) == (0, 2)
        assert (await shard.ops.cancel("cancelled")).changed
        assert await shard.ops.release_all("w", blame=True) == 1
        await shard.submit("late", deadline_ms=1)
        await shard.sweep_until(lambda swept: swept.expired > 0)
    await Shard(client).check()


async def test_an_examination_changes_nothing(client: Redis, any_redis_url: str) -> None:
    shard = Shard(client)
    worker = shard.worker("w")
    for i in range(6):
        await shard.submit(f"x{i}", lane=list(Lane)[i % 3], tenant=f"t{i % 2}")
    claims = await worker.claim(3)
    await worker.send(worker.tokens(claims[0], 0, 2), worker.ending(claims[1], 0, 1))
    await shard.ops.release("w", [claims[2].id])
    before = await dump(client)
    diagnosis = await examine(settings(any_redis_url))
    assert await dump(client) == before
    assert diagnosis.figures["running_requests"] == 1
    assert diagnosis.figures["queued_requests"] == 4
    await shard.check()


async def test_a_role_is_examined_alone(client: Redis, any_redis_url: str) -> None:
    url = await limited(client, any_redis_url, "~*", "&*", "+@all", "-xreadgroup")
    names = {f.name for f in (await examine(settings(url), role=Role.PRODUCER)).findings}
    assert "rights_producer" in names
    assert "rights_worker" not in names


async def test_the_shipped_rules_for_a_worker(client: Redis, any_redis_url: str) -> None:
    done = await asyncio.create_subprocess_exec(
        ACL_FOLDER / "render", "worker.acl", "limited", "pw", "-", stdout=asyncio.subprocess.PIPE
    )
    rules = (await done.communicate())[0].decode().split()
    await client.execute_command("ACL", "SETUSER", *rules)
    diagnosis = await examine(settings(any_redis_url.replace("//", "//limited:pw@")))
    assert find(diagnosis, "rights_worker").level is Level.OK, find(diagnosis, "rights_worker")
    assert find(diagnosis, "rights_producer").level is Level.OK


# -- the shard --------------------------------------------------------------------------------


async def test_workers_and_waiting_work(client: Redis, any_redis_url: str) -> None:
    shard = Shard(client)
    at = settings(any_redis_url)
    assert find(await examine(at), "workers").level is Level.NOTE
    await shard.submit("first")
    await shard.wait_ms(50)
    await shard.submit("second", tenant="other", lane=Lane.BATCH)
    diagnosis = await examine(at)
    assert find(diagnosis, "workers").level is Level.WARNING
    assert "start a worker" in find(diagnosis, "workers").remedy
    assert diagnosis.figures["queued_requests"] == 2
    assert diagnosis.figures["queued_requests_batch"] == 1
    assert 50 <= diagnosis.figures["oldest_waiting_ms"] < 5000
    await shard.worker("w").claim_one()
    diagnosis = await examine(at)
    assert find(diagnosis, "workers").level is Level.OK
    assert diagnosis.figures["running_requests"] == 1
    assert 0 <= diagnosis.figures["oldest_waiting_ms"] < 5000
    await shard.redis.zadd(shard.keys.leases, {"w": 1})
    finding = find(await examine(at), "workers")
    assert (finding.level, finding.found) == (Level.WARNING, "none; 1 fell silent owning 1")
    await shard.worker("other").claim(0)
    assert find(await examine(at), "workers").level is Level.NOTE
    await shard.worker("other").claim(5)
    await shard.reap()
    await shard.worker("other").claim(5)
    assert "oldest_waiting_ms" not in (await examine(at)).figures


async def test_a_queue_that_is_nearly_full(client: Redis, any_redis_url: str) -> None:
    shard = Shard(client)
    for i in range(10):
        await shard.submit(f"x{i}")
    diagnosis = await examine(settings(any_redis_url, queue__max_queued_requests=10))
    finding = find(diagnosis, "queue")
    assert finding.level is Level.WARNING
    assert "max_queued_requests" in finding.found
    assert find(await examine(settings(any_redis_url)), "queue").level is Level.OK


async def test_counters_are_recounted_and_repaired(client: Redis, any_redis_url: str) -> None:
    shard = Shard(client)
    for i in range(3):
        await shard.submit(f"x{i}", tenant=f"t{i}")
    at = settings(any_redis_url)
    assert find(await examine(at), "counters").level is Level.OK
    await client.hincrby(shard.keys.counters, "requests", 5)
    await client.hdel(shard.keys.counters, "tenant:t1")
    before = await dump(client)
    finding = find(await examine(at), "counters")
    assert (finding.level, finding.found) == (Level.ERROR, "2 differ from a recount")
    assert await dump(client) == before
    assert find(await examine(at, repair=True), "counters").level is Level.NOTE
    assert find(await examine(at), "counters").level is Level.OK
    await shard.check()


async def test_keys_that_nobody_will_delete(client: Redis, any_redis_url: str) -> None:
    shard = Shard(client)
    worker = shard.worker("w")
    for name in ("waits", "runs", "ended"):
        await shard.submit(name)
    claims = await worker.claim(2)
    await worker.send(worker.tokens(claims[0], 0, 1), worker.ending(claims[1], 0, 1))
    at = settings(any_redis_url)
    assert find(await examine(at), "leftovers").level is Level.OK
    await client.persist(shard.keys.log(claims[1].id))
    await client.set(f"{shard.keys.prefix}mine", "x")
    await client.set("ps:{demo.1}:mine", "of another shard")
    finding = find(await examine(at), "leftovers")
    assert finding.level is Level.WARNING
    assert shard.keys.log(claims[1].id) in finding.found
    assert f"{shard.keys.prefix}mine" in finding.found
    assert (await examine(at)).figures["keys_without_expiry"] == 2


async def test_dead_letters_and_overwritten_keys(client: Redis, any_redis_url: str) -> None:
    shard = Shard(client).with_retry(max_blames=1)
    await shard.submit("x")
    await shard.worker("w").claim_one()
    await shard.ops.release_all("w", blame=True)
    at = settings(any_redis_url)
    finding = find(await examine(at), "dead_letters")
    assert (finding.level, finding.found) == (Level.WARNING, "1")
    assert "penstock dlq" in finding.remedy
    await client.set(shard.keys.deadlines, "text")
    finding = find(await examine(at), "shard")
    assert finding.level is Level.ERROR
    assert "WRONGTYPE" in finding.found


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
    from penstock.producer.doctor.shard import LASTING

    keys = Keys("demo")
    for key in (keys.lanes, keys.leases, keys.deadlines, keys.counters, keys.bell, keys.floors,
                keys.dead_letters, *map(keys.tenants, Lane)):  # fmt: skip
        assert key.removeprefix(keys.prefix) in LASTING
