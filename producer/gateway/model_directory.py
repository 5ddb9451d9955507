"""Which models are served, and a client of the queue for each."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import hashlib
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from penstock.shared.errors import InvalidRequest, ProtocolError, UnknownRequest
from penstock.shared.keys import Keys
from penstock.shared.local.embedded import require_url
from penstock.shared.protocol.states import ModelKind
from penstock.shared.redis.retrying_client import RetryingClient
from penstock.shared.scripts.usage_ledger import UsageRow
from penstock.shared.settings import Settings

from ..administration.served_models import ModelCard
from ..administration.shards_found import find_known_shards
from ..administration.usage import read_days
from ..client import Producer
from ..results import Status
from .api_errors import ApiError

__all__ = ["ModelDirectory", "Shard", "check_kind", "check_model"]

_FRESH_S = 2.0
"""How long a look at the workers counts."""

_CARD_FRESH_S = 60.0
"""The same for what they publish of their model."""

_SEARCH_S_PER_PAGE = 0.1
_SEARCH_MOST_S = 30.0
"""A search for shards reads the names of all keys. It counts for longer where there are many, so
that clients cannot keep Redis busy with searches."""


@dataclass(slots=True)
class Shard:
    """A shard of a model.

    Attributes:
        keys: its names in Redis.
        producer: the client of its queue.
        is_expected: it is configured, or had a worker in the life of this gateway; others may be
            what an earlier installation left.
        checked_at: when its workers were counted last, by the event loop's clock.
        workers: how many there were.
        kind: what they do with a request; None while there are none.
        card: what they publish of their model, once it was asked for.
        card_read_at: when that was.
    """

    keys: Keys
    producer: Producer
    is_expected: bool = False
    checked_at: float = float("-inf")
    workers: int = 0
    kind: ModelKind | None = None
    card: ModelCard | None = None
    card_read_at: float = float("-inf")

    async def look(self) -> None:
        """Count the workers, and ask what they do.

        Raises:
            RedisUnavailable: Redis is away.
        """
        workers, kind = await self.producer.count_workers(), None
        if workers:
            with contextlib.suppress(ProtocolError):
                kind = (await self.producer.model_card(vocabulary=False)).kind
        self.workers, self.kind = workers, kind
        self.is_expected = self.is_expected or workers > 0
        self.checked_at = asyncio.get_running_loop().time()

    async def vocabulary(self) -> tuple[bytes | None, ...]:
        """Bytes of the model's tokens by id; empty if they are not known.

        Raises:
            RedisUnavailable: Redis is away.
        """
        now = asyncio.get_running_loop().time()
        if self.card is None or now - self.card_read_at > _CARD_FRESH_S:
            try:
                self.card = await self.producer.model_card()
            except ProtocolError:
                self.card = ModelCard(None, ())
            self.card_read_at = now
        return self.card.vocabulary


class ModelDirectory:
    """The models that workers serve now, and those whose requests Redis still holds.

    Clients are made when a model is first asked for and stay open. A look at its workers counts for
    two seconds. What is known of shards lies in Redis alone, so a gateway that has just started
    knows those without a worker, too.

    Args:
        settings: the sections ``redis``, ``queue`` and ``gateway``.
    """

    def __init__(self, settings: Settings) -> None:
        grace = {"reader_grace_ms": settings.gateway.reader_grace_ms}
        queue = settings.queue.model_copy(update=grace)
        self._settings = settings.model_copy(update={"queue": queue})
        self._waiting = frozenset(settings.gateway.model_names)
        self._client = RetryingClient(
            require_url(settings.redis),
            socket_timeout_s=settings.redis.socket_timeout_s,
            outage_s=settings.gateway.outage_s,
        )
        self._shards: dict[Keys, Shard] = {}
        self._stack = AsyncExitStack()
        self._search_again_at = float("-inf")
        self._searching = asyncio.Lock()

    async def connect(self) -> None:
        """Reach Redis.

        Raises:
            RedisUnavailable: it cannot be reached.
        """
        queue = self._settings.queue
        (await self._open(Keys(queue.model, queue.shard), check=True)).is_expected = True
        await self._client.connect(Keys(queue.model, queue.shard).counters)
        for name in self._waiting:
            (await self._open(Keys(name, 0))).is_expected = True

    async def aclose(self) -> None:
        """Close all clients."""
        await self._stack.aclose()
        await self._client.aclose()

    async def served(self) -> list[Shard]:
        """The shards with a living worker, in order of model and shard.

        Raises:
            RedisUnavailable: Redis is away.
        """
        await self._search()
        await self._check(self._ordered())
        return [shard for shard in self._ordered() if shard.workers]

    async def choose(self, model: str, request_id: str) -> Shard:
        """The shard where a request goes: always the same one for an id and a set of shards.

        Raises:
            ApiError: 404, no such model; 503, no worker serves it now.
            RedisUnavailable: Redis is away.
        """
        shards = await self._checked(model)
        serving = [shard for shard in shards if shard.workers]
        if not serving:
            await self._search()
            shards = await self._checked(model)
            serving = [shard for shard in shards if shard.workers]
        if not serving and model in self._waiting:
            serving = [shard for shard in shards if shard.is_expected]
        if serving:
            number = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")
            return serving[number % len(serving)]
        if shards:
            message = f"no worker serves the model {model!r} now"
            raise ApiError(503, message, "model_unavailable", param="model", retry_after_s=5)
        names = sorted({shard.keys.model for shard in await self.served()})
        known = f"; served are {', '.join(names)}" if names else "; no model is served now"
        message = f"the model {model[:100]!r} does not exist{known}"
        raise ApiError(404, message, "model_not_found", param="model")

    async def locate(self, request_id: str) -> tuple[Shard, Status] | None:
        """The shard that knows a request, and its state; None if none does.

        Raises:
            InvalidRequest: the id is none.
            RedisUnavailable: Redis is away.
        """
        known = frozenset(self._shards)
        found = await _status_in(self._ordered(), request_id)
        if found is None:
            await self._search()
            others = [shard for shard in self._ordered() if shard.keys not in known]
            found = await _status_in(others, request_id)
        return found

    async def knows_any(self, ids: Sequence[str]) -> bool:
        """Whether a known shard holds one of these requests.

        Raises:
            RedisUnavailable: Redis is away.
        """

        async def count(keys: Keys) -> int:
            names = [keys.request(one) for one in ids]
            return int(await self._client.call(lambda: self._client.redis.exists(*names)))

        return any(await asyncio.gather(*(count(keys) for keys in self._shards)))

    async def usage(
        self,
        first: datetime.date | None,
        last: datetime.date | None,
        *,
        tenant: str | None,
        model: str | None,
    ) -> list[UsageRow]:
        """What was used of the shards that are known; see :meth:`.UsageReader.read`."""
        await self._search()
        shards = [shard.keys for shard in self._ordered()]
        return await read_days(self._client, shards, first, last, tenant=tenant, model=model)

    def _ordered(self) -> list[Shard]:
        return [self._shards[keys] for keys in sorted(self._shards, key=_order)]

    async def _check(self, shards: Iterable[Shard]) -> None:
        now = asyncio.get_running_loop().time()
        for shard in shards:
            if now - shard.checked_at > _FRESH_S:
                if shard.workers:
                    shard.checked_at = now  # others need not look meanwhile
                try:
                    await shard.look()
                except BaseException:
                    shard.checked_at = float("-inf")
                    raise

    async def _checked(self, model: str) -> list[Shard]:
        shards = [shard for shard in self._ordered() if shard.keys.model == model]
        await self._check(shards)
        return shards

    async def _search(self) -> None:
        """Look for shards that are not known yet."""
        async with self._searching:
            loop = asyncio.get_running_loop()
            if loop.time() < self._search_again_at:
                return
            found = await find_known_shards(self._client)
            for keys in found.shards:
                await self._open(keys)
            wait_s = min(max(_FRESH_S, found.pages * _SEARCH_S_PER_PAGE), _SEARCH_MOST_S)
            self._search_again_at = loop.time() + wait_s

    async def _open(self, keys: Keys, *, check: bool = False) -> Shard:
        if keys not in self._shards:
            producer = Producer(
                model=keys.model,
                shard=keys.shard,
                settings=self._settings,
                inbox=True,
                outage_s=self._settings.gateway.outage_s,
            )
            if check:
                await producer.connect()
            self._stack.push_async_callback(producer.aclose)
            self._shards[keys] = Shard(keys, producer)
        return self._shards[keys]


async def _status_in(shards: Iterable[Shard], request_id: str) -> tuple[Shard, Status] | None:
    for shard in shards:
        try:
            return shard, await shard.producer.status(request_id)
        except UnknownRequest:
            continue
    return None


def check_kind(shard: Shard, wanted: ModelKind) -> None:
    """See that a model does the kind of work that an endpoint asks for.

    Raises:
        ApiError: 400, it does another.
    """
    if shard.kind in (wanted, None):
        return
    message = (
        f"the model {shard.keys.model!r} is of kind {shard.kind}; this endpoint needs {wanted}"
    )
    raise ApiError(400, message, "wrong_model_kind", param="model")


def _order(keys: Keys) -> tuple[str, int]:
    return keys.model, keys.shard


def check_model(value: object) -> str:
    """The body's ``model``.

    Raises:
        ApiError: 400, it is missing or no text.
    """
    if not isinstance(value, str) or not value:
        raise ApiError(400, "model: give the name of a model", "missing_value", param="model")
    try:
        return Keys(value).model
    except InvalidRequest:
        message = f"the model {value[:100]!r} does not exist"
        raise ApiError(404, message, "model_not_found", param="model") from None
