"""Reads chunks and ends from Redis and refuses whatever is malformed.

The first byte tells the form: a JSON event is an object and begins with ``{``; a msgpack event is
an array and never does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgpack

from ..errors import ProtocolError
from .chat.deltas import read_deltas
from .choice_parts import Part, read_parts
from .events import END_MARK, Chunk, End, TokenLogprobs, Usage
from .parsing import PARSER_ERRORS
from .payload import result_from_json
from .states import Reason

__all__ = ["unpack_event", "unpack_letter"]

_USAGE_NAMES = frozenset(f.name for f in fields(Usage))
_MAX_TOKEN_ID = 2**32 - 1


def unpack_letter(message: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the contents of an inbox message: pairs of a request id and a packed event.

    Raises:
        ProtocolError: the message is malformed.
    """
    try:
        parts = msgpack.unpackb(message, raw=True)
    except (msgpack.UnpackException, *PARSER_ERRORS) as error:
        raise ProtocolError("letter", message, f"msgpack: {error}") from None
    if (
        not isinstance(parts, list)
        or len(parts) % 2
        or not all(isinstance(part, bytes) for part in parts)
    ):
        raise ProtocolError("letter", message, "an array of ids and events in turn")
    return zip(parts[::2], parts[1::2], strict=True)


def unpack_event(data: bytes) -> Chunk | End:
    """Return the chunk or end in one log entry or channel message, in either form.

    Raises:
        ProtocolError: the bytes are neither.
    """
    try:
        wire = _read_json(data) if data[:1] == b"{" else _unpack(data)
        if len(wire) == 4 and wire[0] != END_MARK:  # what nearly every event is
            start, token_ids, text, digest = wire
            chunk = Chunk(start, tuple(token_ids), text, digest)
        elif wire[0] != END_MARK:
            chunk = _whole_chunk(*wire[:10])
        else:
            return _end(*wire[1:6])
        _check_chunk(chunk)
    except msgpack.UnpackException as error:
        raise ProtocolError("event", data, f"one msgpack value ({error})") from None
    except UnicodeDecodeError:
        raise ProtocolError("event", data, "strings that are valid UTF-8") from None
    except (*PARSER_ERRORS, LookupError, AttributeError) as error:
        allowed = "[start, [ids], text, digest] or [-1, n, state, reason, message, usage]"
        raise ProtocolError("event", data, f"{allowed}, or their JSON objects") from error
    return chunk


_unpack = msgpack.unpackb


def _whole_chunk(
    start: Any,
    token_ids: Any,
    text: Any,
    digest: Any,
    logprobs: Any,
    lengths: Any = None,
    parts: Any = None,
    of_prompt: Any = None,
    deltas: Any = None,
    result: Any = None,
) -> Chunk:
    if not isinstance(result or b"", bytes):
        raise TypeError("a result that is not packed")
    read = read_parts(parts, len(token_ids))
    return Chunk(
        start,
        tuple(token_ids),
        text,
        digest,
        _logprobs(logprobs, len(token_ids)),
        _text_lengths(lengths, read or (Part(0, 0, len(token_ids), text),)),
        read,
        _prompt_logprobs(of_prompt),
        read_deltas(deltas, len(token_ids)),
        result or b"",
    )


def _check_chunk(chunk: Chunk) -> None:
    """Check the types that merging relies on."""
    start, token_ids, text, digest, *_ = chunk
    if type(start) is not int or type(text) is not str or type(digest) is not int or start < 0:
        raise TypeError("a field of another type")
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id <= _MAX_TOKEN_ID:
            raise TypeError("an id that is none")


def _logprobs(wire: Any, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    if not wire:  # nil or empty: none
        return ()
    if len(wire) != num_tokens:
        raise ValueError("logprobs of another number of tokens")
    return tuple(map(_token_logprobs, wire))


def _prompt_logprobs(wire: Any) -> tuple[TokenLogprobs | None, ...]:
    if not wire:
        return ()
    if wire[0] is not None:
        raise ValueError("logprobs of a first token")
    return (None, *map(_token_logprobs, wire[1:]))


def _token_logprobs(wire: Any) -> TokenLogprobs:
    logprob, top = wire
    return TokenLogprobs(float(logprob), tuple((int(i), float(other)) for i, other in top))


def _text_lengths(wire: Any, parts: Sequence[Part]) -> tuple[int, ...]:
    """Bytes of text by token; checked so that a cut by them falls between characters."""
    lengths = tuple(wire or ())
    if not lengths:
        return ()
    at = 0
    for part in parts:
        text, stop = part.text.encode(), at + part.num_tokens
        begin = 0
        for length in lengths[at:stop]:
            if type(length) is not int or length < 0:
                raise TypeError("a length that is none")
            begin += length
            if text[begin : begin + 1] and text[begin] & 0xC0 == 0x80:
                raise ValueError("a length within a character")
        if begin != len(text):
            raise ValueError("lengths of another text")
        at = stop
    if at != len(lengths):
        raise ValueError("lengths of another number of tokens")
    return lengths


def _end(n: Any, state: Any, reason_name: Any, message: Any, usage: Any) -> End:
    reason = Reason(reason_name)
    if type(n) is not int or n < 0 or type(message) is not str:
        raise TypeError("a field of another type")
    if reason.state != state:
        raise ProtocolError("event.state", state, f"{reason.state} for reason {reason}")
    known = {k: v for k, v in (usage or {}).items() if k in _USAGE_NAMES}
    if any(type(value) is not int for value in known.values() if value is not None):
        raise TypeError("usage that does not count")
    return End(n=n, reason=reason, message=message, usage=Usage(**known) if usage else None)


def _read_json(data: bytes) -> tuple[Any, ...]:
    """Return the fields of a JSON event in the order of the msgpack form."""
    wire: Mapping[str, Any] = json.loads(data)
    if wire.get("end") is True:
        end_names = ("n", "state", "reason", "message", "usage")
        return (END_MARK, *(wire[name] for name in end_names))
    chunk = tuple(wire[name] for name in ("start", "ids", "text", "digest"))
    names = ("logprobs", "text_lengths", "parts", "prompt_logprobs", "deltas")
    result = result_from_json(wire["result"]) if "result" in wire else None
    return (*chunk, *(wire.get(name) for name in names), result)
