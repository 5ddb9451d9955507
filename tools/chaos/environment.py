"""The environment of a storm: server, proxies, workers, clients; opened and closed together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.producer.client import Producer
from penstock.shared.keys import Keys
from penstock.shared.redis.retrying_client import RetryingClient

from .faults.fault_schedule import Fault
from .faults.storm_server import OwnServer, Server, given_server, through
from .faults.tcp_proxy import Proxy
from .faults.worker_fleet import Fleet
from .options import StormOptions, storm_settings, worker_arguments, worker_environment

__all__ = ["Environment", "OpenServer", "open_environment"]

OpenServer = Callable[[Path], contextlib.AbstractAsyncContextManager[Server]]

_OUTAGE_S = 60.0


@dataclass(frozen=True, slots=True)
class Environment:
    """Everything that runs during a storm.

    Attributes:
        server: Redis.
        keys: of the shard.
        workers_proxy: between workers and Redis.
        clients_proxy: between ``client`` and Redis.
        slow_proxy: between ``slow_client`` and Redis.
        fleet: the workers.
        client: submits, cancels and reads.
        slow_client: reads, at times slowly.
        direct: a client without a proxy.
    """

    server: Server
    keys: Keys
    workers_proxy: Proxy
    clients_proxy: Proxy
    slow_proxy: Proxy
    fleet: Fleet
    client: Producer
    slow_client: Producer
    direct: RetryingClient


@contextlib.asynccontextmanager
async def open_environment(
    options: StormOptions, folder: Path, open_server: OpenServer = OwnServer
) -> AsyncIterator[Environment]:
    """Start everything; yield once all workers are ready.

    Args:
        options: of the storm.
        folder: for data and logs; the caller removes it.
        open_server: makes the storm's own server in a folder, if no server is given.

    Raises:
        ConfigurationError: the server is not on loopback.
        RedisUnavailable: there is no server.
        PenstockError: workers do not start.
    """
    settings = storm_settings(options)
    keys = Keys(settings.queue.model, settings.queue.shard)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        server: Server
        if options.redis is None:
            server = await enter(open_server(folder / "redis"))
        else:
            server = await enter(given_server(options.redis))
        if Fault.SLOW_READERS in options.faults:
            await server.limit_subscribers()
        direct = RetryingClient(server.url, socket_timeout_s=2.0, outage_s=_OUTAGE_S)
        stack.push_async_callback(direct.aclose)
        if options.redis is not None:
            stack.push_async_callback(_remove_keys, direct, keys)
        workers_proxy, clients_proxy, slow_proxy = [
            await enter(Proxy(server.host, server.port, narrow=narrow))
            for narrow in (False, False, True)
        ]
        fleet = await enter(
            Fleet(
                options.workers,
                worker_arguments(settings),
                worker_environment(settings, through(server.storm_url, workers_proxy.port)),
                options.logs or folder / "workers",
            )
        )
        client, slow_client = [
            Producer(through(server.storm_url, proxy.port), settings=settings, outage_s=_OUTAGE_S)
            for proxy in (clients_proxy, slow_proxy)
        ]
        stack.push_async_callback(client.aclose)
        stack.push_async_callback(slow_client.aclose)
        yield Environment(
            server=server,
            keys=keys,
            workers_proxy=workers_proxy,
            clients_proxy=clients_proxy,
            slow_proxy=slow_proxy,
            fleet=fleet,
            client=client,
            slow_client=slow_client,
            direct=direct,
        )


async def _remove_keys(client: RetryingClient, keys: Keys) -> None:
    names = [name async for name in client.redis.scan_iter(match=_literal(keys.prefix) + "*")]
    for at in range(0, len(names), 500):
        await client.redis.unlink(*names[at : at + 500])


def _literal(prefix: str) -> str:
    """Escape a prefix for a key pattern."""
    return "".join(f"\\{c}" if c in "*?[]\\{}" else c for c in prefix)
