"""What ``penstock batch submit`` and ``penstock schedule add`` ask alike, and how it is read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import typer

from penstock.shared.errors import InvalidRequest
from penstock.shared.protocol.states import Lane

__all__ = [
    "LaneOption",
    "PayerOption",
    "WebhookOption",
    "WindowOption",
    "file_chunks",
    "first_line_url",
    "read_time",
]

LaneOption = Annotated[Lane, typer.Option(help="How urgent the requests are.")]
PayerOption = Annotated[str, typer.Option(metavar="NAME", help="The tenant that pays.")]
WindowOption = Annotated[
    str, typer.Option(metavar="TIME", help="Give up what has not ended then: 90m, 24h, 7d.")
]
WebhookOption = Annotated[
    str | None, typer.Option(metavar="URL", help="Call this URL when a batch ends.")
]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_READ_BYTES = 1 << 20


def read_time(name: str, text: str) -> int:
    """Seconds of a time such as ``90m``.

    Raises:
        InvalidRequest: it is none.
    """
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if not match:
        raise InvalidRequest(name, text, "a number and a unit: 90m, 24h, 7d")
    return int(match[1]) * _UNITS[match[2]]


def first_line_url(file: Path) -> str:
    """The endpoint that the first line of a batch file names.

    Raises:
        InvalidRequest: it names none, or the file cannot be read.
    """
    from ...batches.lines.input_lines import first_url

    try:
        with file.open("rb") as lines:
            return first_url(lines.readline(_READ_BYTES))
    except OSError as error:
        raise InvalidRequest("file", str(file), f"a readable file: {error.strerror}") from None


async def file_chunks(file: Path) -> AsyncIterator[bytes]:
    """The file, piece by piece, read in a thread."""
    with file.open("rb") as body:
        while chunk := await asyncio.to_thread(body.read, _READ_BYTES):
            yield chunk
