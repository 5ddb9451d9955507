"""Outputs many windows long, token for token those of ``generate``, in pools of a few windows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model.families import VOCAB_SIZE, WINDOW, others_slow
from model.oracle.generate_alone import generate_alone

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup, most_blocks_held
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.stats import EngineStats
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.layer_groups import (
    groups_in_budget,
    groups_of_layers,
    windows_of_groups,
)
from penstock.gpu_worker.model.loading.geometry import KVGeometry, LayerGeometry
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

BLOCK_SIZE = 4
CHUNK = 6
TOKENS = 60
"""Output tokens: with them a sequence is five to eight windows long."""
MOST = most_blocks_held(WINDOW, CHUNK, BLOCK_SIZE)
FAMILIES = ("mistral", "gemma2", "gemma3_text", "gemma3n_text", "gpt_oss")
SOME = ("mistral", "gemma3_text", "gpt_oss")

Loaded = Callable[[str], LoadedModel]
Oracle = Callable[[str], Any]
Outputs = dict[tuple[int, ...], tuple[int, ...]]


def _prompts() -> list[tuple[int, ...]]:
    draw = random.Random(11)
    ids = [draw.randrange(3, VOCAB_SIZE - 1) for _ in range(40)]
    return [tuple(ids[:3]), tuple(ids), (*ids[:34], 7, 8), (*ids[:21], 99)]


PROMPTS = _prompts()


@dataclass
class Served:
    """What an engine gave, and how many blocks it held at most in the pools with a window."""

    outputs: Outputs
    most_used: int
    stats: EngineStats


@pytest.fixture(scope="module")
def generated(oracle: Oracle) -> Callable[[str], Outputs]:
    made: dict[str, Outputs] = {}

    def get(model_type: str) -> Outputs:
        if model_type not in made:
            model = oracle(model_type)
            made[model_type] = {
                prompt: generate_alone(model, prompt, TOKENS, min_new_tokens=TOKENS)
                for prompt in PROMPTS
            }
        return made[model_type]

    return get


def serve(
    model: LoadedModel,
    windowed: int,
    *,
    full: int = 200,
    prefix_cache: bool = False,
    max_sequences: int = 4,
    rounds: int = 1,
) -> list[Served]:
    """Serve all prompts together, ``rounds`` times by the same engine.

    Args:
        model: with sliding windows.
        windowed: blocks of each pool with a window.
        full: blocks of the pool without, if there is one.
        prefix_cache: see ``EngineConfig``.
        max_sequences: see ``EngineConfig``.
        rounds: how often.
    """
    windows = windows_of_groups(model.geometry, model.max_model_len)
    first, *more = (KVCacheGroup(windowed if window else full, window) for window in windows)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=first.num_blocks,
        window=first.window,
        more_kv_cache_groups=tuple(more),
        max_batch_tokens=24,
        max_sequences=max_sequences,
        chunk_size=CHUNK,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        prefix_cache=prefix_cache,
        watermark=0.0,
    )
    engine = Engine(config, lambda ids: IncrementalDetokenizer(model.tokenizer, ids))
    pool = KVPool(model.geometry, config.kv_cache_groups, BLOCK_SIZE, model.device, model.dtype)
    for layer in pool.layers:  # what was never written must not be read
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    runner = ModelRunner(model, pool)
    served = []
    for _ in range(rounds):
        outputs, most = {prompt: list[int]() for prompt in PROMPTS}, 0
        for index, prompt in enumerate(PROMPTS):
            request = EngineRequest(
                id=str(index),
                lane=Lane.NORMAL,
                tenant="t",
                prompt_ids=prompt,
                options=SamplingOptions(temperature=0.0, max_tokens=TOKENS, min_tokens=TOKENS),
                seed=0,
                arrival=0.0,
            )
            assert engine.add(request) is None
        while plan := engine.schedule():
            for update in engine.collect(plan, runner.run(plan)):
                outputs[PROMPTS[int(update.id)]] += update.token_ids
                assert update.finish is None or update.finish.reason is Reason.LENGTH
            engine.check_integrity()
            used = [p.used_blocks for p in engine.stats().pools if p.window is not None]
            most = max(most, *used)
        found = {prompt: tuple(ids) for prompt, ids in outputs.items()}
        served.append(Served(found, most, engine.stats()))
    return served


def without_freeing() -> int:
    """Blocks that all sequences would hold together if none were given up."""
    return sum(-(-(len(prompt) + TOKENS) // BLOCK_SIZE) for prompt in PROMPTS)


@pytest.mark.parametrize("model_type", others_slow(FAMILIES, SOME))
def test_blocks_that_left_the_window_are_used_again(
    loaded: Loaded, generated: Callable[[str], Outputs], model_type: str
) -> None:
    (served,) = serve(loaded(model_type), windowed=len(PROMPTS) * MOST)
    assert served.outputs == generated(model_type)
    assert served.most_used <= len(PROMPTS) * MOST == 24
    assert without_freeing() == 86
    assert not served.stats.preemptions


@pytest.mark.parametrize("model_type", SOME)
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_in_a_pool_below_two_windows(
    loaded: Loaded, generated: Callable[[str], Outputs], model_type: str, prefix_cache: bool
) -> None:
    (served,) = serve(loaded(model_type), windowed=MOST + 1, prefix_cache=prefix_cache)
    assert served.outputs == generated(model_type)
    assert served.stats.preemptions


@pytest.mark.parametrize("model_type", SOME)
def test_prefixes_are_hit_behind_a_window(
    loaded: Loaded, generated: Callable[[str], Outputs], model_type: str
) -> None:
    """One after the other, twice: a hit of 32 tokens needs the last 12 of them, and no more."""
    first, second = serve(
        loaded(model_type), windowed=100, prefix_cache=True, max_sequences=1, rounds=2
    )
    assert first.outputs == second.outputs == generated(model_type)
    # The second prompt gives the third 32 tokens, and the last one 20.
    assert first.stats.prefix_hit_tokens == 32 + 20
    assert second.stats.prefix_hit_tokens > first.stats.prefix_hit_tokens + 32 + 20


@pytest.mark.parametrize("model_type", SOME)
def test_eviction_under_pressure(
    loaded: Loaded, generated: Callable[[str], Outputs], model_type: str
) -> None:
    served = serve(
        loaded(model_type), windowed=13, full=28, prefix_cache=True, max_sequences=2, rounds=2
    )
    for one in served:
        assert one.outputs == generated(model_type)
    assert served[-1].stats.evictions > 50
    assert served[-1].stats.prefix_hit_tokens > 0


# --- which layer belongs to which group, and how many blocks a group gets

FULL = LayerGeometry(num_query_heads=4, num_kv_heads=2, key_dim=8, value_dim=8)
NARROW = LayerGeometry(num_query_heads=4, num_kv_heads=2, key_dim=8, value_dim=8, window=64)


def shared(layer: LayerGeometry, source: int) -> LayerGeometry:
    return LayerGeometry(4, 2, 8, 8, window=layer.window, shares=source)


@pytest.mark.parametrize(
    ("layers", "context", "windows", "groups"),
    [
        ((FULL, FULL), 512, (None,), (0, 0)),
        ((NARROW, NARROW), 512, (64,), (0, 0)),
        ((NARROW, FULL), 512, (None, 64), (1, 0)),
        ((NARROW, FULL), 64, (None,), (0, 0)),  # a window of the whole context is none
        # What two layers read is kept for the one that sees further back.
        ((NARROW, shared(FULL, 0)), 512, (None,), (0, 0)),
        ((FULL, NARROW, shared(NARROW, 0), shared(NARROW, 1)), 512, (None, 64), (0, 1, 0, 1)),
    ],
)
def test_kinds_of_layers(
    layers: tuple[LayerGeometry, ...],
    context: int,
    windows: tuple[int | None, ...],
    groups: tuple[int, ...],
) -> None:
    geometry = KVGeometry(layers)
    assert windows_of_groups(geometry, context) == windows
    found = tuple(KVCacheGroup(1, window) for window in windows)
    assert groups_of_layers(geometry, found) == groups


def test_a_layer_that_no_kind_keeps_enough_for() -> None:
    with pytest.raises(ValueError, match=r"as wide as layer 1"):
        groups_of_layers(KVGeometry((NARROW, FULL)), [KVCacheGroup(1, 64)])


def limits(max_sequences: int = 8, max_model_len: int = 2048) -> EngineConfig:
    return EngineConfig(
        block_size=16,
        num_blocks=1,
        max_batch_tokens=64,
        max_sequences=max_sequences,
        chunk_size=64,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(),
    )


BLOCK = 16 * 2 * 16 * 4
"""Bytes of a block in one layer."""


def split(
    layers: tuple[LayerGeometry, ...],
    budget: int,
    *,
    use_all: bool,
    draft: KVGeometry | None = None,
) -> list[int]:
    groups = groups_in_budget(
        KVGeometry(layers), torch.float32, budget, limits(), use_all=use_all, draft=draft
    )
    return [group.num_blocks for group in groups]


def test_a_budget_is_split_between_the_kinds() -> None:
    hybrid = (NARROW, NARROW, NARROW, FULL)
    needed = 8 * most_blocks_held(64, 64, 16)
    assert needed == 80
    # Enough for every window: the rest is for the layer that keeps everything.
    assert split(hybrid, 1000 * BLOCK, use_all=True) == [1000 - 3 * 80, 80]
    # A draft model of two layers lies beside that one, and so in as many blocks.
    draft = KVGeometry((FULL, NARROW))
    assert split(hybrid, 1000 * BLOCK, use_all=True, draft=draft) == [(1000 - 3 * 80) // 3, 80]
    # In blocks of all four layers the same memory would hold 250.
    assert split((FULL,) * 4, 1000 * BLOCK, use_all=True) == [250]
    # Less than that: all groups alike.
    assert split(hybrid, 100 * BLOCK, use_all=True) == [25, 25]
    # No more than a full batch of whole contexts can hold, unless the memory was asked for.
    assert split(hybrid, 10_000 * BLOCK, use_all=False) == [8 * 128, 80]
    assert split(hybrid, 10_000 * BLOCK, use_all=True) == [10_000 - 240, 80]
    assert split((NARROW,) * 2, 1000 * BLOCK, use_all=False) == [80]
    assert split((NARROW,) * 2, 1000 * BLOCK, use_all=True) == [500]


def test_bytes_of_a_pool_of_two_kinds(loaded: Loaded) -> None:
    model = loaded("gemma2")
    pool = KVPool(
        model.geometry,
        (KVCacheGroup(5), KVCacheGroup(3, WINDOW)),
        BLOCK_SIZE,
        model.device,
        model.dtype,
    )
    assert [layer.key.shape[0] for layer in pool.layers] == [3, 5, 3]
    tensors = [tensor for layer in pool.layers for tensor in (layer.key, layer.value)]
    assert pool.num_bytes == sum(tensor.nbytes for tensor in tensors)
