"""What the gateway adds to a first token, and what streams cost it: CPU, memory, connections."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import uvloop

from penstock.producer import Producer
from penstock.shared.errors import PenstockError
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.local.gc_tuning import calm_collector

from ...report import Number, Report
from ...rounds import Machine, Progress, Rounds, percentile, process_s
from ..options import GatewayOptions
from .gateway_process import RunningGateway, raise_file_limit, start_gateway, start_worker
from .stream_clients import StreamClient, open_streams
from .token_writer import TokenWriter

__all__ = ["bench_gateway"]

_MODEL = "bench"
_REQUESTS_PER_S = 200
_PATIENCE_S = 60.0

_AT_MOST: tuple[tuple[str, Number], ...] = (
    ("ttft_added_ms_p50", 2),
    ("ttft_added_ms_p99", 5),
    ("cpu_us_per_token_1000", 40),
    ("kb_per_idle_stream", 30),
)


def bench_gateway(options: GatewayOptions, progress: Progress = lambda *_: None) -> Report:
    """Measure one gateway process, on real parts without an engine.

    Raises:
        RedisUnavailable: no server can be started.
        PenstockError: gateway or worker do not start.
    """
    raise_file_limit()
    return uvloop.run(_bench(options, progress))  # as the gateway itself runs


async def _bench(options: GatewayOptions, progress: Progress) -> Report:
    rounds, stages = Rounds(), 2 * options.rounds + 2
    async with EmbeddedRedis() as server:
        machine = Machine()
        for done in range(options.rounds):
            progress("first tokens", done, stages)
            async with start_gateway(server.url) as gateway, start_worker(server.url, _MODEL):
                await _first_tokens(server.url, gateway, rounds, options.seconds)
        for done in range(options.rounds):
            progress("1,000 streams", options.rounds + done, stages)
            async with start_gateway(server.url) as gateway:
                held = await _streams(
                    server.url, gateway, 1000, options.rate, options.seconds
                )  # fmt: skip
            rounds.add("cpu_us_per_token_1000", round(held.cpu_us, 2))
        progress("many streams", stages - 2, stages)
        async with start_gateway(server.url) as gateway:
            held = await _streams(
                server.url, gateway, options.streams, options.rate, 2 * options.seconds
            )
        rounds.add("streams_held", held.complete)
        rounds.add("tokens_per_s", round(held.tokens_per_s))
        rounds.add(f"cpu_us_per_token_{options.streams}", round(held.cpu_us, 2))
        rounds.add("kb_per_idle_stream", round(held.kb_per_stream, 1))
    return rounds.report(
        "gateway",
        machine,
        at_most=_AT_MOST,
        at_least=(("streams_held", options.streams), ("tokens_per_s", 0.97 * options.rate)),
        notes=[f"Redis: {server.binary.kind} {server.binary.version}, started for this"],
    )


async def _first_tokens(url: str, gateway: RunningGateway, rounds: Rounds, seconds: float) -> None:
    """Requests at a fixed rate, through the gateway and through the Python client in turn."""
    count = round(_REQUESTS_PER_S * seconds)
    async with Producer(url, model=_MODEL, inbox=True) as producer:

        async def direct() -> float:
            began = time.perf_counter()  # uvloop's clock has whole milliseconds
            async with await producer.generate((1, 2, 3), max_tokens=1) as stream:
                await anext(stream)
            return time.perf_counter() - began

        free: list[StreamClient] = []  # connections stay open, as those of OpenAI's clients do

        async def through() -> float:
            if free:
                client = free.pop()
                client.ask_again()
            else:
                (client,) = await open_streams(gateway.port, _MODEL, 1, 1)
            await asyncio.wait_for(client.done.wait(), _PATIENCE_S)
            assert client.first_at is not None, "the gateway refused a request"
            free.append(client)
            return client.first_at - client.started_at

        await _at_rate(direct, 20)
        await _at_rate(through, 20)
        with calm_collector():  # what this process collects is no time of the gateway's
            plain = await _at_rate(direct, count)
            added = await _at_rate(through, count)
    for percent in (50, 99):
        base = 1000 * percentile(plain, percent)
        rounds.add(f"ttft_direct_ms_p{percent}", round(base, 2))
        found = 1000 * percentile(added, percent) - base
        rounds.add(f"ttft_added_ms_p{percent}", round(found, 2))


async def _at_rate(send: Callable[[], Coroutine[Any, Any, float]], count: int) -> list[float]:
    """Times of ``count`` requests, begun at the rate whether the earlier ones have ended or not."""
    begin = time.perf_counter()
    tasks: list[asyncio.Task[float]] = []
    for number in range(count):
        await asyncio.sleep(begin + number / _REQUESTS_PER_S - time.perf_counter())
        tasks.append(asyncio.create_task(send()))
    return list(await asyncio.gather(*tasks))


class _Held:
    """What a load of streams took.

    Attributes:
        complete: streams that got every token.
        tokens_per_s: of all together.
        cpu_us: of the gateway, per token.
        kb_per_stream: memory of the gateway for a stream on which nothing has come yet.
    """

    def __init__(
        self, complete: int, tokens_per_s: float, cpu_us: float, kb_per_stream: float
    ) -> None:
        self.complete = complete
        self.tokens_per_s = tokens_per_s
        self.cpu_us = cpu_us
        self.kb_per_stream = kb_per_stream


async def _streams(
    url: str, gateway: RunningGateway, streams: int, rate: float, seconds: float
) -> _Held:
    loop = asyncio.get_running_loop()
    model = f"bench-{secrets.token_hex(4)}"
    steps = max(1, round(rate * seconds / streams))
    load = {"streams": streams, "steps": steps, "rate": rate}
    clients: list[StreamClient] = []
    try:
        async with TokenWriter.start(url, model, **load) as writer:  # type: ignore[arg-type]
            await _wait_until_served(gateway.port, model)
            clients = await open_streams(gateway.port, model, 1, steps + 1)
            await asyncio.sleep(0.5)  # the first request opens the gateway's connections
            empty = gateway.memory_kb()
            clients += await open_streams(gateway.port, model, streams - 1, steps + 1)
            await _claimed(writer, streams)
            await asyncio.sleep(2.0)  # subscribed, and every log read
            idle = gateway.memory_kb()
            spent, began = process_s(gateway.pid), loop.time()
            await writer.write()
            taken = loop.time() - began
            for _ in range(int(_PATIENCE_S / 0.05)):
                if all(client.tokens >= steps for client in clients):
                    break
                await asyncio.sleep(0.05)
            spent = process_s(gateway.pid) - spent
    finally:
        for client in clients:
            client.close()
    tokens = sum(client.tokens for client in clients)
    return _Held(
        complete=sum(client.tokens == steps for client in clients),
        tokens_per_s=tokens / taken,
        cpu_us=1e6 * spent / max(1, tokens),
        kb_per_stream=(idle - empty) / (streams - 1),
    )


async def _wait_until_served(port: int, model: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(int(_PATIENCE_S / 0.05)):
            listed = (await client.get("/v1/models")).json()["data"]
            if any(found["id"] == model for found in listed):
                return
            await asyncio.sleep(0.05)
    raise PenstockError(f"the gateway did not learn of the writer within {_PATIENCE_S:g} s")


async def _claimed(writer: TokenWriter, streams: int) -> None:
    try:
        await asyncio.wait_for(writer.claimed(), _PATIENCE_S)
    except TimeoutError:
        message = f"{streams} streams did not reach the writer within {_PATIENCE_S:g} s"
        raise PenstockError(message) from None
