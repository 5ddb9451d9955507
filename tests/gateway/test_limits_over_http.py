"""Limits of API keys through a running gateway: none is exceeded by one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

from gateway.rig import GatewayProcess

from penstock.producer.gateway.access.key_records import KeyRecord, Limits
from penstock.producer.gateway.access.key_store import KeyStore
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.redis.retrying_client import RetryingClient

KEYS, REQUESTS_PER_KEY, ALLOWED = 200, 5, 3
LIMITS = (
    Limits(requests_per_minute=ALLOWED),
    Limits(tokens_per_minute=10 * ALLOWED + 9),
    Limits(concurrent=ALLOWED),
    Limits(tokens_per_day=10 * ALLOWED + 9),
)
BODY = json.dumps(
    {"model": "nobody", "prompt": [1, 2, 3], "max_tokens": 7, "stream": True}
).encode()


async def create_keys(url: str) -> list[str]:
    client = RetryingClient(url)
    store = KeyStore(client)
    records = [KeyRecord("", f"t{i}", limits=LIMITS[i % len(LIMITS)]) for i in range(KEYS)]
    made = await asyncio.gather(*map(store.create, records))
    await client.aclose()
    return [secret for secret, _ in made]


class Asked:
    """A streaming request on a connection of its own, which stays open."""

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.status = 0
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, port: int) -> None:
        reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self.secret}\r\ncontent-length: {len(BODY)}\r\n\r\n"
        )
        self._writer.write(head.encode() + BODY)
        self.status = int((await reader.readline()).split()[1])

    def leave(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()


async def ask_all(port: int, secrets: list[str]) -> Counter[tuple[str, int]]:
    """All at the same time; nobody leaves before the last one was answered."""
    asked = [Asked(secret) for _ in range(REQUESTS_PER_KEY) for secret in secrets]
    try:
        await asyncio.gather(*(one.ask(port) for one in asked))
    finally:
        for one in asked:
            one.leave()
    return Counter((one.secret, one.status) for one in asked)


def test_a_thousand_requests_of_two_hundred_keys(server: EmbeddedRedis, folder: Path) -> None:
    """Admitted requests wait for a worker that never comes, so that all of them count as running;
    a keep-alive comment brings their status."""
    secrets = asyncio.run(create_keys(server.url))
    gateway = GatewayProcess(
        server.url,
        folder / "limited.log",
        gateway__extra_models="nobody",
        gateway__keep_alive_s=1,
    )
    try:
        found = asyncio.run(ask_all(gateway.port, secrets))
    finally:
        gateway.kill()
    expected = {
        (secret, status): count
        for secret in secrets
        for status, count in ((200, ALLOWED), (429, REQUESTS_PER_KEY - ALLOWED))
    }
    assert found == expected
