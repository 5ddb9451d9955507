"""A script that refuses its arguments has written nothing: every argument of every script, wrong.

The cases come from the headers, so a new argument is tried without a line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from delivery.fleet import Shard, chunk
from redis.exceptions import ResponseError

from penstock.shared.redis.resp import Argument
from penstock.shared.scripts.script_header import ArgumentSpec, Value
from penstock.shared.scripts.script_loader import load_script, script_names

SCRIPTS = tuple(name for name in script_names() if name != "probe")
"""All but the one that runs any words it gets, and writes nothing by itself."""

NUMBERS = ("", "x", "nan", "inf", "-1", "1.5", "1e3", "0x10", " 1", "1 ", "9" * 400, str(2**40 + 1))
ROW = ["running", 1, 0, 1, chunk("running", 0, 1).pack()]

GOOD: dict[str, Value] = {
    "id": "new", "own_id": "own", "lane": "normal", "tenant": "t", "payload": b"p", "digest": b"d",
    "cost": 9, "output_cost": 4, "deadline_ms": 60_000, "max_queue_ms": 0, "retention_ms": 60_000,
    "max_requests": 0, "max_tokens": 0, "max_bytes": 0, "max_tenant_requests": 0, "tenant_share": 0,
    "answer": "",
    "on_disconnect": "", "inbox": "", "note": "",
    "ingress": "ingress", "entry": "1-1", "state": "failed",
    "reason": "invalid", "message": "m", "worker": "w", "entries": 5, "lease_ms": 60_000,
    "rows": msgpack.packb([ROW], use_bin_type=False), "grace_ms": 1000, "ids": ("left",),
    "max_blames": 5, "max_attempts": 20, "known": ("running", 1), "mode": "all", "loss": 0,
    "requests": 5, "tokens": 100, "suspect": 1, "least_urgent": "batch", "last_chunk": b"",
    "chunk": b"", "after_ms": 0, "count": 5, "fingerprint": "f", "rolling": 0,
    "usage_retention_ms": 60_000, "spare_readers": 0,
}  # fmt: skip

CHANGED: dict[str, dict[str, Value]] = {
    "audit": {"known": ("another", 1)},
    "cancel": {"id": "waiting", "reason": "client"},
    "compact": {"id": "ended", "entries": 1},
    "rebuild_counters": {"mode": "repair"},
}
"""Values that differ for one script, so that its call as it should be changes something."""


def wrong_values(argument: ArgumentSpec) -> tuple[Value, ...]:
    """Values that an argument of this kind does not have."""
    if argument.kind == "whole":
        return NUMBERS
    if argument.kind == "name":
        return ("",)
    if argument.kind == "entry":
        return ("", "x", "1", "-", "+", "1-1-1", "1.5-0", "nan-0")
    if argument.kind == "text":
        return ()
    if "whole" in argument.kind:
        return NUMBERS[1:]
    return ("unknown", "NaN", "1.5", "-1", *(() if argument.kind.startswith("|") else ("",)))


def wrong_arguments(name: str) -> Iterator[tuple[str, Value]]:
    """Arguments of a script, each with a value that it does not have."""
    for argument in load_script(name).header.arguments:
        if not argument.repeated:
            for value in wrong_values(argument):
                yield argument.name, value
    if name == "append":
        for rows in (b"", b"\xc1", b"\x01", msgpack.packb([]), msgpack.packb([ROW, ROW])):
            yield "rows", rows
    if name == "audit":
        for epoch in ("", "x", "nan", "1.5", "-1"):
            yield "known", ("running", epoch)
        yield "known", ("running",)


class Scene:
    """A shard with something for every script to change."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard

    async def set_up(self) -> None:
        shard = self.shard
        await shard.submit("ended")
        worker = shard.worker("w")
        await worker.send_one(worker.ending(await worker.claim_one(), 0))
        await shard.submit("dead")
        poisonous = shard.with_retry(max_blames=1)
        await poisonous.worker("x").claim_one()
        await poisonous.ops.release_all("x", blame=True)
        await shard.submit("running")
        await worker.claim_one()
        await shard.submit("waiting")
        await shard.submit("left", on_disconnect="cancel")
        entry = await shard.redis.xadd(shard.keys.ingress(), {"prompt": "x"})
        await shard.redis.hset(shard.keys.counters, "requests", 7)  # for rebuild_counters
        self.entries = {"accept_ingress": entry.decode(), "refuse_ingress": entry.decode()}
        (letter,) = await shard.ops.dead_letters()
        self.entries["redrive"] = letter.entry
        self.before = await self.dump()

    async def dump(self) -> dict[bytes, bytes]:
        redis = self.shard.redis
        return {key: await redis.dump(key) for key in sorted(await redis.keys("*"))}

    async def send(self, name: str, keys: list[str], args: list[Argument]) -> Any:
        source = load_script(name).source
        return await self.shard.redis.eval(source, len(keys), *keys, *args)

    def words(self, name: str, **wrong: Value) -> tuple[list[str], list[Argument]]:
        """Keys and arguments of a call that is as it should be but for these values."""
        values = {**GOOD, **CHANGED.get(name, {})}
        if name in self.entries:
            values["entry"] = self.entries[name]
        if name == "redrive":
            values["id"], values["tenant"] = "dead", "default"
        if name == "append":
            values["id"] = ("running",)
        header, prefix = load_script(name).header, self.shard.keys.prefix
        keys = header.key_names(prefix, values)
        return keys, header.argument_values({**values, **wrong})

    async def refuses(
        self, name: str, keys: list[str], args: list[Argument], what: str = ""
    ) -> None:
        try:
            reply = await self.send(name, keys, args)
        except ResponseError:
            assert await self.dump() == self.before, f"something is written: {what}"
        else:
            pytest.fail(f"not refused, but answered {reply}: {what}")


