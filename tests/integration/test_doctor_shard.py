"""The doctor of rights and of a shard: what a user may not do, what is miscounted or left."""

from __future__ import annotations

import asyncio

import pytest
from delivery.fleet import Shard
from integration.examining import ACL_FOLDER, find, settings
from redis.asyncio import Redis

from penstock.shared.protocol.states import Lane
from penstock.tools.doctor import Level, Role, examine
from penstock.tools.doctor.rights import ROLES, needed_commands


async def dump(client: Redis) -> dict[bytes, tuple[bytes | None, bool]]:
    return {
        key: (await client.dump(key), await client.pttl(key) > 0)
        async for key in client.scan_iter(count=1000)
    }


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
        (("~ps:{demo.0}:[^r]*", "&*", "+@all"), "~ps:{demo.0}:request:*"),
        (("~*", "&*", "+@all", "-evalsha", "-eval"), "+evalsha +eval"),
        (("~*", "&*", "+@all", "-publish"), "+publish"),
        (("~*", "&*", "+@all", "-subscribe"), "+subscribe"),
        (("~*", "resetchannels", "+@all"), "&ps:{demo.0}:events:*"),
        (("~*", "resetchannels", "&ps:{demo.0}:events:*", "+@all"), "&ps:{demo.0}:inbox:*"),
        (("~ps:{demo.0}:[^b]*", "&*", "+@all"), "~ps:{demo.0}:bell"),
        (("~ps:{demo.0}:[^q]*", "&*", "+@all"), "~ps:{demo.0}:queue:*"),
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
        client, any_redis_url, "~ps:{demo.0}:*", "resetchannels", "&ps:{demo.0}:events:*",
        "&ps:{demo.0}:inbox:*", "+evalsha", "+eval", "+publish", "+subscribe", "+ping", *rules,
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


@pytest.mark.parametrize(
    ("summary", "level"),
    [
        ("m in bfloat16 on cpu, context 64, computed natively (avx2)", Level.OK),
        ("m in bfloat16 on cpu, context 64, computed by torch", Level.NOTE),
        ("m in bfloat16 on cuda:0, context 64, computed by torch", Level.OK),
    ],
)
async def test_what_computes_the_steps(
    client: Redis, any_redis_url: str, summary: str, level: Level
) -> None:
    shard = Shard(client)
    await client.hset(shard.keys.model_card, mapping={"summary": summary})
    finding = find(await examine(settings(any_redis_url)), "steps")
    assert (finding.level, finding.found) == (level, summary)


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


async def test_a_default_user_that_lets_anyone_in(client: Redis, any_redis_url: str) -> None:
    url = await limited(client, any_redis_url, "~*", "&*", "+@all")
    finding = find(await examine(settings(url)), "default_user")
    assert finding.level is Level.WARNING
    assert "default.acl" in finding.remedy
    # Without the right to list users it is not known to be harmless.
    other = await limited(client, any_redis_url, "~*", "&*", "+@all", "-acl")
    assert find(await examine(settings(other)), "default_user").level is Level.WARNING
    await limited(client, any_redis_url, "~*", "&*", "+@all")
    async with Redis.from_url(url) as operator:
        for closed in (("off",), ("on", "resetpass", ">secret")):
            await operator.execute_command("ACL", "SETUSER", "default", *closed)
            finding = find(await examine(settings(url)), "default_user")
            assert finding.level is Level.OK, closed
        for poor in (("resetkeys",), ("~*", "-@all"), ("+@all", "-del")):
            await operator.execute_command("ACL", "SETUSER", "default", *poor)
            finding = find(await examine(settings(url)), "default_user")
            assert finding.level is Level.WARNING, poor
            assert "append-only" in finding.meaning
        await operator.execute_command("ACL", "SETUSER", "default", "nopass")
        await operator.execute_command("ACL", "SETUSER", "default", "on", "nopass", "+@all")
        await operator.execute_command("ACL", "DELUSER", "limited")
    assert find(await examine(settings(any_redis_url)), "default_user").level is Level.OK
