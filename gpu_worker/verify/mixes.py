"""The model through the real engine and runner, in random chunkings and batch mixes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.shared.protocol import Lane, Reason, SamplingOptions

from ..engine import Engine, EngineConfig, EngineRequest
from ..model.detokenizer import IncrementalDetokenizer
from ..model.kv_pool import KVPool
from ..model.loader import LoadedModel
from ..model.runner import ModelRunner

__all__ = ["Mix", "generate_mixed"]


@dataclass(slots=True)
class Mix:
    """What one round generated, and how mixed it was.

    Attributes:
        output_ids: of each prompt.
        problems: requests that ended otherwise than by length.
        steps: of the engine.
        mixed_steps: of these, steps with prefill chunks beside decodes.
        widest: sequences in one step, at most.
        preemptions: sequences that lost their blocks and were computed again.
        prefix_hits: prompt tokens taken from the prefix cache.
    """

    output_ids: list[list[int]]
    problems: list[str]
    steps: int = 0
    mixed_steps: int = 0
    widest: int = 0
    preemptions: int = 0
    prefix_hits: int = 0


def generate_mixed(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rng: random.Random,
    *,
    scarce: bool,
    progress: Callable[[int], None],
) -> Mix:
    """Greedy continuations of all prompts, going on past EOS.

    Block size, chunk size, budgets, lanes and arrivals are drawn from ``rng``.

    Args:
        loaded: the model.
        prompts: token ids.
        max_tokens: output tokens of each.
        rng: what is drawn comes from here.
        scarce: give so few KV blocks that sequences must be preempted.
        progress: told the number of new tokens after each step.
    """
    config = _draw_config(loaded, prompts, max_tokens, rng, scarce=scarce)
    pool = KVPool(
        loaded.geometry, config.num_blocks, config.block_size, loaded.device, loaded.dtype
    )
    runner = ModelRunner(loaded, pool)
    engine = Engine(config, partial(IncrementalDetokenizer, loaded.tokenizer))
    mix = Mix([[] for _ in prompts], [])
    waiting = rng.sample(range(len(prompts)), len(prompts))
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.5):
            index = waiting.pop()
            engine.add(_request(index, prompts[index], max_tokens, rng))
        plan = engine.schedule()
        if plan is None:
            continue
        decodes = sum(span.sequence.num_output_tokens > 0 for span in plan.spans)
        mix.steps += 1
        mix.mixed_steps += 0 < decodes < len(plan.spans)
        mix.widest = max(mix.widest, len(plan.spans))
        updates = engine.collect(plan, runner.run(plan))
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
    return mix


def _request(
    index: int, prompt: Sequence[int], max_tokens: int, rng: random.Random
) -> EngineRequest:
    return EngineRequest(
        id=str(index),
        lane=rng.choice(list(Lane)),
        tenant="verify",
        prompt_ids=tuple(prompt),
        options=SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        seed=0,
        arrival=float(index),
    )


def _draw_config(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    rng: random.Random,
    *,
    scarce: bool,
) -> EngineConfig:
    block_size = rng.choice((4, 8, 16))
    needed = sorted(-(-(len(prompt) + max_tokens) // block_size) for prompt in prompts)
    max_sequences = len(prompts) if scarce else rng.randint(min(2, len(prompts)), len(prompts))
    return EngineConfig(
        block_size=block_size,
        num_blocks=max(needed[-1], sum(needed) // 3) + 1 if scarce else sum(needed) + 1,
        max_batch_tokens=max_sequences + rng.randint(8, 64),
        max_sequences=max_sequences,
        chunk_size=rng.randint(3, 24),
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        prefix_cache=True,
        watermark=0.0,
    )
