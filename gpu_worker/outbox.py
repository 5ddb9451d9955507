"""Tokens out: what the engine produced and Redis has not confirmed yet.

One :class:`TokenLedger` per owned request holds how far its log is written. The engine's thread
posts updates; the Redis edge takes everything pending as one batch of appends, sends it (again and
again, unchanged, until it is answered) and settles the answer. Only one batch is ever in flight,
so an append can rely on the count and the digest its ledger has confirmed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.shared.events import chunk_packer
from penstock.shared.operations import Append, AppendRow, AppendStatus, Claim
from penstock.shared.protocol import (
    Answer,
    Chunk,
    End,
    Reason,
    TokenLogprobs,
    Usage,
    rolling_digest,
)

from .engine.requests import Finish, Update
from .metrics import WorkerMetrics

__all__ = ["Outbox", "Settled", "TokenLedger", "run_name"]


def run_name(request_id: str, epoch: int) -> str:
    """What a request is called in the engine: a name of this claim and no other.

    A worker that lost a request may be given it again while the engine still computes a step for
    the claim before. What comes of that step is not the new claim's: it has other indexes.
    """
    return f"{request_id}#{epoch}"


@dataclass(slots=True)
class TokenLedger:
    """What is known and pending of one owned request.

    Attributes:
        claim: how this worker got it.
        run: its name in the engine, see :func:`run_name`.
        lane: its lane, as a metric label.
        accepted_at: monotonic time in seconds when it was accepted, by Redis' account.
        confirmed: output tokens that the log holds.
        digest: rolling digest of those.
        pending: ids generated since.
        latest: the last update.
        logprobs: one per pending id if the request asks for them, else empty.
        text: text generated since.
        finish: the engine ended it, its end is not confirmed yet.
        answer: form of its chunks and its end.
        is_json: whether that is JSON; to look an enum's member up takes longer than to pack it.
        id: of the claim; here, too, as what every token needs should lie together.
        epoch: likewise.
    """

    claim: Claim
    run: str
    lane: str
    accepted_at: float
    confirmed: int
    digest: int
    ttft_ms: int | None
    last_token_at: float | None = None
    pending: tuple[int, ...] = ()
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    answer: Answer = Answer.MSGPACK
    is_json: bool = False
    id: str = field(init=False)
    epoch: int = field(init=False)
    latest: Update | None = None

    def __post_init__(self) -> None:
        self.id, self.epoch = self.claim.id, self.claim.epoch

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as far as the engine has told."""
        return 0 if self.latest is None else self.latest.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Those of them that were not computed."""
        return 0 if self.latest is None else self.latest.cached_tokens


@dataclass(frozen=True, slots=True)
class Settled:
    """What an answered batch means for the worker.

    Attributes:
        lost: runs of requests this worker does not own any more; the engine must abort them.
        mismatched: requests whose log is not where this worker left it (a failover lost its
            tail); they must be released, so that somebody continues from what the log holds.
        broken: a write met a broken key or a denied command; Redis may still count a request that
            is lost here as this worker's, so an audit is due.
    """

    lost: tuple[str, ...]
    mismatched: tuple[str, ...]
    broken: bool = False


class Outbox:
    """Pending output of all owned requests.

    Thread-safe: the engine's thread calls :meth:`post`, the Redis edge everything else.

    Args:
        metrics: counts tokens, latencies and ends as they are confirmed.
        wake: called, from the engine's thread, when there is something to take.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        wake: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._pack_chunk = chunk_packer()
        self._ledgers: dict[str, TokenLedger] = {}  # by request
        self._runs: dict[str, TokenLedger] = {}  # the same by run
        self._open: Counter[str] = Counter()  # those the engine has not ended, by lane
        self._dirty: dict[str, TokenLedger] = {}  # those with something to say, by run

    def __len__(self) -> int:
        return len(self._ledgers)

    @property
    def owned(self) -> tuple[str, ...]:
        """Ids of all owned requests."""
        with self._lock:
            return tuple(self._ledgers)

    @property
    def has_pending(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._dirty)

    @property
    def suspects(self) -> int:
        """How many owned requests may have crashed a worker before."""
        with self._lock:
            return sum(ledger.claim.suspect for ledger in self._ledgers.values())

    def open_requests(self) -> Mapping[str, int]:
        """Owned requests that the engine has not ended, by lane; a lane without any may lack."""
        with self._lock:
            return dict(self._open)

    def probe(self) -> None:
        """Have every open request appear in the next batch, so that lost ones are noticed.

        An append without tokens writes nothing; its status tells whether we still own the request.
        """
        with self._lock:
            for run, ledger in self._runs.items():
                self._dirty.setdefault(run, ledger)

    def open(self, claim: Claim, lane: str, answer: Answer = Answer.MSGPACK) -> None:
        """Begin to own a request."""
        ledger = TokenLedger(
            claim=claim,
            run=run_name(claim.id, claim.epoch),
            lane=lane,
            accepted_at=self._clock() - claim.age_ms / 1000,
            confirmed=claim.n,
            digest=claim.chunks[-1].digest if claim.chunks else rolling_digest(()),
            ttft_ms=claim.ttft_ms,
            answer=answer,
            is_json=answer is Answer.JSON,
        )
        with self._lock:
            self._drop(claim.id)
            self._ledgers[claim.id] = self._runs[ledger.run] = ledger
            self._open[lane] += 1

    def owns(self, claim: Claim) -> bool:
        """Whether that very claim still is this worker's, as far as it knows."""
        with self._lock:
            ledger = self._ledgers.get(claim.id)
            return ledger is not None and ledger.claim.epoch == claim.epoch

    def post(self, updates: Sequence[Update]) -> None:
        """Take what the engine produced in a step; updates carry the names of runs."""
        runs = self._runs
        with self._lock:
            dirty = self._dirty
            for update in updates:
                run = update.id
                ledger = runs.get(run)
                if ledger is None or ledger.finish is not None:
                    # Lost while the step ran: what it cost is waste, and counted as such.
                    self._metrics.orphan_tokens.inc(len(update.token_ids))
                    continue
                ledger.pending += update.token_ids
                if update.logprobs:
                    ledger.logprobs += update.logprobs
                ledger.text += update.text
                if update.finish is not None:
                    self._finish(ledger, update.finish)
                ledger.latest = update
                dirty[run] = ledger
        if dirty:
            self._wake()

    def _finish(self, ledger: TokenLedger, finish: Finish) -> None:
        self._open[ledger.lane] -= ledger.finish is None
        ledger.finish = finish

    def end(self, claim: Claim, reason: Reason, message: str) -> None:
        """End a request that never reached the engine."""
        finish = Finish(reason, message)
        self.post(
            [
                Update(
                    id=run_name(claim.id, claim.epoch),
                    start=0,
                    token_ids=(),
                    text="",
                    finish=finish,
                    prompt_tokens=0,
                    cached_tokens=0,
                )
            ]
        )

    def take(self, limit: int) -> list[AppendRow]:
        """Everything pending of up to ``limit`` requests, as appends; oldest first."""
        now = self._clock()
        single: defaultdict[float, int] = defaultdict(int)
        gaps: dict[float, int] = {}
        with self._lock:
            if len(self._dirty) <= limit:
                ledgers, self._dirty = list(self._dirty.values()), {}
            else:
                ledgers = [self._dirty.pop(run) for run in list(self._dirty)[:limit]]
            rows = [self._append(ledger, now, single, gaps) for ledger in ledgers]
        for before, tokens in single.items():
            gap = now - before
            gaps[gap] = gaps.get(gap, 0) + tokens
        if gaps:
            self._metrics.itl.observe(gaps)
        return rows

    def _append(
        self,
        ledger: TokenLedger,
        now: float,
        single: defaultdict[float, int],
        gaps: dict[float, int],
    ) -> AppendRow:
        """What is pending of a request.

        Args:
            ledger: the request's.
            now: monotonic seconds.
            single: gets the time of the token before, if one token is pending; nearly all of a
                step have that in common.
            gaps: gets the gaps between several.
        """
        start, ids = ledger.confirmed, ledger.pending
        count = len(ids)
        chunk = b""
        if count:
            digest = ledger.digest = rolling_digest(ids, ledger.digest)
            if ledger.is_json or ledger.logprobs:
                chunk = _uncommon_chunk(ledger)
            else:
                chunk = self._pack_chunk((start, ids, ledger.text, digest))
            ledger.pending, ledger.text = (), ""
            ledger.confirmed = start + count
            before = ledger.last_token_at
            if before is not None and count == 1:
                single[before] += 1
            elif before is not None:
                gap = (now - before) / count
                gaps[gap] = gaps.get(gap, 0) + count
            elif ledger.ttft_ms is None:
                ledger.ttft_ms = round((now - ledger.accepted_at) * 1000)
                self._metrics.ttft.labels(ledger.lane).observe(now - ledger.accepted_at)
            ledger.last_token_at = now
        if ledger.finish is None:
            return (ledger.id, ledger.epoch, start, count, chunk, b"", "", "", -1)
        reason, n = ledger.finish.reason, ledger.confirmed
        usage = _usage(ledger, n)
        end = End(n=n, reason=reason, message=ledger.finish.message, usage=usage)
        return Append(
            ledger.id, ledger.epoch, start, count, chunk, end.pack(ledger.answer),
            reason.state.value, reason.value, ledger.prompt_tokens + n,
        )  # fmt: skip

    def settle(self, rows: Sequence[AppendRow], statuses: Sequence[int]) -> Settled:
        """Take Redis' answer to a batch: ``statuses`` as :meth:`Operations.append` gives them."""
        lost, mismatched, written = [], [], 0
        ledgers = self._ledgers
        with self._lock:
            for row, status in zip(rows, statuses, strict=True):
                request_id, _, start, count, _, _, _, reason, _ = row
                ledger = ledgers.get(request_id)
                if ledger is None:
                    continue
                if status == 0:  # AppendStatus.WRITTEN
                    written += count
                    if reason:
                        self._close(Reason(reason), ledger)
                elif status == AppendStatus.BROKEN and count > 0:
                    # Its log is not a stream. A bare end puts a new log in its place.
                    self._metrics.append_refusals.labels("broken").inc()
                    lost.append(ledger.run)
                    ledger.confirmed = start
                    message = "its token log in Redis holds a value of another type"
                    self._finish(ledger, Finish(Reason.ENGINE_ERROR, message))
                    ledger.pending = ()
                    ledger.logprobs.clear()
                    self._dirty[ledger.run] = ledger
                else:
                    self._lose(ledger, count, status)
                    lost.append(ledger.run)
                    if status == AppendStatus.MISMATCH:
                        mismatched.append(request_id)
        self._metrics.generation_tokens.inc(written)
        return Settled(tuple(lost), tuple(mismatched), AppendStatus.BROKEN in statuses)

    def _close(self, reason: Reason, ledger: TokenLedger) -> None:
        """Its end is written: count it, and own it no longer."""
        self._drop(ledger.claim.id)
        self._metrics.prompt_tokens.inc(ledger.prompt_tokens)
        self._metrics.cached_prompt_tokens.inc(ledger.cached_tokens)
        self._metrics.requests.labels(reason.state.value, reason.value).inc()
        self._metrics.duration.labels(ledger.lane).observe(self._clock() - ledger.accepted_at)

    def _lose(self, ledger: TokenLedger, count: int, status: int) -> None:
        self._metrics.append_refusals.labels(_REFUSALS[status]).inc()
        self._metrics.orphan_tokens.inc(count + len(ledger.pending))
        self._drop(ledger.id)

    def forget(self, ids: Sequence[str]) -> None:
        """Stop owning requests without a word to Redis (after a release)."""
        with self._lock:
            for request_id in ids:
                self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        ledger = self._ledgers.pop(request_id, None)
        if ledger is not None:
            del self._runs[ledger.run]
            self._dirty.pop(ledger.run, None)
            self._open[ledger.lane] -= ledger.finish is None


def _uncommon_chunk(ledger: TokenLedger) -> bytes:
    """What is pending of a request, packed as JSON or with log-probabilities."""
    logprobs = tuple(ledger.logprobs)
    ledger.logprobs.clear()
    return Chunk(ledger.confirmed, ledger.pending, ledger.text, ledger.digest, logprobs).pack(
        ledger.answer
    )


def _usage(ledger: TokenLedger, n: int) -> Usage:
    return Usage(
        prompt_tokens=ledger.prompt_tokens,
        output_tokens=n,
        cached_tokens=ledger.cached_tokens,
        queue_ms=ledger.claim.queue_ms,
        ttft_ms=ledger.ttft_ms,
        attempts=ledger.claim.attempts,
    )


_REFUSALS = {
    AppendStatus.FENCED: "fenced",
    AppendStatus.MISMATCH: "mismatch",
    AppendStatus.GONE: "gone",
    AppendStatus.BROKEN: "broken",
}
