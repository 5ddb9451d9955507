"""Connections of redis-py that penstock changes: they go along with every supported redis-py."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection

from penstock.shared.redis.cluster import ClusterConnection, ClusterSSLConnection, Route
from penstock.shared.redis.transient_errors import RetryableConnection, RetryableUnixConnection


@pytest.mark.parametrize(
    "connection",
    [
        lambda: ClusterConnection(route=Route()),
        lambda: ClusterSSLConnection(route=Route()),
        lambda: RetryableUnixConnection(),
    ],
    ids=["tcp", "tls", "unix"],
)
async def test_redis_py_may_say_why_it_disconnects(
    connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    # As redis-py 7.3 to 8.1 have it and call it, between two attempts to connect.
    async def disconnect(
        self: AbstractConnection,
        nowait: bool = False,
        error: Exception | None = None,
        failure_count: int | None = None,
    ) -> None:
        given.append((nowait, error, failure_count))

    monkeypatch.setattr(AbstractConnection, "disconnect", disconnect)
    error = OSError("refused")
    made = connection()
    assert isinstance(made, RetryableConnection)
    await made.disconnect(error=error, failure_count=1)
    await made.disconnect(nowait=True)
    assert given == [(False, error, 1), (True, None, None)]
