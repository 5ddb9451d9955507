"""Server-sent events: their bytes, made from prepared pieces.

Every event has an ``id``, the token index where a reader goes on. See "Server-sent events" in the
HTML standard. Clients that split lines like Python's ``splitlines`` break on three further
characters, so JSON strings escape these.
"""

from __future__ import annotations

from json.encoder import encode_basestring

__all__ = ["DONE", "HEADERS", "KEEP_ALIVE", "quoted"]

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment; clients skip it."""

DONE = b"data: [DONE]\n\n"
"""The last event of a request that was completed, and of no other."""

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events otherwise
)

_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def quoted(text: str) -> str:
    """Return a text as a JSON string that holds no line end of any kind."""
    if text.isascii():
        return encode_basestring(text)
    return encode_basestring(text).translate(_LINE_ENDS)
