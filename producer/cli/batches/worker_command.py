"""``penstock batches``: the process that drives batch files, webhooks and schedules."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from penstock.shared.settings import load_settings

from ..options import ConfigOption, RedisOption
from .session import open_client

__all__ = ["batches"]


def batches(
    storage: Annotated[
        str | None, typer.Option(help="Directory or fsspec URL of inputs and outputs.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics on this port; 0 takes a free one.")
    ] = None,
    redis: RedisOption = None,
    config: ConfigOption = None,
) -> None:
    """Drive batch files, webhooks and schedules until Ctrl-C or SIGTERM.

    Start as many as you like: each batch is driven by one of them, and by another one when that
    dies.
    """
    from ...batches.batch_metrics import BatchMetrics
    from ...batches.batch_service import BatchService  # its packages are an extra of their own
    from ...batches.job_worker import make_worker, run_until

    flags = {"redis.url": redis, "batches.storage": storage, "batches.metrics_port": metrics_port}
    settings = load_settings(flags, config=config)

    async def run() -> None:
        async with open_client(settings) as client:
            service = BatchService(client, settings)
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            metrics, batches = BatchMetrics(), settings.batches
            try:
                with metrics.served(batches.metrics_host, batches.metrics_port) as port:
                    if port is not None:
                        typer.echo(f"metrics: http://{batches.metrics_host}:{port}/metrics")
                    typer.echo("driving batches; Ctrl-C ends")
                    make = lambda: make_worker(settings, service, client, metrics)  # noqa: E731
                    await run_until(stop, make)
            finally:
                await service.aclose()

    asyncio.run(run())
