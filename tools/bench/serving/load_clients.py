"""How a load reaches a deployment: through Redis, or through any OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from penstock.producer import Producer
from penstock.shared.errors import PenstockError
from penstock.shared.protocol.states import State
from penstock.shared.settings import load_settings

from ..options import ServeOptions
from .load_plan import LoadRequest
from .request_record import RequestRecord

if TYPE_CHECKING:
    import httpx

__all__ = ["LoadClient", "open_client"]

_TIMEOUT_S = 600.0
_DATA = "data: "


class LoadClient(Protocol):
    """Sends one request and waits for its end."""

    async def run(self, request: LoadRequest, record: RequestRecord) -> None:
        """Note in ``record`` when tokens come.

        Raises:
            Exception: the request did not complete.
        """
        ...


@contextlib.asynccontextmanager
async def open_client(options: ServeOptions) -> AsyncIterator[LoadClient]:
    """A client of the deployment that the options name.

    Raises:
        PenstockError: it cannot be reached.
    """
    if options.url is None:
        settings = load_settings({"redis.url": options.redis, "queue.model": options.model})
        async with Producer(settings=settings) as producer:
            yield _RedisClient(producer)
        return
    import httpx

    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    # As many connections as requests: a load must not wait for its own client.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    base = options.url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(
        base_url=base, headers=headers, limits=limits, timeout=_TIMEOUT_S
    ) as client:
        yield _HttpClient(client, options.model)


class _RedisClient:
    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    async def run(self, request: LoadRequest, record: RequestRecord) -> None:
        stream = await self._producer.generate(
            request.prompt,
            timeout=_TIMEOUT_S,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            temperature=0,
            on_disconnect="cancel",
        )
        async for chunk in stream:
            record.chunks.append((time.perf_counter(), len(chunk.token_ids)))
        end = stream.end
        assert end is not None
        if end.state is not State.COMPLETED:
            raise PenstockError(f"{end.state} ({end.reason}): {end.message}")
        record.input_tokens = end.usage.prompt_tokens if end.usage else 0


class _HttpClient:
    """Reads server-sent events of ``/v1/completions``; each with text counts as its tokens."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model

    async def run(self, request: LoadRequest, record: RequestRecord) -> None:
        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage: dict[str, Any] = {}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                told = (await response.aread())[:300].decode(errors="replace")
                raise PenstockError(f"HTTP {response.status_code}: {told}")
            async for line in response.aiter_lines():
                if not line.startswith(_DATA) or line == "data: [DONE]":
                    continue
                event = json.loads(line[len(_DATA) :])
                if "error" in event:
                    raise PenstockError(str(event["error"]))
                usage = event.get("usage") or usage
                if event.get("choices") and event["choices"][0].get("text"):
                    record.chunks.append((time.perf_counter(), 1))
        record.input_tokens = usage.get("prompt_tokens", 0)
        _share_out(record, usage.get("completion_tokens", len(record.chunks)))


def _share_out(record: RequestRecord, tokens: int) -> None:
    """Correct the count of tokens: an event may carry several, or half a character's none."""
    if not record.chunks:
        raise PenstockError("the stream ended without a token")
    at, _ = record.chunks[-1]
    others = len(record.chunks) - 1
    record.chunks[-1] = (at, max(1, tokens - others))
