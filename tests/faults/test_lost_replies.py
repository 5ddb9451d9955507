"""Replies that are lost after the server has executed: each script of workers and clients.

``tests/delivery/test_lost_operator_replies.py`` does the same with those of operators.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults.rig import Rig, digest_of, open_rig
from redis.asyncio import Redis

from penstock.shared.protocol.states import Reason
from penstock.shared.scripts.operations import Operations
from penstock.shared.synthetic import synthetic_tokens

SHORT, LONG = 1, pytest.param(50, marks=pytest.mark.slow)
WORKERS = ("claim", "append", "sweep", "list_compactable", "compact", "audit")
INGRESS = ("poll_ingress", "accept_ingress", "refuse_ingress")


@pytest.mark.parametrize("repetitions", [SHORT, LONG])
async def test_replies_to_a_worker_are_lost(tmp_path: Path, repetitions: int) -> None:
    async with open_rig(tmp_path) as rig:
        for script in WORKERS:
            for _ in range(repetitions):
                await lose_a_reply_to_a_worker(rig, script)
        await rig.end()
        assert rig.findings.counts["completed"] == 6 * repetitions * len(WORKERS)


async def lose_a_reply_to_a_worker(rig: Rig, script: str) -> None:
    proxy = rig.env.workers_proxy
    running = rig.start(rig.cases(6))
    if script == "audit":
        await rig.until(rig.busy, "work is under way")
    before = proxy.cuts
    proxy.cut_replies(digest_of(script))
    if script == "audit":  # it follows a broken connection; that of the audit breaks, too
        proxy.reset()
    await rig.until(lambda: proxy.cuts > before, f"a reply of {script} was cut")
    await asyncio.wait_for(running, 60)


async def test_a_claim_arrives_after_the_audit(tmp_path: Path) -> None:
    """The network may deliver a claim long after its worker stopped waiting for the reply.

    The test sends such a claim in a worker's name. The next audit gives back what it claimed.
    """
    async with open_rig(tmp_path, in_flight=4, tokens=200) as rig:
        env = rig.env
        late = Operations(env.direct.redis, env.keys)
        running = rig.start(rig.cases(24))
        owned: list[str] = []
        while not owned:
            machine = await rig.busy()
            if machine is not None and (name := machine.worker_id) is not None:
                claim = late.claim(
                    name, lease_ms=1000, requests=8, tokens=1 << 16, suspect_ok=False
                )
                (reply,) = await late.run([claim])
                owned = [claim.id for claim in late.read_claim(reply).claims]
        await asyncio.wait_for(running, 60)
        assert any([await rig.attempts(name) > 1 for name in owned])
        await rig.end()


@pytest.mark.parametrize("repetitions", [SHORT, LONG])
async def test_replies_to_a_client_are_lost(tmp_path: Path, repetitions: int) -> None:
    async with open_rig(tmp_path, tokens=300) as rig:
        for number in range(repetitions):
            await lose_the_reply_to_a_submit(rig, duplicates=number % 3)
        for _ in range(repetitions):
            await lose_the_reply_to_a_cancel(rig)
        await rig.end()


async def lose_the_reply_to_a_submit(rig: Rig, duplicates: int) -> None:
    """The client sends it again: it runs once, and is no duplicate of its own."""
    proxy = rig.env.clients_proxy
    before = proxy.cuts
    proxy.cut_replies(digest_of("submit"))
    await asyncio.wait_for(rig.start(rig.cases(6, duplicates=duplicates)), 30)
    assert proxy.cuts > before


async def lose_the_reply_to_a_cancel(rig: Rig) -> None:
    proxy = rig.env.clients_proxy
    before = proxy.cuts
    # Before the work: a machine that stands still may send all cancels while it looks.
    proxy.cut_replies(digest_of("cancel"))
    running = rig.start(rig.cases(4, cancel_after_s=0.2))
    await rig.until(lambda: proxy.cuts > before, "a reply of cancel was cut")
    await asyncio.wait_for(running, 60)


@pytest.mark.parametrize("repetitions", [SHORT, LONG])
async def test_replies_to_the_ingress_and_to_a_reader_are_lost(
    tmp_path: Path, repetitions: int
) -> None:
    async with open_rig(tmp_path) as rig:
        for number in range(repetitions):
            for script in INGRESS:
                await lose_a_reply_to_the_ingress(rig, script, number)
            await lose_the_reply_to_a_reader_that_attends(rig)


async def lose_the_reply_to_a_reader_that_attends(rig: Rig) -> None:
    """It is not taken for one that has left."""
    proxy, client = rig.env.clients_proxy, rig.env.client
    before = proxy.cuts
    proxy.cut_replies(digest_of("reader_heartbeat"))
    submitted = await client.submit(
        [7], seed=1, max_tokens=60, ignore_eos=True, on_disconnect="cancel"
    )
    stream = client.stream(submitted.id)
    result = await asyncio.wait_for(stream.collect(), 30)
    assert result.token_ids == synthetic_tokens(1, [7], 60)
    assert proxy.cuts > before


async def lose_a_reply_to_the_ingress(rig: Rig, script: str, number: int) -> None:
    proxy, env = rig.env.workers_proxy, rig.env
    good, bad = f"good-{script}-{number}", f"bad-{script}-{number}"
    before = proxy.cuts
    proxy.cut_replies(digest_of(script))
    for name, count in ((good, 20), (bad, 0)):
        fields = {"id": name, "prompt": "x", "seed": 1, "max_tokens": count}
        await env.direct.redis.xadd(env.keys.ingress(), fields)
    await rig.until(lambda: proxy.cuts > before, f"a reply of {script} was cut")
    logs = [env.keys.log(name) for name in (good, bad)]
    await rig.until(lambda: _all_exist(env.direct.redis, logs), "both were taken in")
    served = await env.client.result(good, timeout=60)
    assert served.token_ids == synthetic_tokens(1, [ord("x")], 20)
    refused = await env.client.result(bad, timeout=60, check=False)
    assert refused.reason is Reason.INVALID
    assert await env.direct.redis.xlen(env.keys.log(bad)) == 1


async def _all_exist(redis: Redis, keys: Sequence[str]) -> bool:
    return int(await redis.exists(*keys)) == len(keys)


@pytest.mark.parametrize("repetitions", [SHORT, LONG])
async def test_reply_to_the_release_of_a_drain_is_lost(tmp_path: Path, repetitions: int) -> None:
    """It ends in order all the same: exit code 0, and nothing is left to the lease."""
    async with open_rig(tmp_path, tokens=200, lease_ms=120_000) as rig:
        proxy, fleet = rig.env.workers_proxy, rig.env.fleet
        for _ in range(repetitions):
            await fleet.wait_until_ready()
            running = rig.start(rig.cases(8))
            await rig.until(rig.busy, "work is under way")
            leaver = await rig.busy()
            assert leaver is not None
            before = proxy.cuts
            proxy.cut_replies(digest_of("release"))
            fleet.drain(leaver)
            await asyncio.wait_for(running, 100)  # below the lease
            await rig.until(lambda leaver=leaver: leaver.process.poll() is not None, "it ended")
            assert leaver.process.returncode == 0
            assert proxy.cuts > before
        await rig.end()
