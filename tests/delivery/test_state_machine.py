"""Random operations by several workers against a model in plain Python, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest
from delivery.fleet import FakeWorker, Shard, token
from delivery.recount import Place, read_usage
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis.asyncio import Redis

from penstock.shared.errors import IdConflict, QueueFull
from penstock.shared.keys import Keys
from penstock.shared.protocol.states import Lane, Reason
from penstock.shared.scripts.operations import Append, Bounds, Claim, RetryPolicy
from penstock.shared.scripts.usage_ledger import UsageCounts

T = TypeVar("T")

WORKERS = ("w0", "w1", "w2")
IDS = [f"x{i}" for i in range(4)]
RETRY = RetryPolicy(max_blames=3, max_attempts=6)
BOUNDS = Bounds(requests=3, tenant_requests=2)
LONG_AGO = 1


@dataclass
class Expected:
    """What the model knows of one request."""

    prompt: str
    tenant: str
    lane: str
    state: str = "queued"
    owner: str = ""
    epoch: int = 0
    n: int = 0
    n_at_claim: int = 0
    blames: int = 0
    died: int = 0
    reason: str = ""
    past_due: bool = False


@dataclass
class Model:
    """The promises, without Redis."""

    requests: dict[str, Expected] = field(default_factory=dict)
    used: dict[Place, UsageCounts] = field(default_factory=dict)
    """The usage ledger: requests and output tokens of all that have ended, forgotten ones, too."""

    def in_state(self, state: str) -> list[str]:
        return [rid for rid, request in self.requests.items() if request.state == state]

    def end(self, rid: str, state: str, reason: Reason) -> None:
        request = self.requests[rid]
        request.state, request.reason = state, reason.value
        place = request.lane, state, request.tenant
        before = self.used.get(place, UsageCounts())
        # A worker that ends a request names the tokens; else they count from the first claim on.
        self.used[place] = before.plus(UsageCounts(requests=1, output_tokens=request.n))

    def give_back(self, rid: str, *, blame: bool) -> None:
        request = self.requests[rid]
        if request.n > request.n_at_claim:
            request.blames = 0
        elif blame:
            request.blames += 1
        request.died += blame
        if request.blames >= RETRY.max_blames:
            self.end(rid, "dead", Reason.POISON)
        elif request.died >= RETRY.max_attempts:
            self.end(rid, "dead", Reason.ATTEMPTS)
        else:
            request.state = "queued"

    def expire(self) -> None:
        for rid in self.in_state("queued") + self.in_state("running"):
            if self.requests[rid].past_due:
                self.end(rid, "expired", Reason.DEADLINE)


class Delivery(RuleBasedStateMachine):
    """Workers that stall, die, repeat themselves and write what is no longer theirs to write."""

    runner: asyncio.Runner
    client: Redis
    shards: Iterator[int]

    def __init__(self) -> None:
        super().__init__()
        keys = Keys("demo", next(self.shards))
        self.shard = Shard(self.client, RETRY, keys=keys)
        self.workers = {name: self.shard.worker(name) for name in WORKERS}
        self.model = Model()
        self.believed: list[tuple[FakeWorker, Claim]] = []
        """Every claim ever handed out, by the worker that got it."""
        self.sent: list[tuple[FakeWorker, Append]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @rule(
        rid=st.sampled_from(IDS), prompt=st.sampled_from(["p", "q"]),
        tenant=st.sampled_from(["a", "b"]), lane=st.sampled_from(Lane),
    )  # fmt: skip
    def submit(self, rid: str, prompt: str, tenant: str, lane: Lane) -> None:
        known = self.model.requests.get(rid)
        waiting = self.model.in_state("queued")
        of_tenant = [r for r in waiting if self.model.requests[r].tenant == tenant]
        same = f"{prompt}{tenant}{lane}"
        submitted = self.shard.submit(rid, prompt=prompt, tenant=tenant, lane=lane, bounds=BOUNDS)
        if known is not None and known.prompt != same:
            with pytest.raises(IdConflict):
                self.run(submitted)
        elif known is not None:
            reply = self.run(submitted)
            assert (reply.duplicate, reply.state, reply.n) == (True, known.state, known.n)
        elif len(waiting) >= BOUNDS.requests:
            with pytest.raises(QueueFull, match=r"queued requests"):
                self.run(submitted)
        elif len(of_tenant) >= BOUNDS.tenant_requests:
            with pytest.raises(QueueFull, match=r"queued tenant_requests"):
                self.run(submitted)
        else:
            assert self.run(submitted).waiting == len(waiting) + 1
            self.model.requests[rid] = Expected(same, tenant, lane.value)

    @rule(name=st.sampled_from(WORKERS), want=st.integers(1, 4), lost=st.booleans())
    def claim(self, name: str, want: int, lost: bool) -> None:
        """`lost`: the worker never sees the reply, as when its connection breaks."""
        worker = self.workers[name]
        claims = self.run(worker.claim(want))
        self.claimed_past_due(bool(claims))
        available = self.model.in_state("queued")
        assert len({claim.id for claim in claims}) == len(claims) <= want
        assert sum(claim.suspect for claim in claims) <= 1
        if not claims:
            assert not available
        for claim in claims:
            request = self.model.requests[claim.id]
            assert claim.id in available
            assert (claim.epoch, claim.n, claim.intact) == (request.epoch + 1, request.n, True)
            assert claim.suspect == (request.blames >= 2)
            request.state, request.owner, request.epoch = "running", name, claim.epoch
            request.n_at_claim = request.n
            if not lost:
                self.believed.append((worker, claim))

    def claimed_past_due(self, got_any: bool) -> None:
        """A claim ends what it meets that is past due; how much it meets is its own affair."""
        for rid in self.model.in_state("queued"):
            if self.model.requests[rid].past_due:
                state = self.run(self.shard.state(rid))
                assert state in ("queued", "expired")
                assert got_any or state == "expired"
                if state == "expired":
                    self.model.end(rid, "expired", Reason.DEADLINE)

    @rule(data=st.data(), tokens=st.integers(0, 3), ends=st.booleans(), shift=st.integers(-1, 1))
    def append(self, data: st.DataObject, tokens: int, ends: bool, shift: int) -> None:
        """By any worker about any claim it ever got, at or near the right index."""
        if not self.believed:
            return
        worker, claim = data.draw(st.sampled_from(self.believed[-12:]))
        start = max(0, self.model.requests[claim.id].n + shift)
        make = worker.ending if ends else worker.tokens
        item = make(claim, start, tokens)
        self.sent.append((worker, item))
        self.send(worker, item)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """The reply was lost: the same call again, now or much later."""
        if self.sent:
            self.send(*data.draw(st.sampled_from(self.sent[-6:])))

    def send(self, worker: FakeWorker, item: Append) -> None:
        request = self.model.requests[item.id]
        mine = (request.owner, request.epoch) == (worker.name, item.epoch)
        stop = item.start + item.num_tokens
        if not mine or request.state == "queued":
            wanted = 2
        elif request.state != "running":
            repeats = bool(item.reason) and request.reason == item.reason
            wanted = 0 if repeats and request.n == stop else 2
        elif request.n not in (item.start, stop) or (request.n != stop and not item.num_tokens):
            wanted = 3
        else:
            wanted = 0
            request.n = stop
            if item.reason:
                self.model.end(item.id, "completed", Reason(item.reason))
        assert self.run(worker.send_one(item)) == (wanted, request.n)

    @rule(rid=st.sampled_from(IDS))
    def cancel(self, rid: str) -> None:
        request = self.model.requests.get(rid)
        reply = self.run(self.shard.ops.cancel(rid))
        if request is None:
            assert (reply.changed, reply.state) == (False, None)
        elif request.state in ("queued", "running"):
            assert reply.changed
            self.model.end(rid, "cancelled", Reason.CLIENT)
        else:
            assert (reply.changed, reply.state) == (False, request.state)

    @rule(name=st.sampled_from(WORKERS), blame=st.booleans())
    def release_all(self, name: str, blame: bool) -> None:
        owned = self.owned_by(name)
        assert self.run(self.shard.ops.release_all(name, blame=blame)) == len(owned)
        for rid in owned:
            self.model.give_back(rid, blame=blame)

    @rule(old=st.sampled_from(WORKERS), new=st.sampled_from(WORKERS), blame=st.booleans())
    def hand_over(self, old: str, new: str, blame: bool) -> None:
        """One worker's requests are claimed by another, or by itself, while it still runs them."""
        self.release_all(old, blame)
        self.claim(new, 4, False)

    @rule(rid=st.sampled_from(IDS))
    def retention_passes(self, rid: str) -> None:
        """Its id is free again. (No worker stalls for that long.)"""
        request = self.model.requests.get(rid)
        if request is not None and request.state not in ("queued", "running"):
            del self.model.requests[rid]
            keys = self.shard.keys
            self.run(self.client.delete(keys.request(rid), keys.log(rid)))
            self.believed = [held for held in self.believed if held[1].id != rid]
            self.sent = [sent for sent in self.sent if sent[1].id != rid]

    @rule(name=st.sampled_from(WORKERS), ids=st.sets(st.sampled_from(IDS), max_size=3))
    def release_some(self, name: str, ids: set[str]) -> None:
        owned = [rid for rid in self.owned_by(name) if rid in ids]
        assert self.run(self.shard.ops.release(name, sorted(ids))) == len(owned)
        for rid in owned:
            self.model.give_back(rid, blame=False)

    @rule(name=st.sampled_from(WORKERS))
    def audit(self, name: str) -> None:
        """The worker knows its last claims it was told of; the rest is given back."""
        known = {claim.id: claim.epoch for worker, claim in self.believed if worker.name == name}
        owned = [(rid, self.model.requests[rid].epoch) for rid in self.owned_by(name)]
        orphans = [rid for rid, epoch in owned if known.get(rid) != epoch]
        assert self.run(self.shard.ops.audit(name, known)) == len(orphans)
        for rid in orphans:
            self.model.give_back(rid, blame=False)

    @rule(dead=st.sets(st.sampled_from(WORKERS)))
    def sweep(self, dead: set[str]) -> None:
        """After the leases of some workers ended."""
        leases = self.run(self.client.zrange(self.shard.keys.leases, 0, -1))
        dead &= {name.decode() for name in leases}
        if dead:
            ends = dict.fromkeys(dead, LONG_AGO)
            self.run(self.client.zadd(self.shard.keys.leases, ends))
        self.model.expire()
        owned = [rid for name in dead for rid in self.owned_by(name)]
        swept = self.run(self.shard.sweep())
        assert (swept.reaped, swept.workers, swept.repaired) == (len(owned), len(dead), 0)
        for rid in owned:
            self.model.give_back(rid, blame=True)

    @rule(rid=st.sampled_from(IDS))
    def deadline_passes(self, rid: str) -> None:
        request = self.model.requests.get(rid)
        if request is None or request.state not in ("queued", "running"):
            return
        request.past_due = True
        keys = self.shard.keys
        just_now = self.run(self.shard.now_ms()) - 1
        self.run(self.client.hset(keys.request(rid), "deadline", just_now))
        self.run(self.client.zadd(keys.deadlines, {rid: just_now}))

    def owned_by(self, name: str) -> list[str]:
        running = self.model.in_state("running")
        return [rid for rid in running if self.model.requests[rid].owner == name]

    @invariant()
    def states_are_the_models(self) -> None:
        for rid, request in self.model.requests.items():
            record = self.run(self.shard.record(rid))
            assert (record["state"], int(record["tokens"])) == (request.state, request.n), rid
            assert record.get("reason", "") == request.reason, rid
            tokens = self.run(self.shard.tokens(rid))
            assert tokens == [token(rid, i) for i in range(request.n)]

    @invariant()
    def ledger_is_the_sum_of_the_ends(self) -> None:
        counted = self.run(read_usage(self.client, self.shard.keys))
        # Time in the queue is the server's to measure.
        assert {p: c._replace(queue_ms=0) for p, c in counted.items()} == self.model.used

    @invariant()
    def recount_agrees(self) -> None:
        open_ids = self.model.in_state("queued") + self.model.in_state("running")
        self.run(self.shard.check(ended=not open_ids))


@contextmanager
def machine(url: str) -> Iterator[type[Delivery]]:
    with asyncio.Runner() as runner:
        client = Redis.from_url(url)
        names = {"runner": runner, "client": client, "shards": count()}
        yield type("DeliveryHere", (Delivery,), names)
        runner.run(client.aclose())


def test_any_sequence_of_operations_keeps_the_promises(redis_url: str) -> None:
    with machine(redis_url) as machine_class:
        run_state_machine_as_test(
            machine_class,
            settings=settings(
                max_examples=40,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
