"""Limits of API keys: none is exceeded by one, wherever the requests come from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis

from penstock.producer.gateway.access.key_records import KeyRecord, Limits, digest_of
from penstock.producer.gateway.access.key_store import KeyStore
from penstock.producer.gateway.access.limit_scripts import (
    LimitScripts,
    Verdict,
    load_limit_script,
)
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.script_loader import Script

MINUTE_MS = 60_000


@dataclass
class AccessScripts:
    """The scripts of a server, and keys made for a test."""

    client: RetryingClient
    load: Callable[[str], Script] = load_limit_script
    leases: int = 0
    scripts: LimitScripts = field(init=False)

    def __post_init__(self) -> None:
        self.scripts = LimitScripts(self.client, self.load)
        self.store = KeyStore(self.client)

    async def key(self, **limits: int) -> Key:
        secret, record = await self.store.create(KeyRecord("", "acme", limits=Limits(**limits)))
        return Key(self, digest_of(secret), record.id)

    @property
    def redis(self) -> Redis:
        return self.client.redis


@dataclass
class Key:
    access: AccessScripts
    digest: str
    id: str

    async def admit(
        self,
        cost: int = 1,
        *,
        lease: str | None = None,
        lease_ms: int = MINUTE_MS,
        charge: bool = True,
    ) -> Verdict:
        if lease is None:
            self.access.leases += 1
            lease = f"lease{self.access.leases}"
        return await self.access.scripts.admit(
            self.digest, self.id, lease, cost=cost, lease_ms=lease_ms, charge=charge
        )

    async def settle(self, lease: str, used: int, *, submitted: bool = True) -> bool:
        return await self.access.scripts.settle(self.id, lease, submitted=submitted, used=used)

    async def window(self) -> dict[str, str]:
        raw = await self.access.redis.hgetall(f"ps:{{gateway}}:window:{self.id}")
        return {k.decode(): v.decode() for k, v in raw.items()}

    async def let_pass(self, seconds: int) -> None:
        """As if so much time had passed since everything that was admitted."""
        name = f"ps:{{gateway}}:window:{self.id}"
        for at, value in (await self.window()).items():
            if at.isdigit():
                await self.access.redis.hdel(name, at)
                await self.access.redis.hset(name, str(int(at) - seconds), value)


@pytest.fixture
async def access(any_redis_url: str) -> AsyncIterator[AccessScripts]:
    client = RetryingClient(any_redis_url)
    yield AccessScripts(client)
    await client.redis.config_set("maxmemory", 0)
    await client.aclose()


async def test_requests_per_minute(access: AccessScripts) -> None:
    key = await access.key(requests_per_minute=3)
    verdicts = [await key.admit() for _ in range(4)]
    assert [v.verdict for v in verdicts] == ["ok", "ok", "ok", "full"]
    assert [v.requests_left for v in verdicts] == [2, 1, 0, 0]
    last = verdicts[-1]
    assert (last.bound, last.requests) == ("requests", 3)
    assert 58_000 < last.retry_ms <= 61_000
    await key.let_pass(59)
    assert (await key.admit()).verdict == "full"
    await key.let_pass(3)
    assert (await key.admit()).verdict == "ok"


async def test_no_sixty_seconds_hold_more_than_the_limit(access: AccessScripts) -> None:
    """Two halves, 40 s apart: the first leaves the window before the second does."""
    key = await access.key(requests_per_minute=4)
    assert [(await key.admit()).verdict for _ in range(2)] == ["ok"] * 2
    await key.let_pass(40)
    assert [(await key.admit()).verdict for _ in range(3)] == ["ok", "ok", "full"]
    assert 19_000 < (await key.admit()).retry_ms <= 21_000
    await key.let_pass(22)
    assert [(await key.admit()).verdict for _ in range(3)] == ["ok", "ok", "full"]


async def test_tokens_per_minute_by_what_was_used(access: AccessScripts) -> None:
    key = await access.key(tokens_per_minute=100)
    assert (await key.admit(60, lease="a")).tokens_left == 40
    full = await key.admit(41)
    assert (full.verdict, full.bound) == ("full", "tokens")
    assert await key.settle("a", 10)
    assert not await key.settle("a", 0), "once"
    assert (await key.admit(90, lease="b")).tokens_left == 0
    assert (await key.admit(1)).bound == "tokens"
    await key.settle("b", 95)  # more than was estimated: it counts
    assert (await key.admit(1)).bound == "tokens"


async def test_a_request_above_the_limit_never_fits(access: AccessScripts) -> None:
    key = await access.key(tokens_per_minute=100)
    assert (await key.admit(101)).bound == "tokens"


async def test_what_was_not_submitted_does_not_count(access: AccessScripts) -> None:
    key = await access.key(requests_per_minute=1, tokens_per_minute=10, tokens_per_day=10)
    await key.admit(10, lease="a")
    assert await key.settle("a", 0, submitted=False)
    assert (await key.admit(10)).verdict == "ok"


async def test_concurrent_requests(access: AccessScripts) -> None:
    key = await access.key(concurrent=2)
    await key.admit(lease="a")
    await key.admit(lease="b")
    full = await key.admit()
    assert (full.verdict, full.bound, full.retry_ms) == ("full", "concurrent", 1000)
    await key.settle("a", 1)
    assert (await key.admit(lease="c")).verdict == "ok"
    assert (await key.admit()).verdict == "full"


async def test_what_a_dead_gateway_left_counts_until_another_settles_it(
    access: AccessScripts,
) -> None:
    key = await access.key(concurrent=2, tokens_per_day=100)
    for lease in ("dead", "alive"):
        assert (await key.admit(30, lease=lease)).lapsed == 0
    leases, long_ago = f"ps:{{gateway}}:leases:{key.id}", 1
    await access.redis.zadd(leases, {"dead": long_ago, "alive": long_ago, "unknown": long_ago})
    assert await access.scripts.renew({key.id: ["alive", "nothing"]}, lease_ms=MINUTE_MS) == 1
    full = await key.admit(30)
    assert (full.bound, full.lapsed) == ("concurrent", 2)
    assert await access.scripts.claim(key.id, lease_ms=MINUTE_MS) == [("dead", 30)]
    assert await access.scripts.claim(key.id, lease_ms=MINUTE_MS) == [], "it is looked after"
    full = await key.admit(30)
    assert (full.bound, full.lapsed) == ("concurrent", 0)
    assert await key.settle("dead", 10)
    assert (await key.admit(60, lease="next")).verdict == "ok"
    assert await key.settle("alive", 30)
    assert (await key.admit(1)).bound == "budget"


async def test_a_budget_per_day(access: AccessScripts) -> None:
    key = await access.key(tokens_per_day=100)
    await key.admit(80, lease="a")
    full = await key.admit(21)
    assert (full.verdict, full.bound) == ("full", "budget")
    assert 0 < full.retry_ms <= 86_400_000
    await key.settle("a", 50)
    assert (await key.admit(50, lease="b")).verdict == "ok"
    assert (await key.admit(1)).bound == "budget"
    await key.settle("b", 50)
    await key.let_pass(120)
    assert (await key.admit(1)).bound == "budget", "a day is longer than a minute"
    (day,) = [name for name in await key.window() if name.startswith("day:")]
    name = f"ps:{{gateway}}:window:{key.id}"
    await access.redis.hdel(name, day)
    await access.redis.hset(name, f"day:{int(day[4:]) - 1}", 100)
    assert (await key.admit(1)).verdict == "ok", "and yesterday's is gone"


async def test_a_repeated_call_counts_once(access: AccessScripts) -> None:
    """Its reply was lost."""
    key = await access.key(requests_per_minute=2, concurrent=1)
    for _ in range(3):
        assert (await key.admit(lease="a")).verdict == "ok"
    assert (await key.admit()).requests_left == 1


async def test_what_joins_a_request_uses_no_limit(access: AccessScripts) -> None:
    key = await access.key(requests_per_minute=1, tokens_per_minute=10, concurrent=1)
    assert (await key.admit(7)).verdict == "ok"
    before = await key.window()
    for _ in range(2):
        joined = await key.admit(7, charge=False)
        assert (joined.verdict, joined.requests_left, joined.tokens_left) == ("ok", 0, 3)
    assert await key.window() == before
    await access.store.revoke(key.id)
    assert (await key.admit(7, charge=False)).verdict == "revoked"


async def test_revoked_and_expired_keys_are_refused_at_once(access: AccessScripts) -> None:
    key = await access.key()
    assert (await key.admit()).verdict == "ok"
    await access.store.revoke(key.id)
    assert (await key.admit()).verdict == "revoked"
    secret, record = await access.store.create(KeyRecord("", "acme"), lifetime_ms=1)
    await asyncio.sleep(0.003)
    assert (await Key(access, digest_of(secret), record.id).admit()).verdict == "expired"
    assert (await Key(access, digest_of("sk-penstock-x"), "key-x").admit()).verdict == "unknown"


async def test_rotation_keeps_limits_and_ends_the_old_secret(access: AccessScripts) -> None:
    key = await access.key(requests_per_minute=3)
    await key.admit()
    secret, record = await access.store.rotate(key.id, grace_ms=MINUTE_MS)
    new = Key(access, digest_of(secret), record.id)
    assert (await new.admit()).requests_left == 1
    assert (await key.admit()).verdict == "ok", "in its grace"
    secret, record = await access.store.rotate(key.id)
    assert (await key.admit()).verdict == "expired"
    assert (await new.admit()).verdict == "expired"
    third = Key(access, digest_of(secret), record.id)
    assert (await third.admit()).bound == "requests"
    await access.store.revoke(key.id)
    assert [(await k.admit()).verdict for k in (new, third)] == ["revoked", "revoked"]
    assert (await key.admit()).verdict == "expired"
    assert len(await access.store.all()) == 1


async def test_secrets_are_not_stored(access: AccessScripts) -> None:
    secret, record = await access.store.create(KeyRecord("", "acme"))
    for name in await access.redis.keys("*"):
        assert secret.encode() not in name
        assert secret.encode() not in (await access.redis.dump(name))
    found = await access.store.find(secret)
    assert found == record
    assert await access.store.find(secret[:-1]) is None
    digest = digest_of(secret)
    await access.redis.rename(
        f"ps:{{gateway}}:key:{digest}", f"ps:{{gateway}}:key:{digest_of('x')}"
    )
    assert await access.store.find("x") is None, "a record of another key"


async def test_settling_and_renewing_run_at_maxmemory(access: AccessScripts) -> None:
    key = await access.key(concurrent=1)
    await key.admit(lease="a")
    await access.redis.zadd(f"ps:{{gateway}}:leases:{key.id}", {"a": 1}, xx=True)
    await access.redis.config_set("maxmemory", 1)
    assert await access.scripts.claim(key.id, lease_ms=MINUTE_MS) == [("a", 1)]
    assert await access.scripts.renew({key.id: ["a"]}, lease_ms=MINUTE_MS) == 1
    assert await key.settle("a", 1)


async def test_two_hundred_keys_under_a_thousand_concurrent_requests(any_redis_url: str) -> None:
    """Four gateways; each key is asked for more than each of its limits allows."""
    clients = [RetryingClient(any_redis_url) for _ in range(4)]
    accesses = [AccessScripts(client) for client in clients]
    store = accesses[0].store
    keys = []
    for i in range(200):
        limits = Limits(
            requests_per_minute=4 if i % 3 == 0 else 0,
            tokens_per_minute=30 if i % 3 == 1 else 0,
            concurrent=3 if i % 3 == 2 else 0,
        )
        secret, record = await store.create(KeyRecord("", f"t{i}", limits=limits))
        keys.append((digest_of(secret), record.id))

    async def one(number: int) -> tuple[int, str]:
        who = number % 200
        digest, key_id = keys[who]
        verdict = await accesses[number % 4].scripts.admit(
            digest, key_id, f"l{number}", cost=10, lease_ms=MINUTE_MS
        )
        return who, verdict.verdict

    answers = await asyncio.gather(*map(one, range(1000)))
    admitted = Counter(who for who, verdict in answers if verdict == "ok")
    assert [admitted[i] for i in range(200)] == [4 if i % 3 == 0 else 3 for i in range(200)]
    for client in clients:
        await client.aclose()


MUTANTS: tuple[tuple[str, str, str, Callable[[AccessScripts], Awaitable[None]]], ...] = (
    ("admit", "used.requests + 1 > limits.requests", "used.requests > limits.requests",
     test_requests_per_minute),
    ("admit", "used.tokens + cost > limits.tokens", "used.tokens > limits.tokens",
     test_tokens_per_minute_by_what_was_used),
    ("admit", "LEASES) >= limits.concurrent", "LEASES) > limits.concurrent",
     test_concurrent_requests),
    ("admit", "redis.call('ZCOUNT', LEASES, '-inf', now)", "0",
     test_what_a_dead_gateway_left_counts_until_another_settles_it),
    ("admit", "spent + cost > limits.budget", "spent > limits.budget", test_a_budget_per_day),
    ("admit", "at >= second - WINDOW_S", "at >= second - 30",
     test_no_sixty_seconds_hold_more_than_the_limit),
    ("admit", "'day:' .. day then", "'day:' .. day or true then", test_a_budget_per_day),
    ("admit", "or redis.call('HEXISTS', RESERVED, lease) == 1 then", "then",
     test_a_repeated_call_counts_once),
    ("admit", "if charge == '0' or", "if", test_what_joins_a_request_uses_no_limit),
    ("admit", "if fields[2] then", "if false then",
     test_revoked_and_expired_keys_are_refused_at_once),
    ("admit", "if fields[3] and", "if false and",
     test_revoked_and_expired_keys_are_refused_at_once),
    ("claim", "'-inf', now, 'LIMIT'", "'-inf', '+inf', 'LIMIT'",
     test_what_a_dead_gateway_left_counts_until_another_settles_it),
    ("claim", "redis.call('ZADD', LEASES, 'XX', now + lease_ms, lease)", "",
     test_what_a_dead_gateway_left_counts_until_another_settles_it),
    ("claim", "redis.call('ZREM', LEASES, lease)", "",
     test_what_a_dead_gateway_left_counts_until_another_settles_it),
    ("claim", "\nallow_oom()\n", "\n", test_settling_and_renewing_run_at_maxmemory),
    ("settle", "if not held then return 0 end", "held = held or '0 0 0'",
     test_tokens_per_minute_by_what_was_used),
    ("settle", "redis.call('ZREM', LEASES, lease)", "", test_concurrent_requests),
    ("settle", "tokens - cost + used", "tokens", test_tokens_per_minute_by_what_was_used),
    ("settle", "count - 1 + requests", "count", test_what_was_not_submitted_does_not_count),
    ("settle", "found[2] - cost + used", "found[2]", test_a_budget_per_day),
    ("renew", "\nallow_oom()\n", "\n", test_settling_and_renewing_run_at_maxmemory),
    ("renew", "redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[i])", "",
     test_what_a_dead_gateway_left_counts_until_another_settles_it),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "old", "new", "directed"), MUTANTS, ids=[f"{m[0]}-{m[1][:30]}" for m in MUTANTS]
)
async def test_a_mutant_is_noticed(
    redis_url: str,
    name: str,
    old: str,
    new: str,
    directed: Callable[[AccessScripts], Awaitable[None]],
) -> None:
    source = load_limit_script(name).source
    assert source.count(old) == 1
    mutant = Script.of(name, source.replace(old, new))
    client = RetryingClient(redis_url)
    assert await client.redis.script_load(mutant.source) == mutant.digest
    access = AccessScripts(
        client, lambda wanted: mutant if wanted == name else load_limit_script(wanted)
    )
    try:
        with pytest.raises((Exception, pytest.fail.Exception)):
            await directed(access)
    finally:
        await client.redis.config_set("maxmemory", 0)
        await client.aclose()
