"""Turns requests into what the engine takes, without holding the step loop.

Small thread pools tokenise prompts and compile constraints; the libraries release the interpreter
lock. A malformed request ends at once and harms no other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason

from ..engine.output.text_stream import AnswerParser
from ..engine.requests.engine_request import EngineRequest, Finish, Update
from ..engine.sequence import Constraint
from ..messages import Add, Prepared, bare_end

__all__ = ["InputProcessor"]

_log = logging.getLogger("penstock.engine")

_IDS_CHECKED_AT_ONCE = 2048
"""Token ids are only checked: for up to this many, that takes less time than to wake a thread."""

_THREADS = 2

_CHAT_THREADS = 4
"""They mostly wait for a chat template, which is rendered in another process."""


class InputProcessor:
    """Prepares requests, several at a time.

    All methods belong to one thread, the loop's. There :meth:`deliver` hands on what the pools have
    done, so reports about a run come in order.

    Args:
        encode: turns a request's prompt (text, ids or chat messages) into token ids; may raise
            :class:`InvalidRequest`. Runs in a pool, unless there is nearly nothing to do.
        compile: what is needed to follow the form of a request's output; may raise
            :class:`InvalidRequest`. Runs in a pool, and only for requests that ask for a form.
        parser: what is needed to parse a request's answer, given the prompt's ids; may raise
            :class:`InvalidRequest`. Runs in a pool, and only for requests that ask for it.
        add: gives a prepared request to the engine.
        report: takes the outcome of each.
        wake: called, from a pool's thread, when there is something to deliver.
        prepare_compiler: waits for what ``compile`` needs for any request, which counts for none.
            None: it needs nothing.
        constrain: given the prompt's ids, the options of a request whose tools ask for a form of
            the output, with that form as a constraint. May raise :class:`InvalidRequest`. None:
            there are no such requests.
        decode: the text of a prompt's tokens, for requests that ask for nothing else; None: there
            are no such requests.
        compile_timeout_s: how long a constraint may take a thread of its pool.
        timer: calls a function after so many seconds, in a thread of its own.
    """

    def __init__(
        self,
        encode: Callable[[Request], Sequence[int]],
        compile: Callable[[SamplingOptions], Callable[[], Constraint] | None],
        parser: Callable[[Request, Sequence[int]], Callable[[], AnswerParser]],
        add: Callable[[EngineRequest], None],
        report: Callable[[Prepared], None],
        wake: Callable[[], None],
        *,
        prepare_compiler: Callable[[], None] | None = None,
        constrain: Callable[[Request, Sequence[int]], SamplingOptions] | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        compile_timeout_s: float = 10.0,
        timer: Callable[[float, Callable[[Add], None], tuple[Add]], threading.Timer] = (
            threading.Timer
        ),
    ) -> None:
        self._encode = encode
        self._compile = compile
        self._parser = parser
        self._add = add
        self._report = report
        self._wake = wake
        self._prepare_compiler = prepare_compiler
        self._constrain = constrain
        self._decode = decode
        self._compile_timeout_s = compile_timeout_s
        self._timer = timer
        # Several pools: prompts are not held up by chat templates, nor both by constraints.
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="prepare")
        self._chats = ThreadPoolExecutor(_CHAT_THREADS, thread_name_prefix="chat")
        self._compilers = ThreadPoolExecutor(_THREADS, thread_name_prefix="compile")
        self._wanted: set[str] = set()  # runs in the pools that have not been cancelled
        self._done: deque[EngineRequest | Update] = deque()

    def begin(self, order: Add) -> None:
        """Prepare a request: now if that is nearly nothing, else in the pool."""
        request = order.request
        prompt = request.prompt
        are_few_ids = isinstance(prompt[0], int) and len(prompt) <= _IDS_CHECKED_AT_ONCE
        needs_pool = _constraint(request) or request.chat.parse_response or request.tokenize
        self._wanted.add(order.run)
        if are_few_ids and not needs_pool:
            self._done.append(self._attempt(order, lambda: self._read(order)))
        else:
            pool = self._chats if isinstance(prompt[0], Mapping) else self._pool
            pool.submit(self._work, order)

    def deliver(self) -> None:
        """Hand on what is prepared and still wanted."""
        while self._done:
            item = self._done.popleft()
            if not self.cancel(item.id):
                continue
            if isinstance(item, Update):
                self._report(Prepared(item.id, item))
            else:
                self._add(item)
                self._report(Prepared(item.id))

    def cancel(self, run: str) -> bool:
        """Give up a request; False if it is not being prepared (any more)."""
        if run not in self._wanted:
            return False
        self._wanted.remove(run)
        return True

    def close(self) -> None:
        """Give up all that is being prepared; does not wait."""
        self._wanted.clear()
        for pool in (self._pool, self._chats, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, order: Add) -> None:
        """In a thread of a pool for prompts."""
        if order.run not in self._wanted:
            self._wake()
            return
        item = self._attempt(order, lambda: self._read(order))
        if _constraint(order.request) is None or isinstance(item, Update):
            self._hand_on(item)
        else:
            self._compilers.submit(self._follow, order, item)

    def _follow(self, order: Add, request: EngineRequest) -> None:
        """In a thread of the pool for constraints."""
        if order.run not in self._wanted:
            self._wake()
            return
        item = self._attempt(
            order, lambda: replace(request, new_constraint=self._compiled(order, request.options))
        )
        self._hand_on(item)  # too late, if the timer was faster

    def _compiled(self, order: Add, options: SamplingOptions) -> Callable[[], Constraint] | None:
        """The constraint of a request; an error names the field that the request has."""
        if self._prepare_compiler is not None:
            self._prepare_compiler()
        timer = self._timer(self._compile_timeout_s, self._refuse_slow, (order,))
        timer.daemon = True
        timer.start()
        try:
            return self._compile(options)
        except InvalidRequest as error:
            if (field := order.request.chat.constraint) is None:
                raise
            raise InvalidRequest(field, order.request.chat.tools, error.allowed) from error
        finally:
            timer.cancel()

    def _refuse_slow(self, order: Add) -> None:
        request = order.request
        field = _constraint(request)
        assert field is not None
        allowed = f"what can be compiled within {self._compile_timeout_s:g} s"
        value = getattr(request.options, field, request.chat.tools)
        self._hand_on(_refusal(order, InvalidRequest(field, value, allowed)))

    def _hand_on(self, item: EngineRequest | Update) -> None:
        self._done.append(item)
        self._wake()

    def _attempt(
        self, order: Add, work: Callable[[], EngineRequest | Update]
    ) -> EngineRequest | Update:
        """The request, or its end."""
        try:
            return work()
        except InvalidRequest as error:
            return _refusal(order, error)
        except BaseException as error:
            # A tokenizer's own failure concerns this request alone. Panics of libraries written in
            # Rust are no `Exception`.
            _log.exception("preparation failed", extra={"request": order.run})
            return bare_end(order.run, Reason.ENGINE_ERROR, f"preparation failed: {error}")

    def _read(self, order: Add) -> EngineRequest | Update:
        """The request without its constraint; or its end, if only its tokens are wanted."""
        request = order.request
        prompt_ids = tuple(self._encode(request))
        if request.tokenize and self._decode is not None:
            text = self._decode(prompt_ids)
            finish = Finish(Reason.STOP, generated_none=True)
            return Update(order.run, 0, prompt_ids, text, finish, 0, 0)
        options, parsed = request.options, request.chat.parse_response
        if request.chat.constraint is not None and self._constrain is not None:
            options = self._constrain(request, prompt_ids)
        return EngineRequest(
            id=order.run,
            lane=request.lane,
            tenant=request.tenant,
            prompt_ids=prompt_ids,
            output_ids=order.output_ids,
            choice_ids=order.choice_ids,
            options=options,
            seed=request.seed,
            arrival=order.arrival,
            deadline=order.deadline,
            new_parser=self._parser(request, prompt_ids) if parsed else None,
        )


def _constraint(request: Request) -> str | None:
    """The field that asks for a form of the output."""
    return request.options.constraint or request.chat.constraint


def _refusal(order: Add, error: InvalidRequest) -> Update:
    _log.info("refused: %s", error, extra={"request": order.run})
    return bare_end(order.run, Reason.INVALID, str(error))
