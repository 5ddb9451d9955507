"""``penstock bench serve``: an open-loop load on a running deployment, and what its clients saw."""

from __future__ import annotations

import asyncio
import time

from penstock.shared.errors import PenstockError

from ...report import Report
from ...rounds import Machine, Progress, Rounds
from ..options import ServeOptions
from .load_clients import LoadClient, open_client
from .load_plan import LoadRequest, plan_load
from .request_record import RequestRecord, read_goals, summarise

__all__ = ["bench_serve"]


def bench_serve(options: ServeOptions, progress: Progress = lambda *_: None) -> Report:
    """Send the load and report throughput, latencies and, with goals, the share that met them.

    Requests are sent when the plan says so, however many wait: a deployment that is too slow shows
    it in its latencies. Only ``max_concurrency`` holds requests back.

    Raises:
        ConfigurationError: options or trace cannot be used.
        PenstockError: the deployment cannot be reached, or no request completed.
    """
    goals, load = read_goals(options.goodput), plan_load(options)
    rounds, machine = Rounds(), Machine()
    records, duration_s = asyncio.run(_send(options, load, progress))
    if all(record.error for record in records):
        raise PenstockError(f"no request completed; the first: {records[0].error}")
    for name, value in summarise(records, duration_s, goals).items():
        rounds.add(name, value)
    if options.plot is not None:
        from .latency_plot import plot_latencies

        plot_latencies(records, options.plot)
    rate = "all at once" if options.request_rate is None else f"{options.request_rate:g} requests/s"
    where = "through Redis" if options.url is None else f"at {options.url}"
    notes = [f"{len(load)} requests, {rate}, burstiness {options.burstiness:g}, {where}"]
    notes += sorted({f"a request failed: {record.error}" for record in records if record.error})[:3]
    return rounds.report("serve", machine, at_most=[("failed", 0)], notes=notes)


async def _send(
    options: ServeOptions, load: list[LoadRequest], progress: Progress
) -> tuple[list[RequestRecord], float]:
    limit = options.max_concurrency
    places = asyncio.Semaphore(len(load) if limit is None else limit)
    done = 0

    async def one(client: LoadClient, request: LoadRequest, began: float) -> RequestRecord:
        nonlocal done
        await asyncio.sleep(max(0.0, began + request.arrival_s - time.perf_counter()))
        async with places:
            record = RequestRecord(time.perf_counter())
            try:
                await client.run(request, record)
                if not record.chunks:
                    record.error = "it ended without a token"
            except Exception as error:  # a load goes on whatever one request meets
                record.error = f"{type(error).__name__}: {error}"
        done += 1
        progress("requests", done, len(load))
        return record

    async with open_client(options) as client:
        warm_up = RequestRecord(time.perf_counter())
        await client.run(LoadRequest(load[0].prompt, 1, 0.0), warm_up)
        began = time.perf_counter()
        records = await asyncio.gather(*(one(client, request, began) for request in load))
        return records, time.perf_counter() - began
