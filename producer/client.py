"""The client: submits requests, streams their tokens, fetches results and cancels."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Self

from redis.asyncio import Redis

from penstock.shared.errors import UnknownRequest
from penstock.shared.keys import Keys
from penstock.shared.protocol.fields.field_types import Integer, Number
from penstock.shared.protocol.request import Request, check_id
from penstock.shared.protocol.states import Lane, Reason
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.operations import Bounds, CancelReply, Operations

from .administration.dead_letters import DeadLetters
from .administration.queue_view import QueueView
from .encoder_client import EncoderClient
from .reading.feeds import Feeds
from .reading.log_reader import LogReader
from .reading.reader_heartbeat import ReaderHeartbeat
from .reading.subscriber import Subscriber
from .results import Result, Submitted
from .stream import TokenStream

if TYPE_CHECKING:
    from penstock.shared.settings import Settings

__all__ = ["Producer"]

_MAX_INDEX = 2**31 - 1
_MAX_DIGEST = 2**32 - 1
_MAX_TIMEOUT_S = 1e9


class Producer(EncoderClient, QueueView):
    """The client of an application. One per process and event loop is enough.

    ::

        async with Producer("redis://localhost:6379") as producer:
            stream = await producer.generate("The list type", max_tokens=64)
            async for chunk in stream:
                print(chunk.text, end="", flush=True)

    Any number of streams share one pub/sub connection, and commands share up to eight more. While
    the server is unreachable, the client retries each call for ``outage_s`` seconds; no call does
    harm when it arrives twice.

    Args:
        redis: URL of the server, or your own ``redis.asyncio.Redis`` without ``decode_responses``,
            which you close; None takes the URL from the settings.
        model: name under which the model is served; None takes it from the settings.
        shard: shard number; None takes it from the settings.
        settings: None reads ``REDIS_URL``, ``PENSTOCK_*`` and the settings file. The client uses
            the sections ``redis`` and ``queue``.
        inbox: publish the output of all requests submitted here in one channel of this client.
            This is for gateways: a worker's step is then one message for all of them. Readers
            of one such request elsewhere receive the messages of all and drop the others.
        outage_s: seconds without a server before calls and streams raise :class:`RedisUnavailable`.

    Attributes:
        feeds: of a client with an inbox, streams that call back instead of being awaited.

    Raises:
        ConfigurationError: a setting or the address is wrong, or the client decodes responses.
        InvalidRequest: the model name or the shard is invalid.
        RedisUnavailable: neither argument nor settings name a server.
    """

    def __init__(
        self,
        redis: Redis | str | None = None,
        *,
        model: str | None = None,
        shard: int | None = None,
        settings: Settings | None = None,
        inbox: bool = False,
        outage_s: float = 10.0,
    ) -> None:
        # Imported late: the settings take longer to load than the rest of the client.
        from penstock.shared.local.embedded import require_url
        from penstock.shared.settings import load_settings

        settings = load_settings() if settings is None else settings
        queue = settings.queue
        self._keys = Keys(
            queue.model if model is None else model, queue.shard if shard is None else shard
        )
        self._client = RetryingClient(
            require_url(settings.redis) if redis is None else redis,
            socket_timeout_s=settings.redis.socket_timeout_s,
            outage_s=outage_s,
        )
        self._operations = Operations(
            self._client.shared, self._keys, retention_ms=queue.retention_ms
        )
        self._bounds = Bounds.of(queue)
        self._inbox = uuid.uuid4().hex if inbox else ""
        self._grace_ms = queue.reader_grace_ms
        self._default_deadline_ms = queue.default_deadline_ms
        self._log = LogReader(self._client, self._operations, self._keys)
        self._subscriber = Subscriber(self._client.redis)
        self._heartbeat = ReaderHeartbeat(
            self._client, self._operations, grace_ms=self._grace_ms, inbox=self._inbox
        )
        self.feeds = Feeds(self._inbox, self._keys, self._log, self._subscriber, self._heartbeat)

    @property
    def keys(self) -> Keys:
        """Names of everything this client reads and writes in Redis."""
        return self._keys

    @property
    def dead_letters(self) -> DeadLetters:
        """Requests that were given up, to inspect and to run again."""
        return DeadLetters(self._client, self._operations)

    async def connect(self) -> Self:
        """Reach the server and check its version; ``async with`` does this, too.

        Raises:
            RedisUnavailable: not reachable, access refused, or older than 6.2.
        """
        try:
            await self._client.connect(self._keys.counters)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Close all connections. Requests run on; readers of open streams get a RuntimeError.

        Raises:
            RuntimeError: the connections belong to another event loop.
        """
        self._client.check_loop()
        await self.feeds.aclose()
        await self._heartbeat.aclose()
        await self._subscriber.aclose()
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def submit(
        self,
        prompt: object = None,
        *,
        payload: object = None,
        id: str | None = None,
        lane: Lane | str = Lane.NORMAL,
        tenant: str = "default",
        note: bytes = b"",
        attend: bool = False,
        **options: Any,
    ) -> Submitted:
        """Submit a request. Once this returns, the request will reach exactly one terminal state.

        Args:
            prompt: text, token ids, or chat messages (maps with ``role`` and ``content``).
            payload: in place of a prompt, what a model that answers at once maps to one result:
                bytes or any msgpack value. See :meth:`infer`.
            id: a name of your own, which makes the call repeatable: the same id with the same
                payload runs once. None generates one.
            lane: urgency: ``critical``, ``normal`` or ``batch``.
            tenant: the tenant that the request is charged to.
            note: what :attr:`Status.note` gives its readers, in any process, until the retention
                is over. It counts as a part of the payload.
            attend: count this client as a reader at once, for one grace, for ``on_disconnect``
                ``cancel``.
            **options: further fields of :class:`~penstock.shared.protocol.Request` and
                :class:`~penstock.shared.protocol.SamplingOptions`, such as ``max_tokens``.

        Raises:
            InvalidRequest: a field is unknown, of the wrong type or out of range.
            QueueFull: a bound of the queue is reached; nothing was stored.
            IdConflict: the id was used with another payload; nothing was stored.
            RedisUnavailable: see the class.
        """
        request = Request.build(
            id=uuid.uuid4().hex if id is None else id,
            prompt=prompt,
            payload=payload,
            lane=lane,
            tenant=tenant,
            **options,
        )
        submitted = await self.send(request, note=note, attend=attend)
        # A generated id can only be a duplicate of this call's own lost first attempt.
        return submitted if id is not None else replace(submitted, duplicate=False)

    async def send(self, request: Request, *, note: bytes = b"", attend: bool = False) -> Submitted:
        """Submit a request that is built already; see :meth:`submit`."""
        reply = await self._client.call(
            lambda: self._operations.submit(
                request,
                bounds=self._bounds,
                default_deadline_ms=self._default_deadline_ms,
                inbox=self._inbox,
                note=note,
                reader_grace_ms=self._grace_ms if attend else 0,
            )
        )
        return Submitted(id=request.id, **asdict(reply))

    def time_left_ms(self, request: Request) -> int:
        """How long a request that is accepted now may wait for a worker."""
        deadline_ms = request.deadline_ms or self._default_deadline_ms
        return min(deadline_ms, request.max_queue_ms or deadline_ms)

    def stream(
        self,
        id: str,
        *,
        from_index: int = 0,
        from_digest: int | None = None,
        timeout: float | None = None,
    ) -> TokenStream:
        """The output of a request as an asynchronous iterator; any client may read it.

        Nothing is sent before the first chunk is requested, so errors come then, too.

        Args:
            id: which request.
            from_index: the first token wanted; see :class:`TokenStream` about the choice.
            from_digest: :attr:`TokenStream.digest` of what was read before, if known.
            timeout: longest wait for the next chunk in seconds; None waits without limit.

        Raises:
            InvalidRequest: an argument has the wrong type or is out of range.
        """
        check_id(id)
        Integer(0, _MAX_INDEX).check("from_index", from_index)
        if from_digest is not None:
            Integer(0, _MAX_DIGEST).check("from_digest", from_digest)
        _check_timeout(timeout)
        return TokenStream(
            id,
            log=self._log,
            subscriber=self._subscriber,
            heartbeat=self._heartbeat,
            keys=self._keys,
            from_index=from_index,
            from_digest=from_digest,
            timeout=timeout,
        )

    async def generate(
        self, prompt: object, *, timeout: float | None = None, **fields: Any
    ) -> TokenStream:
        """Submit, and return the stream; :attr:`TokenStream.id` names the request.

        Args:
            prompt: see :meth:`submit`.
            timeout: see :meth:`stream`.
            **fields: see :meth:`submit`.
        """
        submitted = await self.submit(prompt, **fields)
        return self.stream(submitted.id, timeout=timeout)

    async def result(self, id: str, *, timeout: float | None = None, check: bool = True) -> Result:
        """Wait for the end of a request and return all of its output.

        Args:
            id: which request.
            timeout: longest wait for the end in seconds; None waits without limit.
            check: raise unless the request was completed; False also returns a partial output.

        Raises:
            RequestFailed: it ended in another state than ``completed``.
            UnknownRequest: no such request.
            TimeoutError: it did not end within ``timeout``; it runs on.
            StreamError, RedisUnavailable: see :class:`TokenStream`.
            InvalidRequest: the id or the timeout is invalid.
        """
        _check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout), self.stream(id) as stream:
                result = await stream.collect()
        except TimeoutError:
            raise TimeoutError(f"request {id!r} did not end within {timeout:g} s") from None
        return result.check() if check else result

    async def infer(self, payload: object, *, timeout: float | None = None, **fields: Any) -> Any:
        """The answer of a model that answers at once: a batcher, an embedder, a classifier.

        Args:
            payload: bytes, or any msgpack value.
            timeout: longest wait for the answer in seconds; the request runs on after it.
            **fields: see :meth:`submit`.

        Returns:
            A msgpack value: lists and maps for tuples and dicts.

        Raises:
            RequestFailed: it ended in another state than ``completed``.
            TimeoutError: it did not end within ``timeout``.
            Exception: as :meth:`submit` and :meth:`result`.
        """
        submitted = await self.submit(payload=payload, **fields)
        return (await self.result(submitted.id, timeout=timeout)).value

    async def tokenize(self, prompt: object, **fields: Any) -> Result:
        """A prompt's tokens and their text as a worker tells them; nothing is computed."""
        return await self.result((await self.submit(prompt, tokenize=True, **fields)).id)

    async def cancel(self, id: str, *, reason: Reason = Reason.CLIENT) -> CancelReply:
        """End a queued or running request at once; an ended one stays as it is.

        Args:
            id: which request.
            reason: ``client``; with ``disconnected`` it goes on until its last reader leaves.

        Raises:
            UnknownRequest: no such request.
            InvalidRequest: the id is invalid.
            RedisUnavailable: see the class.
        """
        check_id(id)
        reply = await self._client.call(lambda: self._operations.cancel(id, reason))
        if reply.state is None:
            raise UnknownRequest(id)
        return reply

    async def delete(self, id: str) -> None:
        """Forget a request and its output; one that has not ended is cancelled first.

        Raises:
            UnknownRequest: no such request.
            InvalidRequest: the id is invalid.
            RedisUnavailable: see the class.
        """
        await self.cancel(id)
        keys = (self._keys.request(id), self._keys.log(id))
        await self._client.call(lambda: self._client.redis.delete(*keys))


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None:
        Number(0, _MAX_TIMEOUT_S).check("timeout", timeout_s)
