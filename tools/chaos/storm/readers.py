"""Readers of every kind, and what each of them received."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from penstock.producer.client import Producer
from penstock.shared.errors import InvalidRequest, PenstockError
from penstock.shared.protocol.events import Chunk, End

__all__ = ["Reading", "read_jumping", "read_returning", "read_straight"]


@dataclass(slots=True)
class Reading:
    """What one reader received.

    Attributes:
        kind: live, returning, jumping, slow or late.
        start: the first index it asked for.
        token_ids: the tokens from there on.
        text: their text, by chunk.
        end: the terminal event.
        past_end: the client reported that the request ended before ``start``.
        error: the error that ended the reading.
        faults: chunks that did not continue the tokens before.
    """

    kind: str
    start: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    end: End | None = None
    past_end: bool = False
    error: PenstockError | None = None
    faults: list[str] = field(default_factory=list)

    @property
    def index(self) -> int:
        """One past the last token received."""
        return self.start + len(self.token_ids)

    def take(self, chunk: Chunk) -> None:
        """Add a chunk."""
        if chunk.start != self.index:
            self.faults.append(f"chunk [{chunk.start}, {chunk.stop}) came at {self.index}")
        self.token_ids += chunk.token_ids
        self.text.append(chunk.text)


async def read_straight(producer: Producer, request_id: str, kind: str) -> Reading:
    """Read everything from index 0."""
    reading = Reading(kind)
    try:
        async with producer.stream(request_id) as stream:
            async for chunk in stream:
                reading.take(chunk)
            reading.end = stream.end
    except PenstockError as error:
        reading.error = error
    return reading


async def read_returning(
    producer: Producer, request_id: str, rng: random.Random, pause_s: float
) -> Reading:
    """Read some chunks, leave, and return where the last one ended, until the end."""
    reading = Reading("returning")
    digest: int | None = None
    try:
        while reading.end is None:
            leave_after = rng.randint(1, 40)
            async with producer.stream(
                request_id, from_index=reading.index, from_digest=digest
            ) as stream:
                async for chunk in stream:
                    reading.take(chunk)
                    digest = stream.digest
                    leave_after -= 1
                    if leave_after == 0:
                        break
                else:
                    reading.end = stream.end
            if reading.end is None:
                await asyncio.sleep(rng.uniform(0, pause_s))
    except PenstockError as error:
        reading.error = error
    return reading


async def read_jumping(producer: Producer, request_id: str, index: int) -> Reading:
    """Read from an index that the request may never reach."""
    reading = Reading("jumping", start=index)
    try:
        async with producer.stream(request_id, from_index=index) as stream:
            async for chunk in stream:
                reading.take(chunk)
            reading.end = stream.end
    except InvalidRequest:
        reading.past_end = True
    except PenstockError as error:
        reading.error = error
    return reading
