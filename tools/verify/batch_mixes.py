"""The model through the real engine and runner, in random chunkings and batch mixes."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import NO_BLOCK, KVCacheGroup, most_blocks_held
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest, Update
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.layer_groups import windows_of_groups
from penstock.gpu_worker.model.kv.swap_pool import SwapPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

__all__ = ["Memory", "Mix", "generate_mixed"]


@dataclass(slots=True)
class Mix:
    """What one round generated, and how mixed it was.

    Attributes:
        output_ids: of each prompt.
        problems: requests that ended otherwise than by length.
        steps: of the engine.
        mixed_steps: of these, steps with prefill chunks beside decodes.
        widest: sequences in one step, at most.
        preemptions: sequences that lost their blocks, and were swapped or computed again.
        swapped: KV blocks that came back from the host.
        pools: KV cache groups with a pool each.
        left_windows: steps in which a sequence had given up blocks that had left a window.
        prefix_hits: prompt tokens taken from the prefix cache.
        missing: what this round was for and did not do, in words; empty if nothing.
    """

    output_ids: list[list[int]]
    problems: list[str]
    steps: int = 0
    mixed_steps: int = 0
    widest: int = 0
    preemptions: int = 0
    swapped: int = 0
    pools: int = 1
    left_windows: int = 0
    prefix_hits: int = 0
    missing: list[str] = field(default_factory=list)


class Memory(enum.StrEnum):
    """How a round treats KV."""

    AMPLE = "ample"
    RECOMPUTE = "recompute"
    """So few blocks that sequences are preempted, and computed again."""
    SWAP = "swap"
    """The same, and what they had is copied to the host and back."""


def generate_mixed(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rng: random.Random,
    *,
    memory: Memory,
    by_window: bool,
    forced: bool,
    progress: Callable[[int], None],
) -> Mix:
    """Greedy continuations of all prompts, going on past EOS.

    Block size, chunk size, budgets, lanes and arrivals are drawn from ``rng``.

    Args:
        loaded: the model.
        prompts: token ids.
        max_tokens: output tokens of each.
        rng: what is drawn comes from here.
        memory: what becomes of the KV.
        by_window: layers that see equally far back have a pool of their own, as when serving.
        forced: where sequences are to be preempted, let one run at a time, and urgent ones come
            while it does.
        progress: told the number of new tokens after each step.
    """
    lengths = [len(prompt) + max_tokens for prompt in prompts]
    config = _draw_config(loaded, lengths, rng, memory, by_window=by_window)
    forced = forced and memory is not Memory.AMPLE
    if forced:
        config = replace(config, max_sequences=1)
    pool = KVPool(
        loaded.geometry, config.kv_cache_groups, config.block_size, loaded.device, loaded.dtype
    )
    host = [group.num_host_blocks for group in config.kv_cache_groups]
    runner = ModelRunner(loaded, pool, swap_pool=SwapPool(pool, host) if any(host) else None)
    engine = Engine(config, partial(IncrementalDetokenizer, loaded.tokenizer))
    mix = Mix([[] for _ in prompts], [])
    waiting = rng.sample(range(len(prompts)), len(prompts))
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or forced * mix.steps or rng.random() < 0.5):
            index = waiting.pop()
            lane = rng.choice(list(Lane))
            if forced:
                lane = Lane.CRITICAL if mix.steps else Lane.BATCH
            engine.add(_request(index, prompts[index], max_tokens, lane))
        plan = engine.schedule()
        if plan is None:
            continue
        decodes = sum(span.sequence.num_output_tokens > 0 for span in plan.spans)
        mix.steps += 1
        mix.mixed_steps += 0 < decodes < len(plan.spans)
        mix.widest = max(mix.widest, len(plan.spans))
        tables = (table for s in plan.spans for table in s.sequence.block_tables)
        mix.left_windows += any(NO_BLOCK in table for table in tables)
        updates = _run(engine, runner, plan)
        for update in updates:
            mix.output_ids[int(update.id)] += update.token_ids
            if update.finish is not None and update.finish.reason is not Reason.LENGTH:
                why = f"{update.finish.reason.value} {update.finish.message}".strip()
                mix.problems.append(f"prompt {int(update.id) + 1} ended early: {why}")
        progress(sum(len(update.token_ids) for update in updates))
    engine.check_integrity()
    stats = engine.stats()
    mix.preemptions = sum(stats.preemptions.values())
    mix.prefix_hits = stats.prefix_hit_tokens
    mix.swapped = stats.swapped_in_blocks
    mix.pools = len(config.kv_cache_groups)
    mix.missing = list(_missing(mix, config, memory, max(lengths)))
    return mix


def _run(engine: Engine, runner: ModelRunner, plan: Plan) -> list[Update]:
    try:
        output = runner.run(plan)
    except Exception as error:  # as in a worker: it is an answer, and a wrong one
        message = f"{type(error).__name__}: {error}"
        return engine.fail(plan, Reason.ENGINE_ERROR, message)
    return engine.collect(plan, output)


def _missing(mix: Mix, config: EngineConfig, memory: Memory, longest: int) -> Iterator[str]:
    """What a round was for and did not do."""
    long_enough = len(mix.output_ids) > 1 and len(mix.output_ids[0]) > 1
    if memory is not Memory.AMPLE and long_enough and not mix.preemptions:
        yield "no sequence was preempted"
    elif memory is Memory.SWAP and mix.preemptions and not mix.swapped:
        yield "no KV came back from the host"
    windows = [group.window for group in config.kv_cache_groups if group.window is not None]
    # Given up by whole blocks, when the next one is full.
    if windows and longest - min(windows) >= 2 * config.block_size and not mix.left_windows:
        yield "no block left a sliding window"


def _request(index: int, prompt: Sequence[int], max_tokens: int, lane: Lane) -> EngineRequest:
    return EngineRequest(
        id=str(index),
        lane=lane,
        tenant="verify",
        prompt_ids=tuple(prompt),
        options=SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seed=0,
        arrival=float(index),
    )


def _draw_config(
    loaded: LoadedModel,
    lengths: Sequence[int],
    rng: random.Random,
    memory: Memory,
    *,
    by_window: bool,
) -> EngineConfig:
    scarce, count = memory is not Memory.AMPLE, len(lengths)
    block_size, chunk_size = rng.choice((4, 8, 16)), rng.randint(3, 24)
    max_sequences = count if scarce else rng.randint(min(2, count), count)
    max_batch_tokens = max_sequences + rng.randint(8, 64)
    windows = windows_of_groups(loaded.geometry, loaded.max_model_len) if by_window else (None,)
    groups = []
    for window in windows:
        needed = sorted(-(-length // block_size) for length in lengths)
        if window is not None:
            held = most_blocks_held(window, min(chunk_size, max_batch_tokens), block_size)
            needed = [min(each, held) for each in needed]
        num_blocks = (max(needed[-1], sum(needed) // 3) if scarce else sum(needed)) + 1
        groups.append(KVCacheGroup(num_blocks, window, sum(needed) if memory is Memory.SWAP else 0))
    first, *more = groups
    return EngineConfig(
        block_size=block_size,
        num_blocks=first.num_blocks,
        window=first.window,
        num_host_blocks=first.num_host_blocks,
        more_kv_cache_groups=tuple(more),
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        chunk_size=chunk_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        # Else what was preempted is as a rule found in the cache, and hardly anything comes back.
        prefix_cache=memory is not Memory.SWAP,
        preemption="swap" if memory is Memory.SWAP else "recompute",
        watermark=0.0,
    )
