"""A trace of the simulator's, played to a real worker and heard by a real reader."""

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
from penstock.shared.protocol import Chunk, Request, SamplingOptions, unpack_event
from penstock.shared.scripts.operations import Bounds, Operations

from ...simulate.arrivals import SimRequest
from ...simulate.measures import Recorder

__all__ = ["Heard", "record", "replay"]

_SILENCE_S = 60.0
_DEADLINE_MS = 600_000
_IDS = 1000
"""Prompts are made of ids below this, which every vocabulary has."""


@dataclass(slots=True)
class Heard:
    """What a reader heard of one request.

    Attributes:
        request: as it was; its arrival is when Redis accepted it, in seconds from the first one's.
        chunks: when tokens came, on the same clock, and how many.
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

    Acceptance is taken to be halfway between a submit and its answer.

    Args:
        url: address of Redis.
        keys: names of the shard.
        requests: in order of arrival.
        rng: draws the prompts.
        in_flight: None: requests are submitted at their times. Else how many are to be under way
            after so many seconds: the next one is submitted when there are fewer.
        seconds: nothing is submitted later.

    Returns:
        Those that were submitted.

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
                await asyncio.sleep(0)  # if that was the last, the submits are known to be done
        await submitting
    heard = [one for one in channels.values() if one.chunks]
    for one in heard:
        if (count := sum(tokens for _, tokens in one.chunks)) != one.request.output_len:
            raise PenstockError(
                f"{count} tokens of {one.request.id} came, not {one.request.output_len}"
            )
    return _from_first_arrival(heard)


class _Player:
    """Submits requests in their order, each when its time has come."""

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
        """One request less."""
        self.under_way -= 1
        self._news.set()

    async def submit(self, packed: Sequence[Request], heard: list[Heard], began: float) -> None:
        """Submit, and set the arrivals to when that was."""
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
    """Put down what was heard as the simulator does; ``recorder`` adds nothing for publishing.

    Tokens that came together share the time since those before evenly, as in a worker's metrics.
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
