"""The client for code without an event loop: the same calls, blocking.

A private thread runs the event loop with an ordinary :class:`Producer` in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

from penstock.shared.local.tasks import end_tasks
from penstock.shared.protocol.events import Chunk, End
from penstock.shared.protocol.states import Lane
from penstock.shared.scripts.operations import CancelReply

from .client import Producer
from .encoder_answers import Classes, Embeddings, Ranking
from .results import Result, Status, Submitted
from .stream import TokenStream

if TYPE_CHECKING:
    from penstock.shared.settings import Settings

__all__ = ["BlockingProducer", "BlockingStream"]

_T = TypeVar("_T")

_CLOSED = "this producer is closed"


class _Ended(RuntimeError):
    """The thread was stopped, or belongs to the parent process."""


class _LoopThread:
    """An event loop in a daemon thread, stopped by :meth:`stop`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._last: Coroutine[Any, Any, None] | None = None
        self._pid = os.getpid()
        self._stopping = False
        # The loop takes nothing once it is stopping. Reentrant, because a signal handler may close
        # the producer in the thread that holds the lock.
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._work, name="penstock-producer", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine in the loop and wait for it; an interrupt cancels it.

        Raises:
            RuntimeError: the thread was stopped, before or meanwhile; or this is another process.
        """
        future = self._start(work)
        try:
            return future.result()
        except CancelledError:
            if self._stopping:
                raise _Ended(_CLOSED) from None
            raise
        except BaseException:
            future.cancel()
            raise

    def _start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if self._is_foreign:  # checked first: fork may have copied the lock in its locked state
            work.close()
            raise _Ended(
                "this producer was created before fork(), which leaves its thread and connections "
                "to the parent process; create one in each process"
            )
        with self._lock:
            if not self._stopping and self._thread.is_alive():
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise _Ended(_CLOSED)

    @property
    def _is_foreign(self) -> bool:
        return os.getpid() != self._pid

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel everything, run ``last``, end the thread; returns when it has ended.

        In a forked process it does nothing, since thread and connections are the parent's.
        """
        if self._is_foreign:
            last.close()
            return
        self._last = last
        with self._lock:
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        # Garbage collection may run in the very thread that is to end.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
        if self._last is not None:
            await self._last


class BlockingStream(Iterator[Chunk]):
    """A :class:`TokenStream` as a plain iterator. Made by :meth:`BlockingProducer.stream`."""

    def __init__(self, owner: BlockingProducer, thread: _LoopThread, stream: TokenStream) -> None:
        self._owner = owner  # kept alive: it closes its connections when it is collected
        self._thread = thread
        self._stream = stream

    @property
    def id(self) -> str:
        """The request's id."""
        return self._stream.id

    @property
    def index(self) -> int:
        """One past the last token yielded: where to resume."""
        return self._stream.index

    @property
    def digest(self) -> int | None:
        """Rolling digest of all tokens before :attr:`index`; None while it is not known."""
        return self._stream.digest

    @property
    def end(self) -> End | None:
        """The terminal event; None until the iteration has ended by itself."""
        return self._stream.end

    def __next__(self) -> Chunk:
        chunk = self._thread.run(_next(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    def collect(self) -> Result:
        """Read to the end and return everything from ``from_index`` on, whatever the state."""
        return self._thread.run(self._stream.collect())

    def close(self) -> None:
        """Leave the stream; the request runs on.

        It is harmless to repeat, after the producer was closed, and in a forked process.
        """
        with contextlib.suppress(_Ended):
            self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _next(stream: TokenStream) -> Chunk | None:
    return await anext(stream, None)


class BlockingProducer:
    """:class:`Producer` for code without an event loop; threads may share it.

    ::

        with BlockingProducer("redis://localhost:6379") as producer:
            for chunk in producer.generate("The list type", max_tokens=64):
                print(chunk.text, end="", flush=True)

    It connects at once and works only in the process that created it: after ``fork()`` (gunicorn
    with ``preload_app``, ``multiprocessing``) create one in each child. Leaving the ``with`` block
    or calling :meth:`close` ends its thread, as do garbage collection and interpreter exit.

    Args:
        redis: URL of the server; None takes it from the settings.
        model: see :class:`Producer`, like the rest.
        shard: see ``model``.
        settings: see ``model``.
        outage_s: see ``model``.

    Raises:
        RedisUnavailable: not reachable, access refused, or older than 6.2.
        ConfigurationError, InvalidRequest: see :class:`Producer`.
    """

    def __init__(
        self,
        redis: str | None = None,
        *,
        model: str | None = None,
        shard: int | None = None,
        settings: Settings | None = None,
        outage_s: float = 10.0,
    ) -> None:
        self._producer = Producer(
            redis, model=model, shard=shard, settings=settings, outage_s=outage_s
        )
        self._thread = _LoopThread()
        self._finish = weakref.finalize(self, _finish, self._thread, self._producer)
        try:
            self._thread.run(self._producer.connect())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections and end the thread. Repeating it is harmless."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(
        self,
        prompt: object = None,
        *,
        payload: object = None,
        id: str | None = None,
        lane: Lane | str = Lane.NORMAL,
        tenant: str = "default",
        **options: Any,
    ) -> Submitted:
        """See :meth:`Producer.submit`."""
        return self._thread.run(
            self._producer.submit(
                prompt, payload=payload, id=id, lane=lane, tenant=tenant, **options
            )
        )

    def stream(
        self,
        id: str,
        *,
        from_index: int = 0,
        from_digest: int | None = None,
        timeout: float | None = None,
    ) -> BlockingStream:
        """See :meth:`Producer.stream`."""
        stream = self._producer.stream(
            id, from_index=from_index, from_digest=from_digest, timeout=timeout
        )
        return BlockingStream(self, self._thread, stream)

    def generate(
        self, prompt: object, *, timeout: float | None = None, **fields: Any
    ) -> BlockingStream:
        """See :meth:`Producer.generate`."""
        submitted = self.submit(prompt, **fields)
        return self.stream(submitted.id, timeout=timeout)

    def result(self, id: str, *, timeout: float | None = None, check: bool = True) -> Result:
        """See :meth:`Producer.result`."""
        return self._thread.run(self._producer.result(id, timeout=timeout, check=check))

    def infer(self, payload: object, *, timeout: float | None = None, **fields: Any) -> Any:
        """See :meth:`Producer.infer`."""
        return self._thread.run(self._producer.infer(payload, timeout=timeout, **fields))

    def embed(self, texts: Any, **options: Any) -> Embeddings:
        """See :meth:`Producer.embed`."""
        return self._thread.run(self._producer.embed(texts, **options))

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> Ranking:
        """See :meth:`Producer.rerank`."""
        return self._thread.run(self._producer.rerank(query, documents, **options))

    def classify(self, texts: Any, **options: Any) -> Classes:
        """See :meth:`Producer.classify`."""
        return self._thread.run(self._producer.classify(texts, **options))

    def cancel(self, id: str) -> CancelReply:
        """See :meth:`Producer.cancel`."""
        return self._thread.run(self._producer.cancel(id))

    def status(self, id: str) -> Status:
        """See :meth:`Producer.status`."""
        return self._thread.run(self._producer.status(id))


def _finish(thread: _LoopThread, producer: Producer) -> None:
    thread.stop(producer.aclose())
