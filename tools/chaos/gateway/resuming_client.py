"""A client of events that comes back after every break, at any gateway, and counts every token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Answer", "Violation", "read_answer"]

_PAUSE_S = 0.2
_SILENCE_S = 20.0
_DROP_EVENTS = (5, 400)


class Violation(Exception):
    """A promise about a stream was broken; the text says which."""


@dataclass
class Answer:
    """What a client has read of one request.

    Attributes:
        key: its Idempotency-Key.
        text: the output so far.
        index: where to go on.
        done: the stream said that the request was completed.
        breaks: how often the stream broke off.
        accepted: when its request was accepted, in seconds, by its events.
    """

    key: str
    text: str = ""
    index: int = 0
    done: bool = False
    breaks: int = 0
    accepted: set[int] = field(default_factory=set)


async def read_answer(
    ports: Sequence[int], key: str, body: dict[str, Any], rng: random.Random
) -> Answer:
    """Read a request to its end, resuming as often as it takes.

    The model must give one character for a token.

    Args:
        ports: of the gateways on loopback.
        key: of the request.
        body: of ``POST /v1/completions``.
        rng: chooses gateways and where the client drops its own connection.

    Raises:
        Violation: a token was lost or doubled, or the gateway refused for good.
    """
    answer = Answer(key)
    data = json.dumps({**body, "stream": True}).encode()
    while not answer.done:
        try:
            async with asyncio.timeout(None) as patience:
                await _read_on(rng.choice(ports), data, answer, rng, patience)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            answer.breaks += 1
            await asyncio.sleep(_PAUSE_S)
    return answer


async def _read_on(
    port: int, data: bytes, answer: Answer, rng: random.Random, patience: asyncio.Timeout
) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    events_left = rng.randint(*_DROP_EVENTS)
    try:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"idempotency-key: {answer.key}\r\nlast-event-id: {answer.index}\r\n"
            f"connection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        number = answer.index
        status = 0
        while not answer.done:
            patience.reschedule(loop.time() + _SILENCE_S)
            line = await reader.readline()
            if not line.endswith(
                (b"\n", b"}}")
            ):  # an error object ends its body without a line's end
                raise EOFError("the connection ended")
            if line.startswith(b"HTTP/1.1 "):
                status = int(line[9:12])
            elif line.startswith(b"id: "):
                number = int(line[4:])
            elif line.startswith((b"data: ", b'{"error"')):
                _take(line.removeprefix(b"data: ").strip(), number, status, answer)
                events_left -= 1
                if not events_left:
                    raise EOFError("the client dropped its connection")
    finally:
        writer.transport.abort()


def _take(data: bytes, number: int, status: int, answer: Answer) -> None:
    if data == b"[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    if "error" in event:
        if status in (200, 408, 429) or status >= 500:
            raise EOFError(event["error"]["code"])
        raise Violation(f"{answer.key}: refused with {status}: {event['error']['message']}")
    answer.accepted.add(event["created"])
    text = "".join(choice["text"] for choice in event["choices"])
    if len(text) != number - answer.index:
        raise Violation(
            f"{answer.key}: an event from {answer.index} to {number} holds {len(text)} tokens"
        )
    answer.text += text
    answer.index = number
