"""The states of many requests in one round trip."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.shared.keys import Keys
from penstock.shared.protocol import State
from penstock.shared.redis.retrying_client import RetryingClient

__all__ = ["find_states"]


async def find_states(client: RetryingClient, keys: Keys, ids: Sequence[str]) -> list[State | None]:
    """The present state of each request; None for one that is not known.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """

    async def send() -> list[bytes | None]:
        async with client.redis.pipeline(transaction=False) as pipe:
            for request_id in ids:
                pipe.hget(keys.request(request_id), "state")
            found: list[bytes | None] = await pipe.execute()
            return found

    states = await client.call(send) if ids else []
    return [None if state is None else State(state.decode()) for state in states]
