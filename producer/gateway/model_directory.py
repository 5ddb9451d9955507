"""Which models are served, and a client of the queue for each."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from penstock.shared.errors import InvalidRequest, ProtocolError, UnknownRequest
from penstock.shared.keys import Keys
from penstock.shared.protocol import ModelKind
from penstock.shared.settings import Settings

from ..client import Producer
from ..results import Status
from ..served_models import ModelCard
from .api_errors import ApiError

__all__ = ["ModelDirectory", "Shard", "check_kind", "check_model"]

_FRESH_S = 2.0
"""How long a look at the workers counts."""

_CARD_FRESH_S = 60.0
"""The same for what they publish of their model."""


@dataclass(slots=True)
class Shard:
    """A shard of a model.

    Attributes:
        keys: its names in Redis.
        producer: the client of its queue.
        checked_at: when its workers were counted last, by the event loop's clock.
        workers: how many there were.
        kind: what they do with a request; None while there are none.
        card: what they publish of their model, once it was asked for.
        card_read_at: when that was.
    """

    keys: Keys
    producer: Producer
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
        self.workers = await self.producer.count_workers()
        try:
            card = await self.producer.model_card(vocabulary=False)
            self.kind = card.kind if self.workers else None
        except ProtocolError:
            self.kind = None
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
    """The models that workers serve now.

    Clients are made when a model is first asked for and stay open. A look at Redis counts for two
    seconds.

    Args:
        settings: the sections ``redis``, ``queue`` and ``gateway``.
    """

    def __init__(self, settings: Settings) -> None:
        grace = {"reader_grace_ms": settings.gateway.reader_grace_ms}
        queue = settings.queue.model_copy(update=grace)
        self._settings = settings.model_copy(update={"queue": queue})
        self._waiting = frozenset(settings.gateway.model_names)
        self._shards: dict[Keys, Shard] = {}
        self._stack = AsyncExitStack()
        self._scanned_at = float("-inf")
        self._scanning = asyncio.Lock()

    async def connect(self) -> None:
        """Reach Redis.

        Raises:
            RedisUnavailable: it cannot be reached.
        """
        queue = self._settings.queue
        await self._open(Keys(queue.model, queue.shard), check=True)
        for name in self._waiting:
            await self._open(Keys(name, 0))

    async def aclose(self) -> None:
        """Close all clients."""
        await self._stack.aclose()

    async def served(self) -> list[Shard]:
        """The shards with a living worker, in order of model and shard.

        Raises:
            RedisUnavailable: Redis is away.
        """
        await self._scan()
        return [shard for shard in self._ordered() if shard.workers]

    async def choose(self, model: str, request_id: str) -> Shard:
        """The shard where a request goes: always the same one for an id and a set of shards.

        Raises:
            ApiError: 404, no such model; 503, no worker serves it now.
            RedisUnavailable: Redis is away.
        """
        shards = [shard for shard in self._ordered() if shard.keys.model == model]
        await self._check(shards)
        serving = [shard for shard in shards if shard.workers]
        if not serving:
            await self._scan()
            shards = [shard for shard in self._ordered() if shard.keys.model == model]
            serving = [shard for shard in shards if shard.workers]
        if not serving and model in self._waiting:
            serving = shards
        if serving:
            number = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big")
            return serving[number % len(serving)]
        names = sorted({shard.keys.model for shard in self._ordered() if shard.workers})
        if shards:
            message = f"no worker serves the model {model!r} now"
            raise ApiError(503, message, "model_unavailable", param="model", retry_after_s=5)
        known = f"; served are {', '.join(names)}" if names else "; no model is served now"
        message = f"the model {model[:100]!r} does not exist{known}"
        raise ApiError(404, message, "model_not_found", param="model")

    async def known(self) -> list[Shard]:
        """All shards that requests may be in.

        Raises:
            RedisUnavailable: Redis is away.
        """
        await self._scan()
        return self._ordered()

    async def locate(self, request_id: str) -> tuple[Shard, Status] | None:
        """The shard that knows a request, and its state; None if none does.

        Raises:
            InvalidRequest: the id is none.
            RedisUnavailable: Redis is away.
        """
        for shard in await self.known():
            try:
                return shard, await shard.producer.status(request_id)
            except UnknownRequest:
                continue
        return None

    def _ordered(self) -> list[Shard]:
        return [self._shards[keys] for keys in sorted(self._shards, key=_order)]

    async def _check(self, shards: Iterable[Shard]) -> None:
        now = asyncio.get_running_loop().time()
        for shard in shards:
            if now - shard.checked_at > _FRESH_S:
                if shard.workers:
                    shard.checked_at = now  # others need not look meanwhile
                await shard.look()

    async def _scan(self) -> None:
        async with self._scanning:
            now = asyncio.get_running_loop().time()
            if now - self._scanned_at <= _FRESH_S:
                return
            queue = self._settings.queue
            first = await self._open(Keys(queue.model, queue.shard))
            for keys in await first.producer.served_models():
                await self._open(keys)
            for shard in self._ordered():
                await shard.look()
            self._scanned_at = now

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
