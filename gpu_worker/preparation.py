"""From requests to what the engine takes, without holding the step loop.

Prompts are tokenised and grammars compiled in small thread pools (the libraries release the
interpreter lock). What turns out malformed ends at once; nothing else is harmed by it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol import Reason, SamplingOptions

from .engine.form import Form
from .engine.requests import EngineRequest, Update
from .messages import Add, Prepared, Taken, bare_end

__all__ = ["Preparation"]

_log = logging.getLogger("penstock.engine")

_IDS_CHECKED_AT_ONCE = 2048
"""Token ids only have to be looked at: of so many, that is done before a thread has woken up."""

_THREADS = 2


class Preparation:
    """Prepares requests, several at a time.

    All methods belong to one thread, the loop's: what the pool has done is handed on by
    :meth:`deliver`, so that whatever is said of a run is said in the order in which it happened.

    Args:
        encode: turns a prompt (text, ids or chat messages) into token ids; may raise
            :class:`InvalidRequest`. Runs in a pool, unless there is nearly nothing to do.
        compile: what is needed to follow the form of a request's output; may raise
            :class:`InvalidRequest`. Runs in a pool, unless there is nothing to do.
        add: gives a prepared request to the engine.
        tell: says what became of each.
        wake: called, from a pool's thread, when there is something to deliver.
        compile_timeout_s: how long a grammar may take.
    """

    def __init__(
        self,
        encode: Callable[[object], Sequence[int]],
        compile: Callable[[SamplingOptions], Callable[[], Form] | None],
        add: Callable[[EngineRequest], None],
        tell: Callable[[Taken | Prepared], None],
        wake: Callable[[], None],
        *,
        compile_timeout_s: float = 10.0,
    ) -> None:
        self._encode = encode
        self._compile = compile
        self._add = add
        self._tell = tell
        self._wake = wake
        self._compile_timeout_s = compile_timeout_s
        # Two pools: who prepares waits for who compiles.
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._compilers = ThreadPoolExecutor(_THREADS, thread_name_prefix="compile")
        self._wanted: set[str] = set()  # runs in the pool that nobody has given up
        self._done: deque[EngineRequest | Update] = deque()

    def begin(self, order: Add) -> None:
        """Prepare a request: now if that is nearly nothing, else in the pool."""
        prompt, options = order.request.prompt, order.request.options
        are_few_ids = isinstance(prompt[0], int) and len(prompt) <= _IDS_CHECKED_AT_ONCE
        self._wanted.add(order.run)
        if are_few_ids and options.constraint is None:
            self._done.append(self._prepare(order))
        else:
            self._tell(Taken(order.run))
            self._pool.submit(self._work, order)

    def deliver(self) -> None:
        """Hand on what is prepared and still wanted."""
        while self._done:
            item = self._done.popleft()
            if not self.cancel(item.id):
                continue
            if isinstance(item, Update):
                self._tell(Prepared(item.id, item))
            else:
                self._add(item)
                self._tell(Prepared(item.id))

    def cancel(self, run: str) -> bool:
        """Give up a request; False if it is not being prepared (any more)."""
        if run not in self._wanted:
            return False
        self._wanted.remove(run)
        return True

    def close(self) -> None:
        """Give up all that is being prepared; does not wait."""
        self._wanted.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def _work(self, order: Add) -> None:
        self._done.append(self._prepare(order))
        self._wake()

    def _prepare(self, order: Add) -> EngineRequest | Update:
        """The request, or its end."""
        try:
            return self._prepared(order)
        except InvalidRequest as error:
            _log.info("refused: %s", error, extra={"request": order.run})
            return bare_end(order.run, Reason.INVALID, str(error))
        except BaseException as error:
            # A tokenizer's own failure is this request's, not ours; panics of libraries written
            # in Rust are no `Exception`.
            _log.exception("preparation failed", extra={"request": order.run})
            return bare_end(order.run, Reason.ENGINE_ERROR, f"preparation failed: {error}")

    def _prepared(self, order: Add) -> EngineRequest:
        request = order.request
        return EngineRequest(
            id=order.run,
            lane=request.lane,
            tenant=request.tenant,
            prompt_ids=tuple(self._encode(request.prompt)),
            output_ids=order.output_ids,
            choice_ids=order.choice_ids,
            options=request.options,
            seed=request.seed,
            arrival=order.arrival,
            deadline=order.deadline,
            grammar=self._compiled(request.options),
        )

    def _compiled(self, options: SamplingOptions) -> Callable[[], Form] | None:
        field = options.constraint
        if field is None:
            return None
        seconds = self._compile_timeout_s
        try:
            return self._compilers.submit(self._compile, options).result(seconds)
        except TimeoutError:
            allowed = f"what can be compiled within {seconds:g} s"
            raise InvalidRequest(field, getattr(options, field), allowed) from None
