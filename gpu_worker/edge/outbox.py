"""Tokens out: what the engine produced and Redis has not confirmed yet.

The engine's updates are posted here. The Redis loop takes everything pending as one batch of
appends, sends it unchanged until it is answered, and applies the answer. Only one batch is ever in
flight, so an append can rely on the count and the digest that its :class:`OwnedRequest` holds.

Most of what a token costs a worker outside its model is spent here. A step of 256 tokens should not
need a millisecond; `penstock bench queue` measures it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.shared.protocol.events import Chunk, End, chunk_packer, rolling_digest
from penstock.shared.protocol.states import Answer, Reason
from penstock.shared.scripts.operations import Append, AppendRow, AppendStatus, Claim

from ..engine.requests.engine_request import Finish, Update, joined_updates
from ..messages import bare_end
from ..monitoring.metrics import WorkerMetrics
from .guarded_task import Guard
from .owned_requests import OwnedRequest, OwnedRequests, run_name

__all__ = ["BatchOutcome", "Outbox"]


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """What an answered batch means for the worker.

    Attributes:
        lost: runs of requests that this worker no longer owns; the engine must abort them.
        mismatched: requests whose log is not where this worker left it: a failover lost its tail.
            Once released, they continue from what the log holds.
        broken: a write met a broken key or a denied command. An audit is due: Redis may still count
            a request lost here as this worker's.
    """

    lost: tuple[str, ...]
    mismatched: tuple[str, ...]
    broken: bool = False


class Outbox:
    """Pending output of all owned requests.

    Args:
        owned: the table of owned requests; this class alone adds and drops.
        metrics: counts tokens, latencies and ends as they are confirmed.
        wake: called when there is something to take.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        owned: OwnedRequests,
        metrics: WorkerMetrics,
        wake: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owned = owned
        self._metrics = metrics
        self._wake = wake
        self._clock = clock
        self._guard = Guard("outbox", metrics)
        self._pack_chunk = chunk_packer()
        # What is to be written, by run; None: only to be asked whether it is still ours.
        self._pending: dict[str, Update | None] = {}
        self._reach, self._longest = 1, 1  # most tokens of a chunk: of the last batch, of this one
        self._unwritable: list[str] = []  # runs whose output raised; the engine must abort them

    @property
    def has_pending(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._pending)

    def probe(self) -> None:
        """Have every open request appear in the next batch, so that lost ones are noticed.

        An append without tokens writes nothing; its status tells whether we still own the request.
        """
        for run in self._owned.by_run:
            self._pending.setdefault(run, None)

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
            max_tokens: it ends with this many tokens at the latest; None: not known.
        """
        owned = OwnedRequest(
            claim=claim,
            lane=lane,
            accepted_at=self._clock() - claim.age_ms / 1000,
            next_index=claim.n,
            digest=claim.chunks[-1].digest if claim.chunks else rolling_digest(()),
            ttft_ms=claim.ttft_ms,
            answer=answer,
            sequences=sequences,
            last_index=max_tokens - 1 if max_tokens is not None and sequences == 1 else -1,
        )
        self._drop(claim.id)
        self._owned.add(owned)

    def post(self, updates: Sequence[Update]) -> None:
        """Take what the engine produced; updates carry the names of runs."""
        pending = self._pending
        for update in updates:
            before = pending.get(update.id)
            try:
                pending[update.id] = update if before is None else joined_updates((before, update))
            except Exception as error:
                what = f"its output cannot be joined: {self._guard.isolated(update.id, error)}"
                pending[update.id] = bare_end(update.id, Reason.ENGINE_ERROR, what)
                self._unwritable.append(update.id)
        if pending:
            self._wake()

    def end(self, claim: Claim, reason: Reason, message: str) -> None:
        """End a request that never reached the engine."""
        self.post([bare_end(run_name(claim.id, claim.epoch), reason, message)])

    def take(self, limit: int) -> list[AppendRow]:
        """Everything pending of up to ``limit`` requests, as appends; oldest first."""
        if len(self._pending) <= limit:
            pending, self._pending = self._pending, {}
        else:
            pending = {run: self._pending.pop(run) for run in list(self._pending)[:limit]}
        reach = self._reach = self._longest  # the next message may bring as many again
        self._longest = 1
        rows: list[AppendRow] = []
        times: list[tuple[float, int]] = []  # of the tokens before, and how many followed
        gaps: list[tuple[float, int]] = []
        runs, now, pack_chunk = self._owned.by_run, self._clock(), self._pack_chunk
        for run, update in pending.items():
            owned = runs.get(run)
            if owned is None:
                # Lost while the step ran: its tokens are counted as waste.
                self._metrics.orphan_tokens.inc(0 if update is None else len(update.token_ids))
                continue
            start = owned.next_index
            try:
                if (
                    not owned.in_stream
                    or update is None
                    or update.finish is not None
                    or update.logprobs
                    or update.deltas
                    or not (count := len(ids := update.token_ids))
                ):
                    rows.append(self._special_row(owned, update, now, gaps))
                    continue
                # Nearly always:
                digest = rolling_digest(ids, owned.digest)
                lengths = update.bytes_by_token if update.text_lengths else None
                wire = (start, ids, update.text, digest)
                chunk = pack_chunk(wire if lengths is None else (*wire, None, lengths))
            except Exception as error:
                rows.append(self._unwritable_row(owned, start, error))
                continue
            owned.digest = digest
            owned.next_index = start + count
            self._longest = max(self._longest, count)
            if start + count + max(reach, count) > owned.last_index >= 0:
                self._owned.close_sequences(owned)
            times.append((owned.last_token_at, count))
            owned.last_token_at = now
            rows.append((owned.id, owned.epoch, start, count, chunk))
        # Tokens of the same steps mostly share the time of their predecessors, too.
        gaps += (
            ((now - before) / count, count * requests)
            for (before, count), requests in Counter(times).items()
        )
        self._metrics.itl.observe(gaps)
        return rows

    def _unwritable_row(self, owned: OwnedRequest, start: int, error: Exception) -> AppendRow:
        """The end of a request whose output raises when it is packed."""
        what = self._guard.isolated(owned.run, error)
        self._unwritable.append(owned.run)
        owned.next_index = start
        self._finish(owned, Finish(Reason.ENGINE_ERROR, f"its output cannot be written: {what}"))
        return _last_row(owned, start, 0, b"")

    def _special_row(
        self,
        owned: OwnedRequest,
        update: Update | None,
        now: float,
        gaps: list[tuple[float, int]],
    ) -> AppendRow:
        """The row of a request in the general case.

        Args:
            owned: the request.
            update: what is new; None: only whether it is still ours.
            now: monotonic seconds.
            gaps: gets the gap between tokens in seconds, and how often it came.
        """
        start = owned.next_index
        if owned.finish is not None:
            # Its log is broken: what the engine still produced is waste.
            self._metrics.orphan_tokens.inc(0 if update is None else len(update.token_ids))
            return _last_row(owned, start, 0, b"")
        if update is None:
            return (owned.id, owned.epoch, start, 0, b"")
        if update.prompt_tokens:  # else it never reached the engine
            owned.prompt_tokens, owned.cached_tokens = update.prompt_tokens, update.cached_tokens
        ids, chunk = update.token_ids, b""
        if ids:
            text = "" if update.parts else update.text
            whole = Chunk(
                start, ids, text, 0, update.logprobs,
                update.bytes_by_token if _is_cut_by_token(update) else (),
                update.parts, update.prompt_logprobs, update.deltas,
                b"" if update.finish is None else update.finish.result,
            )  # fmt: skip
            owned.digest = whole.digest_after(owned.digest)
            owned.next_index = start + len(ids)
            self._longest = max(self._longest, len(ids))
            reach = max(self._reach, len(ids))
            if owned.next_index + reach > owned.last_index >= 0:
                self._owned.close_sequences(owned)
            chunk = whole._replace(digest=owned.digest).pack(owned.answer)
            if start > owned.claim.n:  # not this worker's first
                gaps.append(((now - owned.last_token_at) / len(ids), len(ids)))
            elif owned.ttft_ms is None:
                waited = now - owned.accepted_at
                owned.ttft_ms = round(waited * 1000)
                self._metrics.ttft.labels(owned.lane).observe(waited)
            owned.last_token_at = now
            owned.in_stream = owned.answer is Answer.MSGPACK and not update.parts
        if update.finish is None:
            if (used := owned.used) == owned.told_used:
                return (owned.id, owned.epoch, start, len(ids), chunk)
            owned.told_used = used
            return Append(owned.id, owned.epoch, start, len(ids), chunk, used=used.pack())
        owned.discarded_tokens = update.finish.discarded_tokens
        owned.generated_none = update.finish.generated_none
        self._finish(owned, update.finish)
        return _last_row(owned, start, len(ids), chunk)

    def _finish(self, owned: OwnedRequest, finish: Finish) -> None:
        self._owned.close_sequences(owned)
        owned.finish, owned.in_stream = finish, False

    def take_answer(self, rows: Sequence[AppendRow], statuses: Sequence[int]) -> BatchOutcome:
        """Take Redis' answer to a batch: ``statuses`` as :meth:`Operations.append` gives them."""
        lost, self._unwritable = self._unwritable, []
        mismatched: list[str] = []
        if any(statuses):
            refused = [(row, code) for row, code in zip(rows, statuses, strict=True) if code]
            rows = [row for row, code in zip(rows, statuses, strict=True) if not code]
            for row, status in refused:
                self._refuse(row, status, lost, mismatched)
        owned = self._owned.by_id
        written = sum([row[3] for row in rows if row[0] in owned])
        for row in rows:
            if isinstance(row, Append) and row.reason:
                self._close(row)
        self._metrics.generation_tokens.inc(written)
        return BatchOutcome(tuple(lost), tuple(mismatched), AppendStatus.BROKEN in statuses)

    def _refuse(self, row: AppendRow, status: int, lost: list[str], mismatched: list[str]) -> None:
        """Redis did not take a row: note it and what follows for the request."""
        request_id, count = row[0], row[3]
        owned = self._owned.by_id.get(request_id)
        if owned is None:
            return
        lost.append(owned.run)
        self._metrics.append_refusals.labels(_REFUSALS[status]).inc()
        if status == AppendStatus.BROKEN and count > 0:
            # Its log is not a stream. A bare end puts a new log in its place.
            message = "its token log in Redis holds a value of another type"
            self._finish(owned, Finish(Reason.ENGINE_ERROR, message))
            owned.next_index = row[2]
            self._pending.setdefault(owned.run, None)
            return
        self._metrics.orphan_tokens.inc(count + self._drop(request_id))
        if status == AppendStatus.MISMATCH:
            mismatched.append(request_id)

    def _close(self, row: Append) -> None:
        """A request's end is written: count it, and own it no longer."""
        owned = self._owned.by_id.get(row.id)
        if owned is None:
            return
        self._drop(row.id)
        self._metrics.prompt_tokens.inc(owned.prompt_tokens)
        self._metrics.cached_prompt_tokens.inc(owned.cached_tokens)
        self._metrics.requests.labels(row.state, row.reason).inc()
        self._metrics.duration.labels(owned.lane).observe(self._clock() - owned.accepted_at)

    def forget(self, ids: Sequence[str]) -> None:
        """Stop owning requests without a word to Redis (after a release)."""
        for request_id in ids:
            self._drop(request_id)

    def _drop(self, request_id: str) -> int:
        """Own a request no longer; returns how many of its tokens were not taken."""
        owned = self._owned.drop(request_id)
        update = None if owned is None else self._pending.pop(owned.run, None)
        return 0 if update is None else len(update.token_ids)


def _is_cut_by_token(update: Update) -> bool:
    """Whether a reader that begins within the update's chunk needs its text lengths."""
    return bool(update.text_lengths) and len(update.parts or (0,)) < len(update.token_ids)


def _last_row(owned: OwnedRequest, start: int, count: int, chunk: bytes) -> Append:
    """What is written of a request that has ended."""
    assert owned.finish is not None
    n, reason = owned.next_index, owned.finish.reason
    end = End(n=n, reason=reason, message=owned.finish.message, usage=owned.usage())
    return Append(
        owned.id, owned.epoch, start, count, chunk, end.pack(owned.answer),
        reason.state.value, reason.value, owned.prompt_tokens + n + owned.discarded_tokens,
    )  # fmt: skip


_REFUSALS = {
    AppendStatus.FENCED: "fenced",
    AppendStatus.MISMATCH: "mismatch",
    AppendStatus.GONE: "gone",
    AppendStatus.BROKEN: "broken",
}
