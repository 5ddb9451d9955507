"""Small fleets for tests of the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.shared.protocol.states import Lane
from penstock.tools.simulate import (
    ConstantCost,
    Dispatch,
    Generator,
    Lengths,
    Scenario,
    ServiceLevel,
    SimRequest,
)

LEVEL = ServiceLevel(ttft_s=1.0, itl_s=0.05)


def engine(**values: Any) -> EngineConfig:
    """Small, with room for everything unless the test says otherwise."""
    defaults = {
        "block_size": 16, "num_blocks": 4096, "max_batch_tokens": 1024, "max_sequences": 16,
        "chunk_size": 1024, "max_model_len": 8192, "eos_token_ids": frozenset(),
        "prefix_cache": False,
    }  # fmt: skip
    return EngineConfig(**{**defaults, **values})


def drawn(count: int, rate: float, **values: Any) -> Generator:
    """Requests in all lanes, of two tenants, with heavy tails."""
    defaults = {
        "prompt": Lengths("lognormal:60:1:max=900"), "output": Lengths("lognormal:12:1:max=200"),
        "lanes": {Lane.CRITICAL: 1, Lane.NORMAL: 4, Lane.BATCH: 1}, "tenants": {"a": 1, "b": 2},
    }  # fmt: skip
    return Generator(count=count, rate=rate, **{**defaults, **values})


def scenario(requests: Iterable[SimRequest], **values: Any) -> Scenario:
    """Four workers that pull, with steps of 10 ms."""
    defaults = {
        "name": "test", "workers": 4, "dispatch": Dispatch.PULL, "config": engine(),
        "cost": ConstantCost(0.01), "level": LEVEL,
    }  # fmt: skip
    return Scenario(requests=requests, **{**defaults, **values})


def fixed(arrival: float, prompt: int = 10, output: int = 5, **values: Any) -> SimRequest:
    """One request."""
    defaults = {
        "id": f"at{arrival}", "max_tokens": output, "lane": Lane.NORMAL, "tenant": "a",
    }  # fmt: skip
    return SimRequest(
        arrival=arrival, prompt_len=prompt, output_len=output, **{**defaults, **values}
    )
