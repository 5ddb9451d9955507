"""A batch file by OpenAI's client, with people's chat beside it, and the same lines offline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.shared.errors import ConfigurationError, PenstockError
from penstock.shared.local.children import spawn_bound
from penstock.shared.local.embedded import EmbeddedRedis
from penstock.shared.settings import Settings, environment_name, load_settings

from ...report import Progress, Report
from ...rounds import Machine, Rounds, percentile
from ..engine.worker_process import worker_process
from ..gateway.gateway_process import start_gateway
from .load_options import BatchesOptions
from .offline_run import offline_seconds

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

__all__ = ["bench_batches"]

_MODEL = "bench"
_ENDPOINT: Final = "/v1/chat/completions"
_SEED = 7
_POLL_S = 0.25


def bench_batches(options: BatchesOptions, progress: Progress = lambda *_: None) -> Report:
    """Measure first tokens of chat with and without a batch beside it, and the batch's tokens.

    Raises:
        ConfigurationError: ``openai`` is not installed, or a setting is wrong.
        PenstockError: a process does not start, or the batch does not complete.
    """
    try:
        import openai as openai
    except ImportError as error:
        raise ConfigurationError(
            "bench batches sends its file with openai's client: pip install openai"
        ) from error
    rounds, machine = Rounds(), Machine()
    prompts, total = _prompts(options), options.lines * options.tokens
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        alone, beside = asyncio.run(_serve(options, prompts, Path(folder), rounds, progress))
    for name, waits in (("chat_alone", alone), ("chat_beside_batch", beside)):
        rounds.add(f"{name}.requests", len(waits))
        for percent in (50, 99):
            rounds.add(f"{name}.ttft_p{percent}_ms", round(1000 * percentile(waits, percent), 1))
    progress("offline", 0, 1)
    offline_s = offline_seconds(_settings(options), prompts, options.tokens)
    rounds.add("offline_tokens_per_s", round(total / offline_s, 1))
    share = rounds.median("batch_tokens_per_s") / (total / offline_s)
    rounds.add("batch_over_offline", round(share, 3))
    note = (
        f"{options.lines} lines of {options.words} words and {options.tokens} output tokens, "
        f"model {options.model}; chat: {options.chat_rate:g} requests/s of "
        f"{options.chat_tokens} tokens in lane normal"
    )
    return rounds.report("batches", machine, notes=[note])


def _settings(options: BatchesOptions, **more: str) -> Settings:
    flags = {
        "model.path": options.model,
        "queue.model": _MODEL,
        "engine.threads": options.threads,
        "worker.metrics_port": "off",
    }
    return load_settings({**flags, **{name.replace("__", "."): v for name, v in more.items()}})


async def _serve(
    options: BatchesOptions,
    prompts: Sequence[str],
    folder: Path,
    rounds: Rounds,
    progress: Progress,
) -> tuple[list[float], list[float]]:
    """Seconds to the first tokens of chat: without a batch, and while one ran."""
    import openai

    storage = {environment_name("batches.storage"): str(folder / "files")}
    async with (
        EmbeddedRedis(data_dir=folder / "redis") as server,
        worker_process(_settings(options, redis__url=server.url)),
        start_gateway(server.url, storage) as gateway,
        _driver(server.url, storage),
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{gateway.port}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        chat = _Chat(client, options)
        await chat.one(random.Random(0))  # the first of all meets what is not warm
        progress("chat alone", 0, options.chat_seconds)
        alone = await chat.run(asyncio.create_task(asyncio.sleep(options.chat_seconds)))
        running = asyncio.create_task(_batch(client, options, prompts, progress))
        beside = await chat.run(running)
        seconds, batch = await running
        usage = batch.usage
        assert usage is not None
        if usage.output_tokens != options.lines * options.tokens:
            raise PenstockError(f"the batch has {usage.output_tokens} output tokens")
        rounds.add("batch_seconds", round(seconds, 1))
        rounds.add("batch_lines_per_s", round(options.lines / seconds, 1))
        rounds.add("batch_tokens_per_s", round(usage.output_tokens / seconds, 1))
        return alone, beside


class _Chat:
    """People who chat: requests that come at random times, whatever becomes of the others."""

    def __init__(self, client: openai.AsyncOpenAI, options: BatchesOptions) -> None:
        self._client, self._options = client, options

    async def run(self, until: asyncio.Task[object]) -> list[float]:
        """Seconds to the first token of each request that was sent before the task's end."""
        draw, sent = random.Random(_SEED), []
        while not until.done():
            sent.append(asyncio.create_task(self.one(draw)))
            gap = draw.expovariate(self._options.chat_rate)
            await asyncio.wait((until,), timeout=gap)
        return list(await asyncio.gather(*sent))

    async def one(self, draw: random.Random) -> float:
        """Seconds to the first token of one request, which is read to its end."""
        prompt, first = _words(draw, self._options.words), None
        began = time.perf_counter()
        stream = await self._client.chat.completions.create(
            model=_MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=self._options.chat_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async for event in stream:
            if first is None and event.choices and event.choices[0].delta.content is not None:
                first = time.perf_counter() - began
        if first is None:
            raise PenstockError("a chat got no token")
        return first


async def _batch(
    client: openai.AsyncOpenAI,
    options: BatchesOptions,
    prompts: Sequence[str],
    progress: Progress,
) -> tuple[float, Batch]:
    """Send the file, start the batch, and wait for its end; seconds from the start to the end."""
    lines = "".join(json.dumps(_line(i, p, options)) + "\n" for i, p in enumerate(prompts))
    file = await client.files.create(file=("lines.jsonl", lines.encode()), purpose="batch")
    began = time.perf_counter()
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=_ENDPOINT, completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        await asyncio.sleep(_POLL_S)
        batch = await client.batches.retrieve(batch.id)
        done = batch.request_counts.completed if batch.request_counts else 0
        progress("lines", done, options.lines)
    seconds = time.perf_counter() - began
    counts = batch.request_counts
    if batch.status != "completed" or counts is None or counts.completed != options.lines:
        raise PenstockError(f"the batch ended {batch.status}: {counts}, {batch.errors}")
    return seconds, batch


def _line(number: int, prompt: str, options: BatchesOptions) -> dict[str, object]:
    body = {
        "model": _MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": options.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return {"custom_id": str(number), "method": "POST", "url": _ENDPOINT, "body": body}


@contextlib.asynccontextmanager
async def _driver(url: str, environment: dict[str, str]) -> AsyncIterator[None]:
    process = spawn_bound(
        [sys.executable, "-m", "penstock.producer.cli", "batches"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"REDIS_URL": url} | environment,
    )
    try:
        yield
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


def _prompts(options: BatchesOptions) -> list[str]:
    draw = random.Random(_SEED)
    return [_words(draw, options.words) for _ in range(options.lines)]


def _words(draw: random.Random, count: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=4)) for _ in range(count))
