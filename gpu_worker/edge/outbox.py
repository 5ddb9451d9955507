"""Tokens out: what the engine produced and Redis has not confirmed yet.

One :class:`TokenLedger` per owned request holds how far its log is written. What the engine says
is posted here; the Redis edge takes everything pending as one batch of appends, sends it (again and
again, unchanged, until it is answered) and settles the answer. Only one batch is ever in flight,
so an append can rely on the count and the digest its ledger has confirmed.

What is done here once for every token is most of what a token costs a worker outside its model:
a step of 256 tokens should not need a millisecond. `penstock bench queue` measures it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.shared.protocol import Answer, Chunk, End, Reason, rolling_digest
from penstock.shared.protocol.choice_parts import joined_parts
from penstock.shared.protocol.events import chunk_packer
from penstock.shared.scripts.operations import Append, AppendRow, AppendStatus, Claim

from ..engine.requests import Finish, Update
from ..messages import bare_end
from ..metrics import WorkerMetrics
from .owned_requests import TokenLedger, run_name

__all__ = ["Outbox", "Settled"]


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

    Args:
        metrics: counts tokens, latencies and ends as they are confirmed.
        wake: called when there is something to take.
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
        self._pack_chunk = chunk_packer()
        self._ledgers: dict[str, TokenLedger] = {}  # by request
        self._runs: dict[str, TokenLedger] = {}  # the same by run
        # Sequences by lane; see open_sequences.
        self._open: Counter[str] = Counter()
        # What is to be said, by run; None: only to be asked whether it is still ours.
        self._dirty: dict[str, Update | None] = {}

    def __len__(self) -> int:
        return len(self._ledgers)

    @property
    def owned(self) -> dict[str, int]:
        """Epochs of the claims of all owned requests, by id."""
        return {request_id: ledger.epoch for request_id, ledger in self._ledgers.items()}

    def run_of(self, request_id: str) -> str | None:
        """The run that serves an owned request; None if it is not owned."""
        ledger = self._ledgers.get(request_id)
        return None if ledger is None else ledger.run

    @property
    def has_pending(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._dirty)

    @property
    def suspects(self) -> int:
        """How many owned requests may have crashed a worker before."""
        return sum(ledger.claim.suspect for ledger in self._ledgers.values())

    def open_sequences(self) -> Mapping[str, int]:
        """Sequences of owned requests whose end is not near, by lane. A lane without any may lack.

        Near is what was taken, and what the step gives that runs now: a request that is claimed
        meanwhile takes over the sequence without leaving a step out.
        """
        return self._open

    def probe(self) -> None:
        """Have every open request appear in the next batch, so that lost ones are noticed.

        An append without tokens writes nothing; its status tells whether we still own the request.
        """
        for run in self._runs:
            self._dirty.setdefault(run, None)

    def open(
        self,
        claim: Claim,
        lane: str,
        answer: Answer = Answer.MSGPACK,
        sequences: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        """Begin to own a request.

        Args:
            claim: how it was claimed.
            lane: its lane, as a metric label.
            answer: form of its chunks and its end.
            sequences: how many the engine runs for it.
            max_tokens: its end comes with so many tokens, if not before; None: not known.
        """
        ledger = TokenLedger(
            claim=claim,
            lane=lane,
            accepted_at=self._clock() - claim.age_ms / 1000,
            confirmed=claim.n,
            digest=claim.chunks[-1].digest if claim.chunks else rolling_digest(()),
            ttft_ms=claim.ttft_ms,
            answer=answer,
            sequences=sequences,
            last_index=max_tokens - 1 if max_tokens is not None and sequences == 1 else -1,
        )
        self._drop(claim.id)
        self._ledgers[claim.id] = self._runs[ledger.run] = ledger
        self._open[lane] += sequences

    def post(self, updates: Sequence[Update]) -> None:
        """Take what the engine produced in a step; updates carry the names of runs."""
        dirty = self._dirty
        for update in updates:
            before = dirty.get(update.id)
            dirty[update.id] = update if before is None else _joined(before, update)
        if dirty:
            self._wake()

    def end(self, claim: Claim, reason: Reason, message: str) -> None:
        """End a request that never reached the engine."""
        self.post([bare_end(run_name(claim.id, claim.epoch), reason, message)])

    def take(self, limit: int) -> list[AppendRow]:
        """Everything pending of up to ``limit`` requests, as appends; oldest first."""
        if len(self._dirty) <= limit:
            dirty, self._dirty = self._dirty, {}
        else:
            dirty = {run: self._dirty.pop(run) for run in list(self._dirty)[:limit]}
        rows: list[AppendRow] = []
        times: list[float] = []  # of the tokens before
        gaps: list[tuple[float, int]] = []
        runs, now = self._runs, self._clock()
        for run, update in dirty.items():
            ledger = runs.get(run)
            if ledger is None:
                # Lost while the step ran: what it cost is waste, and counted as such.
                self._metrics.orphan_tokens.inc(0 if update is None else len(update.token_ids))
            elif (
                not ledger.in_stream
                or update is None
                or update.finish is not None
                or update.logprobs
                or len(ids := update.token_ids) != 1
            ):
                rows.append(self._special_row(ledger, update, now, gaps))
            else:  # nearly always
                start = ledger.confirmed
                digest = ledger.digest = rolling_digest(ids, ledger.digest)
                ledger.confirmed = start + 1
                if start + 1 == ledger.last_index:
                    self._close_sequences(ledger)
                times.append(ledger.last_token_at)
                ledger.last_token_at = now
                chunk = self._pack_chunk((start, ids, update.text, digest))
                rows.append((ledger.id, ledger.epoch, start, 1, chunk))
        # Those of one step have the time before in common, too.
        gaps += ((now - before, tokens) for before, tokens in Counter(times).items())
        self._metrics.itl.observe(gaps)
        return rows

    def _special_row(
        self,
        ledger: TokenLedger,
        update: Update | None,
        now: float,
        gaps: list[tuple[float, int]],
    ) -> AppendRow:
        """What is to be said of a request, whatever it is.

        Args:
            ledger: the request's.
            update: what is new; None: only whether it is still ours.
            now: monotonic seconds.
            gaps: gets the gap between tokens in seconds, and how often it came.
        """
        start = ledger.confirmed
        if ledger.finish is not None:
            # Its log is broken: what the engine still said is waste.
            self._metrics.orphan_tokens.inc(0 if update is None else len(update.token_ids))
            return _last_row(ledger, start, 0, b"")
        if update is None:
            return (ledger.id, ledger.epoch, start, 0, b"")
        ledger.prompt_tokens, ledger.cached_tokens = update.prompt_tokens, update.cached_tokens
        ids, chunk = update.token_ids, b""
        if ids:
            text = "" if update.parts else update.text
            whole = Chunk(
                start, ids, text, 0, update.logprobs,
                _text_lengths(update) if _is_cut_by_token(update) else (),
                update.parts, update.prompt_logprobs,
            )  # fmt: skip
            ledger.digest = whole.digest_after(ledger.digest)
            ledger.confirmed = start + len(ids)
            if ledger.confirmed == ledger.last_index:
                self._close_sequences(ledger)
            chunk = whole._replace(digest=ledger.digest).pack(ledger.answer)
            if start > ledger.claim.n:  # not this worker's first
                gaps.append(((now - ledger.last_token_at) / len(ids), len(ids)))
            elif ledger.ttft_ms is None:
                waited = now - ledger.accepted_at
                ledger.ttft_ms = round(waited * 1000)
                self._metrics.ttft.labels(ledger.lane).observe(waited)
            ledger.last_token_at = now
            ledger.in_stream = ledger.answer is Answer.MSGPACK and not update.parts
        if update.finish is None:
            return (ledger.id, ledger.epoch, start, len(ids), chunk)
        ledger.discarded_tokens = update.discarded_tokens
        self._finish(ledger, update.finish)
        return _last_row(ledger, start, len(ids), chunk)

    def _finish(self, ledger: TokenLedger, finish: Finish) -> None:
        self._close_sequences(ledger)
        ledger.finish, ledger.in_stream = finish, False

    def settle(self, rows: Sequence[AppendRow], statuses: Sequence[int]) -> Settled:
        """Take Redis' answer to a batch: ``statuses`` as :meth:`Operations.append` gives them."""
        lost: list[str] = []
        mismatched: list[str] = []
        if any(statuses):
            refused = [(row, code) for row, code in zip(rows, statuses, strict=True) if code]
            rows = [row for row, code in zip(rows, statuses, strict=True) if not code]
            for row, status in refused:
                self._refuse(row, status, lost, mismatched)
        ledgers = self._ledgers
        written = sum([row[3] for row in rows if row[0] in ledgers])
        for row in rows:
            if isinstance(row, Append) and row.reason:
                self._close(row)
        self._metrics.generation_tokens.inc(written)
        return Settled(tuple(lost), tuple(mismatched), AppendStatus.BROKEN in statuses)

    def _refuse(self, row: AppendRow, status: int, lost: list[str], mismatched: list[str]) -> None:
        """Redis did not take a row: note it and what follows for the request."""
        request_id, count = row[0], row[3]
        ledger = self._ledgers.get(request_id)
        if ledger is None:
            return
        lost.append(ledger.run)
        self._metrics.append_refusals.labels(_REFUSALS[status]).inc()
        if status == AppendStatus.BROKEN and count > 0:
            # Its log is not a stream. A bare end puts a new log in its place.
            message = "its token log in Redis holds a value of another type"
            self._finish(ledger, Finish(Reason.ENGINE_ERROR, message))
            ledger.confirmed = row[2]
            self._dirty.setdefault(ledger.run, None)
            return
        self._metrics.orphan_tokens.inc(count + self._drop(request_id))
        if status == AppendStatus.MISMATCH:
            mismatched.append(request_id)

    def _close(self, row: Append) -> None:
        """A request's end is written: count it, and own it no longer."""
        ledger = self._ledgers.get(row.id)
        if ledger is None:
            return
        self._drop(row.id)
        self._metrics.prompt_tokens.inc(ledger.prompt_tokens)
        self._metrics.cached_prompt_tokens.inc(ledger.cached_tokens)
        self._metrics.requests.labels(row.state, row.reason).inc()
        self._metrics.duration.labels(ledger.lane).observe(self._clock() - ledger.accepted_at)

    def forget(self, ids: Sequence[str]) -> None:
        """Stop owning requests without a word to Redis (after a release)."""
        for request_id in ids:
            self._drop(request_id)

    def _close_sequences(self, ledger: TokenLedger) -> None:
        self._open[ledger.lane] -= ledger.sequences
        ledger.sequences = 0

    def _drop(self, request_id: str) -> int:
        """Own a request no longer; returns how many of its tokens were not taken."""
        ledger = self._ledgers.pop(request_id, None)
        if ledger is None:
            return 0
        del self._runs[ledger.run]
        self._close_sequences(ledger)
        update = self._dirty.pop(ledger.run, None)
        return 0 if update is None else len(update.token_ids)