@pytest.fixture
async def scene(newest_shard: Shard) -> Scene:
    found = Scene(newest_shard)
    await found.set_up()
    return found


@pytest.mark.parametrize("name", SCRIPTS)
async def test_the_call_as_it_should_be_changes_something(scene: Scene, name: str) -> None:
    """Else a refusal that changes nothing would show nothing."""
    await scene.send(name, *scene.words(name))
    assert await scene.dump() != scene.before


@pytest.mark.parametrize("name", SCRIPTS)
async def test_missing_and_surplus_arguments_and_keys(scene: Scene, name: str) -> None:
    keys, args = scene.words(name)
    header = load_script(name).header
    fixed = sum(not argument.repeated for argument in header.arguments)
    await scene.refuses(name, keys, args[: fixed - 1])
    await scene.refuses(name, keys, [])
    await scene.refuses(name, keys[:-1], args)
    await scene.refuses(name, [], args)
    await scene.refuses(name, [*keys, scene.shard.keys.bell], args)
    await scene.refuses(name, ["elsewhere", *keys[1:]], args)
    if fixed == len(header.arguments):
        await scene.refuses(name, keys, [*args, "surplus"])


@pytest.mark.parametrize("name", SCRIPTS)
async def test_a_wrong_argument(scene: Scene, name: str) -> None:
    """One scene is enough for all: each refusal has left it as it was."""
    for argument, value in wrong_arguments(name):
        words = scene.words(name, **{argument: value})
        await scene.refuses(name, *words, what=f"{argument} is {value!r}")


@pytest.mark.parametrize(
    "row",
    [
        ["running", 1, 0, 1.5, b"x"],
        ["running", 1, 0, float("nan"), b"x"],
        ["running", 1, 0, -1, b"x"],
        ["running", 1, 0.5, 1, b"x"],
        ["running", 1, 0, "1", b"x"],
        ["running", 1, 0, 1, b"x", b"end", "queued", "length", -1],
        ["running", 1, 0, 1, b"x", b"end", "completed", "length", 1.5],
        ["running", 1, 0, 1, b"x", b"end", "completed", "length", float("nan")],
        ["running", 1, 0, 1, b"x", b"end", "completed", "length"],
        ["running", 1, 0],
        [],
        "x",
    ],
    ids=str,
)
async def test_a_malformed_row_writes_nothing(scene: Scene, row: Any) -> None:
    """The call as a whole is none of its rows' fault: it renews the lease."""
    keys, args = scene.words("append", rows=msgpack.packb([row], use_bin_type=False))
    (status, _) = await scene.send("append", keys, args)
    assert status != 0
    leases = scene.shard.keys.leases.encode()
    after = await scene.dump()
    assert {**after, leases: b""} == {**scene.before, leases: b""}
