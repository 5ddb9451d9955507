"""The order in which a batch's lines are submitted: equal beginnings beside each other.

Workers keep the KV of a prompt's begin in their prefix cache, so lines that share it are cheaper
one after the other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgpack

from ..stores.records import LineError

__all__ = ["Plan", "PlannedLine", "make_plan"]

_ENTRY = struct.Struct("<QII")


class PlannedLine(NamedTuple):
    """Where a line stands.

    Attributes:
        number: its number in the file, from 1.
        offset: its first byte.
        length: its bytes.
    """

    number: int
    offset: int
    length: int


class Plan:
    """All lines of a batch in the order of their submission.

    Args:
        data: what :func:`make_plan` returned.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data) // _ENTRY.size

    def __getitem__(self, place: int) -> PlannedLine:
        offset, length, number = _ENTRY.unpack_from(self._data, place * _ENTRY.size)
        return PlannedLine(number, offset, length)


def make_plan(pieces: Iterable[bytes]) -> tuple[bytes, list[LineError]]:
    """Put plan pieces together; returns the plan, and an error for each repeated ``custom_id``."""
    entries: list[tuple[bytes, int, int, int]] = []
    errors: list[LineError] = []
    first: dict[bytes, int] = {}
    for piece in pieces:
        for number, offset, length, name, begin in msgpack.unpackb(piece):
            if name in first:
                message = f"custom_id: line {first[name]} has the same"
                errors.append(
                    LineError(
                        code="duplicate_custom_id", message=message, param="custom_id", line=number
                    )
                )
            first.setdefault(name, number)
            entries.append((begin, number, offset, length))
    entries.sort()
    packed = [_ENTRY.pack(offset, length, number) for _, number, offset, length in entries]
    return b"".join(packed), errors
