"""A step that gets no memory is retried smaller, and in the end costs one request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from faults.rig import mutated
from workers import WorkerFactory

from penstock.producer import Producer, Reason, Result
from penstock.shared.local.embedded import EmbeddedRedis

FORWARD = "        step = self._packer.pack(plan"
MOST = 48
"""Tokens for whose forward there is memory."""

LONGEST = 75
"""Positions to which there is memory to attend."""

ALLOCATION = f"""\
        if plan.num_tokens > {MOST} or any(
            span.start + span.num_tokens > {LONGEST} for span in plan.spans
        ):
            torch.empty(1 << 50)  # more than any machine gives: torch's own allocation failure
"""


async def submit(producer: Producer, prompts: Sequence[list[int]]) -> list[str]:
    options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    made = [await producer.submit(ids, **options) for ids in prompts]
    return [submitted.id for submitted in made]


async def ends(producer: Producer, ids: Sequence[str]) -> list[Result]:
    waits = (producer.result(request_id, timeout=90, check=False) for request_id in ids)
    return list(await asyncio.gather(*waits))


async def test_the_batch_is_split_and_the_one_that_does_not_fit_alone_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real worker, in steps that also swap: copies are made once, whatever is retried."""
    draw = random.Random(3)
    prompts = [[draw.randrange(300, 900) for _ in range(30)] for _ in range(6)]
    large = [draw.randrange(300, 900) for _ in range(LONGEST + 3)]
    monkeypatch.setenv("PYTHONPATH", mutated(
        tmp_path, "gpu_worker/model/runner.py", FORWARD, ALLOCATION + FORWARD
    ))  # fmt: skip
    with EmbeddedRedis() as server:
        factory = WorkerFactory(server.url, tmp_path)
        try:
            async with Producer(server.url) as producer:
                # Submitted before there is a worker, so that it begins with all of them.
                ids = await submit(producer, [*prompts[:3], large, *prompts[3:]])
                worker = factory.engine(
                    "small", engine__kv_memory="1800KiB", engine__preemption="swap",
                    engine__prefix_cache=False, engine__chunking="fixed",
                )  # fmt: skip
                found = await ends(producer, ids)
                assert found.pop(3).reason is Reason.OUT_OF_MEMORY
                assert {result.reason for result in found} == {Reason.LENGTH}
                assert worker.metric("step_failures_total") == 1
                assert worker.metric("swapped_blocks_total") > 0
                # What each gives alone, which needs no more memory than there is.
                for prompt, result in zip(prompts, found, strict=True):
                    (alone,) = await ends(producer, await submit(producer, [prompt]))
                    assert alone.token_ids == result.token_ids
        finally:
            factory.close()
