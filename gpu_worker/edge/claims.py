"""Claims in: from packed requests to orders for the engine.

A payload that is malformed ends its request ``failed`` at once and harms no other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.events import Chunk
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.states import ModelKind, Reason
from penstock.shared.scripts.operations import Claim

from ..messages import Add
from ..monitoring.metrics import WorkerMetrics
from .guarded_task import Guard
from .outbox import Outbox
from .owned_requests import OwnedRequests, run_name

__all__ = ["ClaimReceiver"]

_log = logging.getLogger("penstock.claims")


class ClaimReceiver:
    """Takes over claimed requests.

    Args:
        order: tells the engine process of a request.
        abort: tells it to stop a run.
        owned: the table of owned requests.
        outbox: begins to own each claim, and takes the end of what cannot be served.
        metrics: counts claims.
        kind: what the engine does with a request.
    """

    def __init__(
        self,
        order: Callable[[Add], None],
        abort: Callable[[str], None],
        owned: OwnedRequests,
        outbox: Outbox,
        metrics: WorkerMetrics,
        kind: ModelKind = ModelKind.GENERATE,
    ) -> None:
        self._order = order
        self._abort = abort
        self._owned = owned
        self._outbox = outbox
        self._metrics = metrics
        self._kind = kind
        self._guard = Guard("claims", metrics)

    def accept(self, claims: Sequence[Claim]) -> bool:
        """Take over claims and order the engine to serve them.

        Returns whether an audit is due, which gives back those that were not taken over.
        """
        all_taken = True
        for claim in claims:
            self._metrics.claims.inc()
            if claim.attempts > 1:
                self._metrics.redeliveries.inc()
            if self._ends_earlier_run(claim):
                self._accept(claim)
            else:
                all_taken = False
        return not all_taken

    def _ends_earlier_run(self, claim: Claim) -> bool:
        """Stop the earlier run of a request that this worker lost unnoticed and was given again.

        Returns whether the claim can be taken over. If a failover lost the earlier claim, both
        claims have the same epoch and the same run. A report of the engine could then mean either.
        """
        earlier = self._owned.by_id.get(claim.id)
        if earlier is None:
            return True
        self._abort(earlier.run)
        self._outbox.forget([claim.id])
        return earlier.run != run_name(claim.id, claim.epoch)

    def _accept(self, claim: Claim) -> None:
        try:
            self._open(claim, Request.unpack(claim.payload))
        except InvalidRequest as error:
            _log.info("refused: %s", error, extra={"request": claim.id})
            self._refuse(claim, Reason.INVALID, str(error))
        except Exception as error:
            what = self._guard.isolated(claim.id, error)
            self._refuse(claim, Reason.ENGINE_ERROR, f"the request cannot be read: {what}")

    def _refuse(self, claim: Claim, reason: Reason, message: str) -> None:
        self._outbox.open(claim, "unknown")
        self._outbox.end(claim, reason, message)

    def _open(self, claim: Claim, request: Request) -> None:
        options = request.options
        max_tokens = options.max_tokens if request.payload is None else None
        self._outbox.open(
            claim, request.lane.value, request.answer, options.num_sequences, max_tokens
        )
        if claim.attempts == 1:
            self._metrics.queue_time.labels(request.lane.value).observe(claim.queue_ms / 1000)
        if not claim.intact:
            message = f"its token log in Redis does not hold all of its {claim.n} tokens"
            self._outbox.end(claim, Reason.ENGINE_ERROR, message)
            return
        if (error := _wrong_kind(request, self._kind)) is not None:
            self._outbox.end(claim, Reason.INVALID, str(error))
            return
        if request.payload is not None and claim.n:
            # Its worker died between the two writes of one append: all but the end is there.
            self._outbox.end(claim, Reason.STOP, "")
            return
        now, several = time.monotonic(), options.n > 1
        self._order(
            Add(
                run=run_name(claim.id, claim.epoch),
                request=request,
                output_ids=() if several else tuple(i for c in claim.chunks for i in c.token_ids),
                choice_ids=_choice_ids(claim.chunks, options.n) if several else (),
                arrival=now - claim.age_ms / 1000,
                deadline=now + claim.deadline_in_ms / 1000,
                suspect=claim.suspect,
            )
        )


def _wrong_kind(request: Request, kind: ModelKind) -> InvalidRequest | None:
    """Why this model cannot serve a request, if it asks for the other kind of work."""
    if (request.payload is None) is (kind is ModelKind.GENERATE):
        return None
    if request.payload is None:
        allowed = f"a payload: this model answers at once (kind {kind.value}) and takes no prompt"
        return InvalidRequest("prompt", request.prompt, allowed)
    return InvalidRequest("payload", request.payload, "a prompt: this model generates text")


def _choice_ids(chunks: Sequence[Chunk], num_choices: int) -> tuple[tuple[int, ...], ...]:
    """The published tokens of each choice."""
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    for chunk in chunks:
        for run in chunk.runs():
            ids[run.choice] += run.token_ids
    return tuple(map(tuple, ids))
