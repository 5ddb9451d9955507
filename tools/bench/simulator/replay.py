"""Replays a trace of the simulator to a real worker, with a real reader."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from redis.asyncio import Redis

from penstock.shared.errors import PenstockError
from penstock.shared.keys import Keys
from penstock.shared.protocol.event_reader import unpack_event
from penstock.shared.protocol.events import Chunk
from penstock.shared.protocol.request import Request
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.scripts.operations import Bounds, Operations

from ...simulate.arrivals import SimRequest
from ...simulate.measures import Recorder

__all__ = ["Heard", "record", "replay"]

_SILENCE_S = 60.0
_DEADLINE_MS = 600_000
_IDS = 1000
"""Prompts use ids below this, which every vocabulary has."""


@dataclass(slots=True)
class Heard:
    """A reader's record of one request.

    Attributes:
        request: the request; its arrival is its acceptance by Redis, in seconds from the first.
        chunks: arrival of tokens on the same clock, and their number.
    """

    request: SimRequest
    chunks: list[tuple[float, int]] = field(default_factory=list)


async def replay(
    url: str,
    keys: Keys,
    requests: Sequence[SimRequest],
    rng: random.Random,
    *,
    in_flight: Callable[[float], int] | None = None,
    seconds: float = math.inf,
) -> list[Heard]:
    """Submit requests, with random prompts, greedy and past EOS, and read all their tokens.

    Acceptance counts as halfway between a submit and its answer.

    Args:
        url: address of Redis.
        keys: names of the shard.
        requests: in order of arrival.
        rng: draws the prompts.
        in_flight: None submits requests at their times. Otherwise the wanted number under way
            after a number of seconds; the next request is submitted when there are fewer.
        seconds: time of the last submit.

    Returns:
        The submitted requests.

    Raises:
        PenstockError: no token came for a minute, or a request did not get all of its tokens.
    """
    async with Redis.from_url(url) as redis, redis.pubsub() as pubsub:
        player = _Player(Operations(redis, keys), requests, in_flight, seconds)
        channels = {keys.channel(request.id).encode(): Heard(request) for request in requests}
        await pubsub.subscribe(*channels)
        for _ in channels:
            await pubsub.get_message(timeout=_SILENCE_S)  # the confirmations
        packed = [_request(request, rng) for request in requests]
        began = time.perf_counter()
        submitting = asyncio.create_task(player.submit(packed, list(channels.values()), began))
        while player.under_way or not submitting.done():
            message = await pubsub.get_message(timeout=_SILENCE_S)
            if message is None:
                submitting.cancel()
                raise PenstockError(
                    f"no token for {_SILENCE_S:g} s, and {player.under_way} requests not ended"
                )
            now = time.perf_counter() - began
            event = unpack_event(message["data"])
            if isinstance(event, Chunk):
                channels[message["channel"]].chunks.append((now, len(event.token_ids)))
            else:
                player.ended()
                await asyncio.sleep(0)  # after the last one, the submits are done
        await submitting
    heard = [one for one in channels.values() if one.chunks]
    for one in heard:
        if (count := sum(tokens for _, tokens in one.chunks)) != one.request.output_len:
            raise PenstockError(
                f"{count} tokens of {one.request.id} came, not {one.request.output_len}"
            )
    return _from_first_arrival(heard)


class _Player:
    """Submits requests in order, each at its time."""

    def __init__(
        self,
        operations: Operations,
        requests: Sequence[SimRequest],
        in_flight: Callable[[float], int] | None,
        seconds: float,
    ) -> None:
        self._operations, self._requests = operations, requests
        self._in_flight, self._seconds = in_flight, seconds
        self._news = asyncio.Event()
        self.under_way = 0

    def ended(self) -> None:
        """Count an ended request."""
        self.under_way -= 1
        self._news.set()

    async def submit(self, packed: Sequence[Request], heard: list[Heard], began: float) -> None:
        """Submit, and set the arrivals to the times of acceptance."""
        for request, one in zip(packed, heard, strict=True):
            await self._until_due(one.request.arrival, began)
            sent = time.perf_counter()
            if sent - began > self._seconds:
                return
            self.under_way += 1
            await self._operations.submit(
                request, bounds=Bounds(), default_deadline_ms=_DEADLINE_MS
            )
            accepted = (sent + time.perf_counter()) / 2 - began
            one.request = replace(one.request, arrival=accepted)

    async def _until_due(self, arrival: float, began: float) -> None:
        if self._in_flight is None:
            await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
            return
        while self.under_way >= self._in_flight(time.perf_counter() - began):
            self._news.clear()
            await self._news.wait()


def _request(request: SimRequest, rng: random.Random) -> Request:
    return Request(
        id=request.id,
        prompt=tuple(rng.randrange(1, _IDS) for _ in range(request.prompt_len)),
        lane=request.lane,
        tenant=request.tenant,
        options=SamplingOptions(max_tokens=request.output_len, temperature=0.0, ignore_eos=True),
    )


def _from_first_arrival(heard: list[Heard]) -> list[Heard]:
    first = min(one.request.arrival for one in heard)
    for one in heard:
        one.request = replace(one.request, arrival=one.request.arrival - first)
        one.chunks = [(at - first, tokens) for at, tokens in one.chunks]
    return heard


def record(heard: Sequence[Heard], recorder: Recorder) -> None:
    """Record the result as the simulator does; ``recorder`` adds no publishing time.

    Tokens of one chunk share the time since the chunk before evenly, as in a worker's metrics.
    """
    for one in heard:
        gaps = recorder.lanes[one.request.lane].itl
        (first, tokens), *rest = one.chunks
        recorder.first_token(one.request, first)
        if tokens > 1:
            gaps.add(0.0, tokens - 1)
        before = first
        for at, tokens in rest:
            gaps.add((at - before) / tokens, tokens)
            before = at
        recorder.end(one.request, first, before)
