"""The log of requests that came to nothing: refused, failed, or left by their clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.shared.quoting import one_line

__all__ = ["CLIENT_LEFT_STATUS", "RequestLog"]

_log = logging.getLogger("penstock.gateway.requests")

CLIENT_LEFT_STATUS = 499
"""Stands for the status of a request whose client left before the end of the answer."""

_FIRST_LOGGED_STATUS = 400
_MAX_LINES_PER_S = 50
_MAX_PATH_CHARS = 200
_MAX_WORD_CHARS = 80


class RequestLog:
    """Writes a line for each such request, and no more than 50 in a second.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._lines = 0
        self._left_out = 0

    def note(self, method: str, path: str, status: int, request_id: str) -> None:
        """A request is over.

        Args:
            method: as its client sent it.
            path: the same; without the query, where secrets may stand.
            status: of the answer, or :data:`CLIENT_LEFT_STATUS`.
            request_id: the answer's ``x-request-id``; empty if there was no answer.
        """
        if status < _FIRST_LOGGED_STATUS:
            return
        second = int(self._clock())
        if second != self._second:
            if self._left_out:
                _log.info("%d more requests were refused or left", self._left_out)
            self._second, self._lines, self._left_out = second, 0, 0
        if self._lines >= _MAX_LINES_PER_S:
            self._left_out += 1
            return
        self._lines += 1
        _log.info(
            "%s %s %d %s",
            one_line(method, _MAX_WORD_CHARS),
            one_line(path, _MAX_PATH_CHARS),
            status,
            one_line(request_id, _MAX_WORD_CHARS) or "-",
        )
