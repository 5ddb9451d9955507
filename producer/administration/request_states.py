"""What the records of requests say."""

from __future__ import annotations

from collections.abc import Sequence

from redis.exceptions import ResponseError

from penstock.shared.errors import UnknownRequest
from penstock.shared.keys import Keys
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import End
from penstock.shared.protocol.states import Lane, State
from penstock.shared.redis.resp import encode
from penstock.shared.redis.retrying_client import RetryingClient

from ..results import Status

__all__ = ["find_states", "read_status"]


async def find_states(client: RetryingClient, keys: Keys, ids: Sequence[str]) -> list[State | None]:
    """The present state of each request; None for one that is not known.

    Raises:
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """
    commands = [
        b"*3\r\n" + encode(("HGET", keys.request(request_id), "state")) for request_id in ids
    ]

    async def send() -> list[bytes | None]:
        found = await client.shared.exchange(commands)
        for reply in found:
            if isinstance(reply, ResponseError):
                raise reply
        return found

    states = await client.call(send)
    return [None if state is None else State(state.decode()) for state in states]


async def read_status(client: RetryingClient, keys: Keys, id: str) -> Status:
    """The state of one request.

    Raises:
        UnknownRequest: no such request.
        RedisUnavailable: see :meth:`RetryingClient.call`.
    """
    names = [
        "state", "tokens", "lane", "tenant", "end", "worker", "note",
        "accepted_at", "claimed_at", "first_token_at", "ended_at",
    ]  # fmt: skip

    async def send() -> list[bytes | None]:
        record: list[bytes | None] = await client.redis.hmget(  # type: ignore[misc]
            keys.request(id), names
        )
        return record

    state, n, lane, tenant, packed, worker, note, *times = await client.call(send)
    if state is None or n is None or lane is None or tenant is None:
        raise UnknownRequest(id)
    event = None if packed is None else unpack_event(packed)
    accepted, claimed, first_token, ended = (None if t is None else int(t) for t in times)
    return Status(
        id=id,
        state=State(state.decode()),
        n=int(n),
        lane=Lane(lane.decode()),
        tenant=tenant.decode(),
        end=event if isinstance(event, End) else None,
        worker=worker.decode() if worker and state == b"running" else None,
        accepted_at=accepted,
        claimed_at=claimed,
        first_token_at=first_token,
        ended_at=ended,
        note=note or b"",
    )