def _joined(before: Update, update: Update) -> Update:
    """Two updates of a run as one."""
    return replace(
        update,
        start=before.start,
        token_ids=before.token_ids + update.token_ids,
        text=before.text + update.text,
        logprobs=before.logprobs + update.logprobs,
        parts=joined_parts(before.parts, update.parts),
        prompt_logprobs=before.prompt_logprobs,  # they come with the first
        text_lengths=(_text_lengths(before) + _text_lengths(update))[:-1],
    )


def _is_cut_by_token(update: Update) -> bool:
    """Whether a reader that begins within the update's chunk needs its text lengths."""
    return bool(update.text_lengths) and len(update.parts or (0,)) < len(update.token_ids)


def _text_lengths(update: Update) -> tuple[int, ...]:
    """How many bytes of the text came with each token; those not known count as the last's."""
    count = len(update.token_ids)
    if not count:
        return ()
    before = update.text_lengths or (0,) * (count - 1)
    return (*before, len(update.text.encode()) - sum(before))


def _last_row(ledger: TokenLedger, start: int, count: int, chunk: bytes) -> Append:
    """What is written of a request that has ended."""
    assert ledger.finish is not None
    n, reason = ledger.confirmed, ledger.finish.reason
    end = End(n=n, reason=reason, message=ledger.finish.message, usage=ledger.usage())
    return Append(
        ledger.id, ledger.epoch, start, count, chunk, end.pack(ledger.answer),
        reason.state.value, reason.value, ledger.prompt_tokens + n + ledger.discarded_tokens,
    )  # fmt: skip


_REFUSALS = {
    AppendStatus.FENCED: "fenced",
    AppendStatus.MISMATCH: "mismatch",
    AppendStatus.GONE: "gone",
    AppendStatus.BROKEN: "broken",
}
