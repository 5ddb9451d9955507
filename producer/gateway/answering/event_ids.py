"""The ids of events that clients give back: where they go on."""

from __future__ import annotations

from starlette.requests import Request

from ..api_errors import invalid

__all__ = ["last_event_id", "read_index"]

_MAX_INDEX = 2**31 - 1


def last_event_id(request: Request, parameter: str = "") -> int:
    """The index that a reader goes on from; 0 if it begins.

    An EventSource that reconnects repeats its URL and adds the header. So the header wins.

    Args:
        request: the HTTP request.
        parameter: of its URL that says the same; empty if none does.

    Raises:
        ApiError: 400, it is no index.
    """
    given = request.headers.get("last-event-id")
    if given is not None:
        return read_index(given, "Last-Event-ID")
    if not parameter:
        return 0
    return read_index(request.query_params.get(parameter, "0"), parameter)


def read_index(text: str, where: str) -> int:
    """An event's id, or another whole number.

    Raises:
        ApiError: 400, it is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _MAX_INDEX):
        allowed = f"a whole number from 0 to {_MAX_INDEX}"
        raise invalid(where, f"{where}: got {text[:40]!r}; allowed: {allowed}")
    return int(text)
