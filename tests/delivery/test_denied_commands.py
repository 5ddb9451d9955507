"""Each command of each script denied once: scripts do not roll back, so every prefix must mend."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

import pytest
from delivery.fleet import FakeWorker, Shard
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from penstock.shared.errors import PenstockError
from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.script_loader import load_script


class Scene:
    """Requests in every state, made by an unhindered user; then one operation by another."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard.with_retry(max_blames=3)
        self.worker: FakeWorker = self.shard.worker("a")

    async def blame(self, name: str, times: int, **options: int) -> None:
        shard = self.shard.with_retry(**options) if options else self.shard
        for _ in range(times):
            assert (await shard.worker("w").claim_one()).id == name
            await shard.ops.release_all("w", blame=True)

    async def set_up(self) -> None:
        shard, worker = self.shard, self.worker
        await shard.submit("long")
        first = shard.worker("first")
        claim = await first.claim_one()
        await first.send(*(first.tokens(claim, i, 1) for i in range(7)), first.ending(claim, 7))
        await shard.ops.release_all("first", blame=False)
        await shard.submit("poison")
        await self.blame("poison", 1, max_blames=1)
        await shard.submit("crashed")
        await self.blame("crashed", 2)
        assert (await worker.claim_one()).suspect
        await shard.submit("suspect")
        await self.blame("suspect", 2)
        for name in ("stalled", "running", "bare", "ending"):
            await shard.submit(name, tenant="t", inbox="g" if name == "ending" else "")
        claims = await worker.claim(4, suspect_ok=False)
        await worker.send(*(worker.tokens(claim, 0, 2) for claim in claims[1:]))
        await shard.submit("orphan")
        dead = shard.worker("dead", lease_ms=1)
        await dead.claim_one(suspect_ok=False)
        await shard.submit("released", lane=Lane.BATCH)
        other = shard.worker("other")
        claim = await other.claim_one(suspect_ok=False)
        await other.send(other.tokens(claim, 0, 1))
        await shard.ops.release_all("other", blame=False)
        for i in range(3):
            await shard.submit(f"fresh{i}", lane=list(Lane)[i])
        await shard.submit("late", deadline_ms=1)
        await shard.submit("bored", max_queue_ms=1)
        await shard.submit("left", on_disconnect="cancel")
        await shard.ops.reader_heartbeat(["left"], grace_ms=1)
        await shard.wait_ms(2)
        await shard.check()


ACCEPTED = (
    "crashed", "suspect", "stalled", "running", "bare", "ending", "orphan", "released", "fresh0",
    "fresh1", "fresh2", "left",
)  # fmt: skip


Operation = Callable[[Scene, Shard], Awaitable[object]]


async def append(scene: Scene, shard: Shard) -> object:
    worker = scene.worker
    calls = {name: worker.claims[name] for name in worker.claims}
    items = [worker.tokens(calls["running"], 2, 1), worker.ending(calls["ending"], 2, 1)]
    items.append(worker.ending(calls["bare"], 2))
    return await shard.call(worker.append_call(*items))


async def submit(scene: Scene, shard: Shard) -> object:
    return await shard.submit("new", tenant="new", lane=Lane.CRITICAL)


async def cancel_running(scene: Scene, shard: Shard) -> object:
    return await shard.ops.cancel("running")


async def cancel_queued(scene: Scene, shard: Shard) -> object:
    return await shard.ops.cancel("fresh1")


async def reader_heartbeat(scene: Scene, shard: Shard) -> object:
    return await shard.ops.reader_heartbeat(["left", "running"], grace_ms=1000)


async def claim(scene: Scene, shard: Shard) -> object:
    return await shard.call(shard.worker("b").claim_call(9))


async def release(scene: Scene, shard: Shard) -> object:
    return await shard.ops.release_all("a", blame=True)


async def audit(scene: Scene, shard: Shard) -> object:
    return await shard.ops.audit("a", {"running": 1, "bare": 1})


async def sweep(scene: Scene, shard: Shard) -> object:
    return await shard.sweep()


async def redrive(scene: Scene, shard: Shard) -> object:
    (letter, *_) = await scene.shard.ops.dead_letters()
    return await shard.ops.redrive(letter.entry)


async def list_compactable(scene: Scene, shard: Shard) -> object:
    return await shard.logs.list_compactable(after_ms=0, count=10)


async def compact(scene: Scene, shard: Shard) -> object:
    names = await scene.shard.logs.list_compactable(after_ms=0, count=10)
    assert names == ["long", "poison"]
    return await shard.compact(*names)


OPERATIONS: dict[Operation, str] = {
    append: "append",
    submit: "submit",
    reader_heartbeat: "reader_heartbeat",
    cancel_running: "cancel",
    cancel_queued: "cancel",
    claim: "claim",
    release: "release",
    audit: "audit",
    sweep: "sweep",
    redrive: "redrive",
    list_compactable: "list_compactable",
    compact: "compact",
}


def commands(script: str) -> list[str]:
    found = re.findall(r"redis\.p?call\('([A-Z]+)'", load_script(script).source)
    return sorted({name.lower() for name in found} - {"time"})


CASES = [(operation, name) for operation, script in OPERATIONS.items() for name in commands(script)]


async def heal(shard: Shard) -> None:
    """What time brings in production: sweeps, and an operator's recount."""
    for _ in range(3):
        assert (await shard.sweep()).failed == 0
    await shard.ops.rebuild_counters()


async def complete_all(shard: Shard) -> None:
    """Other workers finish whatever is still to do."""
    for n in range(50):
        worker = shard.worker(f"finisher{n}")
        claims = await worker.claim(50)
        if not claims:
            break
        assert all(claim.intact for claim in claims)
        await worker.send(*(worker.ending(claim, claim.n, 2) for claim in claims))


@pytest.mark.parametrize(
    ("operation", "command"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
async def test_a_denied_command(
    newest_shard: Shard, redis_url: str, operation: Operation, command: str
) -> None:
    shard = newest_shard
    scene = Scene(shard)
    await scene.set_up()
    accepted = set(ACCEPTED)
    await deny(shard, command)
    async with Redis.from_url(redis_url.replace("//", "//limited:pw@")) as limited:
        failed = await refused(operation(scene, scene.shard.with_client(limited)))
    if operation is submit and not failed:
        accepted.add("new")
    if operation is append:
        # A worker that was told of a failure sends the same again.
        await append(scene, scene.shard)
    for name in ("a", "b"):  # what they own comes back at the latest when their leases end
        await scene.shard.ops.release_all(name, blame=False)
    if operation is sweep:
        await shard.wait_ms(100)  # what fails in a sweep is tried again after that
    await heal(scene.shard)
    await scene.shard.check(stale_entries=True)
    await complete_all(scene.shard)
    await (
        scene.shard.ops.rebuild_counters()
    )  # an entry left without a record was counted back by a claim
    await scene.shard.check(ended=True, ledger=operation is not redrive)
    states = {name: await shard.state(name) for name in accepted}
    assert set(states.values()) <= {"completed", "cancelled", "dead"}, states
    assert [name for name, state in states.items() if state == "dead"] in ([], ["crashed"])


async def refused(operation: Awaitable[object]) -> bool:
    try:
        await operation
    except (PenstockError, ResponseError) as error:
        if "run this command" not in str(error) and "no permission" not in str(error):
            raise
        return True
    return False


async def deny(shard: Shard, command: str) -> None:
    rules = ["reset", "on", ">pw", "~*", "&*", "+@all", f"-{command}"]
    await shard.redis.execute_command("ACL", "SETUSER", "limited", *rules)
