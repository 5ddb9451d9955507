"""An HTTP parser that ignores offers of another protocol.

httptools skips the body of a request with an ``Upgrade`` header. Java's own client sends one, for
HTTP/2, with each request to a plain ``http`` URL. A server may ignore the offer (RFC 9110, section
7.8), and the body follows as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser

__all__ = ["UpgradeParser"]

_FRAMING = (b"transfer-encoding", b"content-length")


class _Callbacks(Protocol):
    """The methods that a parser calls, as in httptools."""

    headers: list[tuple[bytes, bytes]]

    def on_message_begin(self) -> None: ...

    def on_url(self, url: bytes) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class UpgradeParser:
    """Stands in for httptools' parser, and also parses bodies that it skips.

    After a skipped body's head a fresh parser takes over. It is fed a minimal head first, which
    says only where the body ends; the target does not hear of that head.

    Args:
        target: receives the callbacks.
    """

    def __init__(self, target: _Callbacks) -> None:
        self._target = target
        self._parser = _new_parser(target)

    def skips_body(self) -> bool:
        """Whether the parser took a message for ended at its head, though a body follows."""
        return self._parser.should_upgrade() and bool(_framing(self._target.headers))

    def feed_data(self, data: bytes) -> None:
        """Parse the next bytes of the connection.

        Raises:
            HttpParserError: the bytes are not HTTP.
        """
        rest = memoryview(data)
        while True:
            try:
                self._parser.feed_data(rest)
            except HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]
                framing = _framing(self._target.headers)
                if framing:
                    self._parser = _body_parser(self._target, framing)
            else:
                return

    def should_upgrade(self) -> bool:
        """Always False: offers are ignored."""
        return False

    def should_keep_alive(self) -> bool:
        """See httptools."""
        return self._parser.should_keep_alive()

    def get_http_version(self) -> str:
        """See httptools."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """See httptools."""
        return self._parser.get_method()


class _Relay:
    """Passes callbacks on, but is silent while the minimal head is parsed."""

    def __init__(self, target: _Callbacks) -> None:
        self.silent = True
        self._target = target

    def on_message_begin(self) -> None:
        if not self.silent:
            self._target.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.silent:
            self._target.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.silent:
            self._target.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.silent:
            self._target.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._target.on_body(body)

    def on_message_complete(self) -> None:
        self._target.on_message_complete()


def _new_parser(target: object) -> HttpRequestParser:
    parser = HttpRequestParser(target)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
    return parser


def _body_parser(target: _Callbacks, framing: bytes) -> HttpRequestParser:
    relay = _Relay(target)
    parser = _new_parser(relay)
    parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n\r\n")
    relay.silent = False
    return parser


def _framing(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The header line that says where the body ends; empty if there is no body."""
    for wanted in _FRAMING:
        for name, value in headers:
            if name == wanted and value.strip(b"0"):
                return name + b": " + value
    return b""
