"""The target ``scripts``: every script with every argument wrong, on a real server."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack
import redis
from fuzz import generators as make
from fuzz.targets import Target

from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.scripts.script_header import ArgumentSpec
from penstock.shared.scripts.script_loader import load_script, script_names

SCRIPTS = tuple(name for name in script_names() if name != "probe")
PREFIX = "ps:{fuzz.0}:"
WRONG_NUMBERS = ("", "x", "nan", "inf", "-1", "1.5", "1e3", "0x10", " 1", "1 ", str(2**40 + 1))
NEIGHBOUR = "neighbour"
NEIGHBOUR_WORKER = "w-neighbour"
HOUR_MS = 3_600_000


def good(dice: random.Random, argument: ArgumentSpec) -> Any:
    """A value that the argument may have, none of the neighbour's."""
    name, kind = argument.name, argument.kind
    if name == "rows":
        row = ["a", dice.randrange(3), 0, dice.randrange(3), b"x", b"", "", "", -1]
        rows = [row[: dice.randrange(4, 10)] for _ in range(dice.randrange(3))]
        return make.mutated(dice, msgpack.packb(rows, use_bin_type=False))
    if name.endswith("_ms"):
        return dice.choice((HOUR_MS, 2 * HOUR_MS))
    if kind == "whole":
        return dice.choice((1, 2, 7, 1000))
    if kind == "name":
        return dice.choice(("a", "b", "c", "d"))
    if kind == "entry":
        return dice.choice(("1-1", "0-0", f"{2**50}-7"))
    if kind == "text":
        return dice.choice((b"", b"a", b"\xff", b"x" * 100))
    return dice.choice([part if part != "whole" else "5" for part in kind.split("|")])


def wrong(dice: random.Random, argument: ArgumentSpec) -> Any:
    """A value that it may not have; None if it takes any."""
    if argument.kind == "text":
        return None
    if argument.kind == "name":
        return ""
    if argument.kind == "entry":
        return dice.choice(("", "x", "1", "-", "+", "1-1-1", "1.5-0", "nan-0"))
    if argument.kind == "whole":
        return dice.choice(WRONG_NUMBERS)
    return dice.choice(("unknown", "NaN", "1.5", "-1"))


