"""The target ``worker``: payloads and entries to a worker that serves a neighbour's streams."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from fuzz import generators as make
from fuzz.targets import Target
from workers import WorkerFactory

from penstock.shared.keys import Keys
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.request import Request
from penstock.shared.scripts.operations import Bounds, request_arguments
from penstock.shared.scripts.script_loader import load_script
from penstock.shared.synthetic import synthetic_tokens

KEYS = Keys("demo")
TOKENS = 60
END_S = 60.0


class LiveWorker(Target):
    """Each batch runs beside two streams of a neighbour, which must be exact.

    Every hostile message must get one end. ``worst_gap_s`` is the longest time between two looks at
    a neighbour's log that found nothing new while its stream ran.
    """

    batch = 200

    def open(self) -> None:
        self.worst_gap_s = 0.0
        self._server = EmbeddedRedis(password="")
        self._server.__enter__()
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz")
        self._factory = WorkerFactory(self._server.url, Path(self._folder.name))
        self._worker = self._factory.engine(
            "w", model__path="synthetic", model__synthetic_step_ms=1, worker__log_level="error",
            queue__retention_s=30,
        )  # fmt: skip
        self._client = redis.Redis.from_url(self._server.url)
        self._submit = load_script("submit")
        self._client.script_load(self._submit.source)
        self._count = 0

    def close(self) -> None:
        self._factory.close()
        self._client.close()
        self._server.__exit__(None, None, None)
        self._folder.cleanup()

    def case(self, dice: random.Random) -> tuple[str, Any]:
        if dice.random() < 0.5:
            return "payload", make.payload(dice)
        return "entry", make.entry_parts(dice)

    def run(self, case: Any) -> None:
        self.run_batch([(0, case)], [0])

    def run_batch(self, cases: list[tuple[int, Any]], began: list[int]) -> None:
        began[0] = cases[0][0]
        self._count += 1
        beside = [f"n{self._count}-{side}" for side in "ab"]
        pipe = self._client.pipeline(transaction=False)
        for name in beside:
            self._add_neighbour(pipe, name)
        hostile = []
        for number, (kind, data) in cases:
            name = f"f{self._count}-{number}"
            if kind == "payload":
                hostile.append(name)
                self._add_payload(pipe, name, data)
            else:
                pipe.execute_command("XADD", KEYS.ingress(), "*", *(data or [b"x", b"y"]))
        for reply in pipe.execute(raise_on_error=False):
            assert not isinstance(reply, Exception), reply
        self._await(hostile, beside)
        self._check_worker()

    def _add_neighbour(self, pipe: Any, name: str) -> None:
        request = Request.build(id=name, prompt="neighbour", max_tokens=TOKENS, ignore_eos=True)
        self._add(pipe, request, request.pack())

    def _add_payload(self, pipe: Any, name: str, payload: bytes) -> None:
        request = Request.build(id=name, prompt="x", lane="batch", deadline_ms=2_000)
        self._add(pipe, request, payload)

    def _add(self, pipe: Any, request: Request, payload: bytes) -> None:
        values = request_arguments(request, payload, Bounds(), 600_000)
        values |= {"retention_ms": 60_000, "inbox": "", "note": ""}
        header = self._submit.header
        keys = header.key_names(KEYS.prefix, values)
        pipe.evalsha(self._submit.digest, len(keys), *keys, *header.argument_values(values))

    def _await(self, hostile: list[str], beside: list[str]) -> None:
        """Until every stream has ended; the neighbours' must be what they would be alone."""
        give_up = time.monotonic() + END_S
        seen: dict[str, tuple[int, float]] = {}
        open_ids = {*hostile, *beside}
        while open_ids or self._client.xlen(KEYS.ingress()):
            assert time.monotonic() < give_up, f"no end after {END_S:g} s: {sorted(open_ids)[:5]}"
            names = sorted(open_ids)
            pipe = self._client.pipeline(transaction=False)
            for name in names:
                pipe.hmget(KEYS.request(name), "state", "tokens")
            now = time.monotonic()
            for name, (state, tokens) in zip(names, pipe.execute(), strict=True):
                if name in beside and state == b"running":
                    self._note(seen, name, int(tokens), now)
                if state is None or state not in (b"queued", b"running"):
                    open_ids.discard(name)
        for name in beside:
            self._check_stream(name)

    def _note(self, seen: dict[str, tuple[int, float]], name: str, tokens: int, now: float) -> None:
        last, since = seen.get(name, (-1, now))
        if tokens > last:
            seen[name] = tokens, now
        elif last > 0:
            self.worst_gap_s = max(self.worst_gap_s, now - since)

    def _check_stream(self, name: str) -> None:
        entries: Any = self._client.xrange(KEYS.log(name))
        ids: list[int] = []
        ends: list[End] = []
        for _, fields in entries:
            for data in fields.values():
                event = unpack_event(data)
                if isinstance(event, Chunk):
                    ids += event.token_ids
                else:
                    ends.append(event)
        expected = synthetic_tokens(Request(id=name, prompt="x").seed, [*b"neighbour"], TOKENS)
        assert ids == list(expected), f"the neighbour's stream {name} is not exact"
        assert len(ends) == 1

    def _check_worker(self) -> None:
        assert self._worker.process.poll() is None, "the worker has ended"
        log = self._worker.log.read_text(errors="replace")
        assert "Traceback" not in log, log[-3000:]
