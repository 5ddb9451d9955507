"""Claims in: from packed requests to what the engine takes, without holding the step loop.

Payloads are parsed; prompts are tokenised and grammars compiled in a small thread pool (the
libraries release the interpreter lock). What turns out malformed ends `failed` at once; nothing
else is harmed by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from penstock.shared.errors import InvalidRequest
from penstock.shared.operations import Claim
from penstock.shared.protocol import Chunk, Reason, Request, SamplingOptions

from .engine.requests import EngineRequest
from .ledger import run_name
from .metrics import WorkerMetrics
from .outbox import Outbox

__all__ = ["Intake"]

_log = logging.getLogger("penstock.intake")

_IDS_CHECKED_AT_ONCE = 2048
"""Token ids only have to be looked at: of so many, that is done before a thread has woken up."""


class Intake:
    """Prepares claimed requests.

    Args:
        encode: turns a prompt (text, ids or chat messages) into token ids; may raise
            :class:`InvalidRequest`. Runs in ``pool``, unless there is nearly nothing to do.
        compile: what is needed to follow the form of a request's output; may raise
            :class:`InvalidRequest`. Runs in ``pool``, unless there is nearly nothing to do.
        compile_timeout_s: how long that may take.
        add: gives a prepared request to the engine's thread.
        outbox: opens a ledger per claim, and takes the end of what cannot be prepared.
        metrics: counts claims.
        pool: where prompts are tokenised.
    """

    def __init__(
        self,
        encode: Callable[[object], Sequence[int]],
        compile: Callable[[SamplingOptions], Callable[[], object] | None],
        add: Callable[[EngineRequest], None],
        outbox: Outbox,
        metrics: WorkerMetrics,
        pool: Executor,
        *,
        compile_timeout_s: float = 10.0,
    ) -> None:
        self._encode = encode
        self._compile = compile
        self._compile_timeout_s = compile_timeout_s
        self._add = add
        self._outbox = outbox
        self._metrics = metrics
        self._pool = pool
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def preparing(self) -> int:
        """Claims that have not reached the engine yet."""
        return len(self._tasks)

    def accept(self, claims: Sequence[Claim]) -> None:
        """Take over claims. Returns at once; the engine gets them when they are tokenised."""
        for claim in claims:
            self._metrics.claims.inc()
            if claim.attempts > 1:
                self._metrics.redeliveries.inc()
            try:
                request = Request.unpack(claim.payload)
            except InvalidRequest as error:
                self._outbox.open(claim, "unknown")
                self._refuse(claim, error)
                continue
            sequences = request.options.num_sequences
            self._outbox.open(claim, request.lane.value, request.answer, sequences)
            if claim.attempts == 1:
                self._metrics.queue_time.labels(request.lane.value).observe(claim.queue_ms / 1000)
            if not claim.intact:
                message = f"its token log in Redis does not hold all of its {claim.n} tokens"
                self._outbox.end(claim, Reason.ENGINE_ERROR, message)
                continue
            task = asyncio.get_running_loop().create_task(self._prepare(claim, request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _prepare(self, claim: Claim, request: Request) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        try:
            prompt_ids: Sequence[int]
            if isinstance(request.prompt[0], int) and len(request.prompt) <= _IDS_CHECKED_AT_ONCE:
                prompt_ids = self._encode(request.prompt)
            else:
                prompt_ids = await loop.run_in_executor(self._pool, self._encode, request.prompt)
            grammar = await self._compiled(request.options)
        except InvalidRequest as error:
            self._refuse(claim, error)
            return
        except Exception as error:  # a tokenizer's own failure is this request's, not ours
            _log.exception("preparation failed", extra={"request": claim.id})
            self._outbox.end(claim, Reason.ENGINE_ERROR, f"preparation failed: {error}")
            return
        if not self._outbox.owns(claim):
            return  # lost meanwhile; its abort has gone ahead of it
        several = request.options.n > 1
        self._add(
            EngineRequest(
                id=run_name(claim.id, claim.epoch),
                lane=request.lane,
                tenant=request.tenant,
                prompt_ids=tuple(prompt_ids),
                output_ids=() if several else tuple(i for c in claim.chunks for i in c.token_ids),
                choice_ids=_choice_ids(claim.chunks, request.options.n) if several else (),
                options=request.options,
                seed=request.seed,
                arrival=now - claim.age_ms / 1000,
                deadline=now + claim.deadline_in_ms / 1000,
                grammar=grammar,
            )
        )

    async def _compiled(self, options: SamplingOptions) -> Callable[[], object] | None:
        field = options.constraint
        if field is None:
            return None
        loop, seconds = asyncio.get_running_loop(), self._compile_timeout_s
        compiled = loop.run_in_executor(self._pool, self._compile, options)
        try:
            return await asyncio.wait_for(compiled, seconds)
        except TimeoutError:
            allowed = f"what can be compiled within {seconds:g} s"
            raise InvalidRequest(field, getattr(options, field), allowed) from None

    def _refuse(self, claim: Claim, error: InvalidRequest) -> None:
        _log.info("refused: %s", error, extra={"request": claim.id})
        self._outbox.end(claim, Reason.INVALID, str(error))

    async def close(self) -> None:
        """Give up preparing; who owned the claims must release them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _choice_ids(chunks: Sequence[Chunk], num_choices: int) -> tuple[tuple[int, ...], ...]:
    """The published tokens of each choice."""
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    for chunk in chunks:
        for run in chunk.runs():
            ids[run.choice] += run.token_ids
    return tuple(map(tuple, ids))