class Scripts(Target):
    """Calls of all scripts; those with a wrong argument must have written nothing.

    Calls come in batches of one kind: all of them wrong, which must leave the server's count of
    changes as it is; or as they may be, from a producer or worker that does what it likes with
    requests of its own. The neighbour is a running request with tokens, of another owner.
    """

    batch = 500

    def open(self) -> None:
        self._server = EmbeddedRedis(password="")
        self._server.__enter__()
        self._client = redis.Redis.from_url(self._server.url)
        self._scripts = {name: load_script(name) for name in SCRIPTS}
        self._batches = 0
        self._begin()

    def close(self) -> None:
        self._client.close()
        self._server.__exit__(None, None, None)

    def _begin(self) -> None:
        self._client.flushall()
        for script in self._scripts.values():
            self._client.script_load(script.source)
        values = {
            "id": NEIGHBOUR, "lane": "normal", "tenant": "n", "payload": b"p", "digest": b"d",
            "cost": 9, "output_cost": 4, "deadline_ms": 2**40, "max_queue_ms": 0,
            "retention_ms": HOUR_MS, "max_requests": 0, "max_tokens": 0, "max_bytes": 0,
            "max_tenant_requests": 0, "tenant_share": 0, "answer": "", "on_disconnect": "",
            "inbox": "", "note": "", "worker": NEIGHBOUR_WORKER, "lease_ms": 2**40, "requests": 1,
            "tokens": 100, "suspect": 1, "least_urgent": "batch", "fingerprint": "",
        }  # fmt: skip
        for name in ("submit", "claim"):
            self._call(name, values)
        rows = msgpack.packb([[NEIGHBOUR, 1, 0, 2, b"tokens"]], use_bin_type=False)
        values = {**values, "rows": rows}
        del values["id"]  # its keys are named beside the others
        self._call("append", values, f"request:{NEIGHBOUR}", f"log:{NEIGHBOUR}")
        self._before = self._look()

    def _call(self, name: str, values: dict[str, Any], *more_keys: str) -> None:
        header = self._scripts[name].header
        keys = header.key_names(PREFIX, values) + [PREFIX + key for key in more_keys]
        self._client.evalsha(  # type: ignore[no-untyped-call]
            self._scripts[name].digest, len(keys), *keys, *header.argument_values(values)
        )

    def _look(self) -> list[Any]:
        client = self._client
        return [
            client.hgetall(f"{PREFIX}request:{NEIGHBOUR}"),
            client.xrange(f"{PREFIX}log:{NEIGHBOUR}"),
            client.hgetall(f"{PREFIX}owned:{NEIGHBOUR_WORKER}"),
            client.zscore(f"{PREFIX}deadlines", NEIGHBOUR),
        ]

    def case(self, dice: random.Random) -> tuple[str, bool, list[Any], list[Any]]:
        name = dice.choice(SCRIPTS)
        header = load_script(name).header
        values: dict[str, Any] = {}
        for argument in header.arguments:
            count = dice.randrange(3)
            found = [good(dice, argument) for _ in range(count if argument.repeated else 1)]
            values[argument.name] = found if argument.repeated else found[0]
        must_refuse = False
        single = [a for a in header.arguments if not a.repeated]
        if single and dice.random() < 0.7:
            argument = dice.choice(single)
            value = wrong(dice, argument)
            if value is not None:
                values[argument.name], must_refuse = value, True
        named = {"id": "a", "lane": "normal", "tenant": "t", "ingress": "ingress"}
        if any(key.repeated for key in header.keys):
            del named["id"]
        shown = {argument: self._shown(value) for argument, value in values.items()}
        keys: list[Any] = header.key_names(PREFIX, named | shown)
        if name == "append":
            keys += [f"{PREFIX}{kind}:a" for kind in ("request", "log") * dice.randrange(3)]
        arguments: list[Any] = list(header.argument_values(values))
        if dice.random() < 0.05:
            cut = dice.choice((keys, arguments))
            if cut is keys or not any(a.repeated for a in header.arguments):
                del cut[-1:]
                must_refuse = True
        return name, must_refuse, keys, arguments

    @staticmethod
    def _shown(value: Any) -> Any:
        return value.decode("latin-1") if isinstance(value, bytes) else value

    def run(self, case: Any) -> None:
        self.run_batch([(0, case)], [0])

    def run_batch(self, cases: Sequence[tuple[int, Any]], began: list[int]) -> None:
        began[0] = cases[0][0]
        for must_refuse in (True, False):
            part = [case for _, case in cases if case[1] is must_refuse]
            changes = self._changes()
            pipe = self._client.pipeline(transaction=False)
            for name, _, keys, arguments in part:
                pipe.evalsha(self._scripts[name].digest, len(keys), *keys, *arguments)  # type: ignore[no-untyped-call]
            replies = pipe.execute(raise_on_error=False)
            for case, reply in zip(part, replies, strict=True):
                if must_refuse:
                    assert isinstance(reply, redis.ResponseError), f"not refused: {case!r}"
                if isinstance(reply, Exception):
                    assert isinstance(reply, redis.ResponseError), f"{reply!r}: {case!r}"
            if must_refuse:
                assert self._changes() == changes, "a refused call has written"
        self.check_neighbour()
        self._batches += 1
        if self._batches % 40 == 0:
            self._begin()

    def _changes(self) -> int:
        info: Any = self._client.info("persistence")
        return int(info["rdb_changes_since_last_save"])

    def check_neighbour(self) -> None:
        assert self._look() == self._before
