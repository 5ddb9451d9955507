"""What a client sees of a queue besides its own streams: workers, models, states of requests."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.shared.keys import Keys
from penstock.shared.protocol.request import check_id
from penstock.shared.protocol.states import State
from penstock.shared.redis.retrying_client import RetryingClient

from ..results import Status
from .request_states import find_states, read_status
from .served_models import ModelCard, count_workers, find_served_models, read_model_card

__all__ = ["QueueView"]


class QueueView:
    """The calls of a client that only look. The client makes the connection."""

    _client: RetryingClient
    _keys: Keys

    async def count_workers(self) -> int:
        """How many workers serve this model and shard now. Without any, requests wait.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        return await count_workers(self._client, self._keys)

    async def model_card(self, *, vocabulary: bool = True) -> ModelCard:
        """What this shard's workers published of their model; see :func:`read_model_card`."""
        return await read_model_card(self._client, self._keys, vocabulary=vocabulary)

    async def served_models(self) -> list[Keys]:
        """The models and shards with a worker on this server now; in a cluster, on one node.

        The list is empty if this user may not list keys.

        Raises:
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        return await find_served_models(self._client)

    async def states(self, ids: Sequence[str]) -> list[State | None]:
        """The states of many requests now, in one round trip; None for one that is not known.

        Raises:
            InvalidRequest: an id is invalid.
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        for name in ids:
            check_id(name)
        return await find_states(self._client, self._keys, ids)

    async def status(self, id: str) -> Status:
        """The state of a request now.

        Raises:
            UnknownRequest: no such request.
            InvalidRequest: the id is invalid.
            RedisUnavailable: see :meth:`RetryingClient.call`.
        """
        check_id(id)
        return await read_status(self._client, self._keys, id)
