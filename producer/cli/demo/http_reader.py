"""The demo's requests over HTTP: begun at the gateway, read as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from penstock.shared.errors import PenstockError
from penstock.shared.protocol.events import Chunk, rolling_digest
from penstock.shared.protocol.states import Lane

from ..local.child import Child
from .summary import Row

__all__ = ["GatewayChild", "HttpReader"]

_SPEAKS = "gateway: "
"""How the line begins in which a gateway says its address."""

_TIERS = {Lane.CRITICAL: "priority", Lane.NORMAL: "default", Lane.BATCH: "flex"}
_START_S = 60.0
_POLL_S = 0.05
_MAX_LINE = 1 << 20


class GatewayChild(Child):
    """A gateway on a free port, for the time of a ``with`` block.

    Args:
        environment: of the process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "penstock.producer.cli", "gateway", "--port", "0"]
        super().__init__("gateway", command, environment, self._hear, ready_file=False)
        self._address: tuple[str, int] | None = None

    def _hear(self, line: str) -> None:
        if line.startswith(_SPEAKS) and self._address is None:
            host, _, port = line.split()[1].removesuffix("/v1").rpartition(":")
            self._address = host.rpartition("/")[2], int(port)

    async def wait_until_serving(self, model: str) -> HttpReader:
        """Wait until the gateway knows a model; returns what reads from it.

        Raises:
            PenstockError: the gateway has ended, or does not know the model within a minute.
        """
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    self.check()
                    if self._address is not None:
                        reader = HttpReader(self._address, model)
                        if await reader.is_served():
                            return reader
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            message = f"the gateway does not serve {model!r}; it last said: {self.last_line}"
            raise PenstockError(message) from None


class HttpReader:
    """Begins requests and reads their events.

    HTTP/1.0, whose answers end with their connection: every line of a body is a line of an event.

    Args:
        address: host and port of the gateway.
        model: the model that the requests name.
    """

    def __init__(self, address: tuple[str, int], model: str) -> None:
        self._address = address
        self._model = model

    async def is_served(self) -> bool:
        """Whether the gateway knows the model."""
        async with self._answer("GET", "/v1/models") as body:
            listed = json.loads(await body.read())["data"]
        return any(found["id"] == self._model for found in listed)

    async def chunks(self, row: Row) -> AsyncGenerator[Chunk, None]:
        """The chunks of a row's request: begun by the first call, gone on with by later ones.

        Raises:
            PenstockError: the gateway refused the request, or its stream broke off.
        """
        body = None if row.id else _body(row, self._model)
        path = "/v1/chat/completions" if row.is_chat else "/v1/completions"
        if body is None:
            path = f"/v1/streams/{row.id}?from={row.tokens}"
        is_done = False
        async with self._answer("GET" if body is None else "POST", path, body) as lines:
            async for line in lines:
                if line == b"data: [DONE]\n":
                    is_done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise PenstockError(f"the gateway answers: {event['error']['message']}")
                    row.id = event["id"]
                    for choice in event["choices"]:
                        if token_ids := choice.get("token_ids"):
                            yield _chunk(row, choice, tuple(token_ids))
        if not is_done:
            raise PenstockError(f"the gateway broke off the stream of {row.title!r}")

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes | None = None
    ) -> AsyncIterator[asyncio.StreamReader]:
        reader, writer = await asyncio.open_connection(*self._address, limit=_MAX_LINE)
        try:
            head = f"{method} {path} HTTP/1.0\r\nhost: {self._address[0]}\r\n"
            if body is not None:
                # A reader that leaves is to find its stream going on.
                head += "content-type: application/json\r\nx-penstock-on-disconnect: continue\r\n"
                head += f"content-length: {len(body)}\r\n"
            writer.write(head.encode() + b"\r\n" + (body or b""))
            status = (await reader.readline()).split(maxsplit=2)[1:2]
            while (await reader.readline()).strip():
                pass
            if status != [b"200"]:
                raise PenstockError(f"the gateway answers: {(await reader.read()).decode()}")
            yield reader
        finally:
            writer.close()


def _body(row: Row, model: str) -> bytes:
    prompt = {"messages" if row.is_chat else "prompt": row.prompt}
    asked: dict[str, Any] = {"stream": True, "return_token_ids": True, **row.options}
    tier = {"service_tier": _TIERS[row.lane]}
    return json.dumps({"model": model, **prompt, **asked, **tier}).encode()


def _chunk(row: Row, choice: Mapping[str, Any], token_ids: tuple[int, ...]) -> Chunk:
    delta = choice.get("delta", choice)
    text = delta.get("text") or delta.get("content") or ""
    return Chunk(row.tokens, token_ids, text, rolling_digest(token_ids, row.digest or 0))
