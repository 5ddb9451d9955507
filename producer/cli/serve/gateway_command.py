"""``penstock gateway``: OpenAI's HTTP API in front of the queue."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.shared.local.gc_tuning import without_collector
from penstock.shared.settings import load_settings

from ..options import ConfigOption, ModelOption, RedisOption, ShardOption

__all__ = ["gateway"]


def gateway(
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; default: 8000. 0 takes a free one.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that share the port; default: 1.")
    ] = None,
    redis: RedisOption = None,
    model: ModelOption = None,
    shard: ShardOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve OpenAI's HTTP API for every model that workers serve on this Redis server.

    It runs until Ctrl-C or SIGTERM. docs/gateway.md says what clients can send.
    """
    with without_collector():  # its packages are an extra of their own
        from ...gateway.serving.gateway_processes import serve

    flags = {
        "gateway.host": host,
        "gateway.port": port,
        "gateway.processes": processes,
        "redis.url": redis,
        "queue.model": model,
        "queue.shard": shard,
    }
    serve(load_settings(flags, config=config), _announce)


def _announce(url: str, has_keys: bool) -> None:
    typer.echo(f"gateway: {url} ({'API keys' if has_keys else 'no API keys: loopback only'})")
