"""Token for token what transformers' ``generate`` gives, whatever the batching.

The oracle runs each prompt alone: eager attention, float32, its own cache. Here all run together
through the real engine, cut into chunks, sharing cached prefixes, losing and recomputing their KV.
Tokens alone would hide errors that do not happen to flip an argmax, so logits are compared too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from model.families import SUPPORTED, VOCAB_SIZE, WINDOW
from model.oracle.generate_alone import generate_alone

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup
from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionCause, PreemptionMode
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.stats import EngineStats
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.layer_groups import windows_of_groups
from penstock.gpu_worker.model.kv.swap_pool import SwapPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

Loaded = Callable[[str], LoadedModel]
Oracle = Callable[[str], Any]

BLOCK_SIZE = 4
OUTPUT_TOKENS = 12
RELATIVE_LOGITS = 1e-4


def _prompts() -> list[tuple[int, ...]]:
    draw = random.Random(5)
    ids = [draw.randrange(3, VOCAB_SIZE - 1) for _ in range(60)]
    return [
        (7,),
        tuple(ids[:5]),
        # A long common begin, past the window, so that the prefix cache has something to give.
        tuple(ids[:33]),
        (*ids[:21], 11, 12, 13),
        (*ids[:32], 99),
        tuple(draw.randrange(3, VOCAB_SIZE - 1) for _ in range(2 * WINDOW + 3)),
    ]


PROMPTS = _prompts()


@dataclass(frozen=True)
class Mode:
    """How the engine is made to run.

    Attributes:
        chunk_size: most prefill tokens of one sequence in a step.
        prefix_cache: whether blocks of equal prefixes are reused.
        num_blocks: of the pool; few of them force preemption.
        max_sequences: most sequences that run together.
        resumed: output tokens that another worker is taken to have published of each request.
        num_host_blocks: for what is preempted; 0 has it recomputed.
    """

    chunk_size: int
    prefix_cache: bool
    num_blocks: int = 200
    max_sequences: int = 6
    resumed: int = 0
    num_host_blocks: int = 0

    @property
    def starved(self) -> bool:
        return self.num_blocks < 50


MODES = {
    "whole": Mode(chunk_size=64, prefix_cache=False),
    "chunks": Mode(chunk_size=5, prefix_cache=False),
    "token-by-token": Mode(chunk_size=1, prefix_cache=True),
    "prefix-cache": Mode(chunk_size=7, prefix_cache=True, max_sequences=2),
    "preempted": Mode(chunk_size=6, prefix_cache=False, num_blocks=18),
    "preempted-cached": Mode(chunk_size=6, prefix_cache=True, num_blocks=18),
    "swapped": Mode(chunk_size=6, prefix_cache=False, num_blocks=18, num_host_blocks=99),
    "swapped-cached": Mode(chunk_size=6, prefix_cache=True, num_blocks=18, num_host_blocks=99),
    "one-at-a-time": Mode(chunk_size=64, prefix_cache=True, max_sequences=1),
    "resumed": Mode(chunk_size=5, prefix_cache=True, resumed=4),
}

Expected = dict[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(scope="session")
def generated(oracle: Oracle) -> Callable[[str], Expected]:
    """Per family and prompt what ``generate`` puts out, its end-of-text token included."""
    made: dict[str, Expected] = {}

    def get(model_type: str) -> Expected:
        if model_type not in made:
            model = oracle(model_type)
            made[model_type] = {
                prompt: generate_alone(model, prompt, OUTPUT_TOKENS) for prompt in PROMPTS
            }
        return made[model_type]

    return get


GREEDY = SamplingOptions(temperature=0.0, max_tokens=OUTPUT_TOKENS)


def serve(
    model: LoadedModel,
    mode: Mode,
    expected: Expected,
    options: SamplingOptions = GREEDY,
    logprobs: dict[tuple[int, ...], list[TokenLogprobs]] | None = None,
) -> tuple[Expected, EngineStats]:
    """All prompts through the engine at once, arriving in pairs while others run.

    ``logprobs`` takes those that were reported.
    """
    windows = windows_of_groups(model.geometry, model.max_model_len)
    # Where all layers have a window, it takes fewer blocks to be short of them.
    num_blocks = mode.num_blocks if windows[0] is None else mode.num_blocks * 5 // 9
    first, *more = (KVCacheGroup(num_blocks, window, mode.num_host_blocks) for window in windows)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=first.num_blocks,
        window=first.window,
        more_kv_cache_groups=tuple(more),
        max_batch_tokens=64,
        max_sequences=mode.max_sequences,
        chunk_size=mode.chunk_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        prefix_cache=mode.prefix_cache,
        preemption="swap" if mode.num_host_blocks else "recompute",
        num_host_blocks=first.num_host_blocks,
    )
    engine = Engine(config, lambda ids: IncrementalDetokenizer(model.tokenizer, ids))
    pool = KVPool(model.geometry, config.kv_cache_groups, BLOCK_SIZE, model.device, model.dtype)
    num_host_blocks = [group.num_host_blocks for group in config.kv_cache_groups]
    host = SwapPool(pool, num_host_blocks) if mode.num_host_blocks else None
    runner = ModelRunner(model, pool, swap_pool=host)
    outputs = {f"r{i}": list(expected[prompt][: mode.resumed]) for i, prompt in enumerate(PROMPTS)}
    arrivals = iter(enumerate(PROMPTS))
    lanes = itertools.cycle(Lane)
    ended: dict[str, Reason] = {}
    while len(ended) < len(PROMPTS):
        for index, prompt in itertools.islice(arrivals, 2):
            refused = engine.add(
                EngineRequest(
                    id=f"r{index}",
                    lane=next(lanes),
                    tenant="t",
                    prompt_ids=prompt,
                    output_ids=tuple(outputs[f"r{index}"]),
                    options=options,
                    seed=0,
                    arrival=float(index),
                )
            )
            if refused is not None:
                assert refused.finish is not None
                ended[refused.id] = refused.finish.reason
        plan = engine.schedule()
        if plan is None:
            continue
        for update in engine.collect(plan, runner.run(plan)):
            assert update.start == len(outputs[update.id])
            outputs[update.id] += update.token_ids
            if logprobs is not None:
                logprobs.setdefault(PROMPTS[int(update.id[1:])], []).extend(update.logprobs)
            if update.finish is not None:
                ended[update.id] = update.finish.reason
        engine.check_integrity()
    assert set(ended.values()) <= {Reason.STOP, Reason.LENGTH}, ended
    return {prompt: tuple(outputs[f"r{i}"]) for i, prompt in enumerate(PROMPTS)}, engine.stats()


ALL_MODES = ("llama", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")
"""Families that run in every mode; the others run in two, and ``make oracle`` runs all."""
TWO_MODES = ("chunks", "swapped-cached")


@pytest.mark.parametrize(
    ("model_type", "mode"),
    [
        pytest.param(
            model_type,
            mode,
            marks=() if model_type in ALL_MODES or mode in TWO_MODES else pytest.mark.slow,
        )
        for model_type, mode in itertools.product(SUPPORTED, MODES)
    ],
)
def test_tokens_are_those_of_generate(
    loaded: Loaded, generated: Callable[[str], Expected], model_type: str, mode: str
) -> None:
    expected = generated(model_type)
    found, stats = serve(loaded(model_type), MODES[mode], expected)
    assert found == expected
    # The mode did happen: an oracle that tests an easier case proves nothing.
    short_of_kv = {k: n for k, n in stats.preemptions.items() if k[1] is not PreemptionCause.URGENT}
    assert bool(short_of_kv) == MODES[mode].starved
    swapped = {k for k in stats.preemptions if k[2] is PreemptionMode.SWAP}
    assert bool(swapped) == bool(MODES[mode].num_host_blocks)
    if MODES[mode].num_host_blocks:
        assert swapped == stats.preemptions.keys()
        assert stats.swapped_in_blocks > 0 or MODES[mode].prefix_cache
    if mode in ("prefix-cache", "one-at-a-time"):
        assert stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("mode", ["chunks", "swapped-cached"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere2"])
def test_torch_gives_the_same_where_the_native_library_is_not(
    loaded_by_torch: Loaded, generated: Callable[[str], Expected], model_type: str, mode: str
) -> None:
    expected = generated(model_type)
    assert serve(loaded_by_torch(model_type), MODES[mode], expected)[0] == expected


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_logits_are_the_models_own_in_any_chunking(
    loaded: Loaded, oracle: Oracle, model_type: str
) -> None:
    model = loaded(model_type)
    pool = KVPool(model.geometry, 120, BLOCK_SIZE, model.device, model.dtype)
    runner = ModelRunner(model, pool)
    draw = random.Random(model_type)
    free = draw.sample(range(120), 120)
    sequences = []
    for index, prompt in enumerate(PROMPTS):
        sequence = Sequence(
            id=str(index), prompt_ids=prompt, options=SamplingOptions(temperature=0.0)
        )
        sequence.block_tables = ([free.pop() for _ in range(-(-len(prompt) // BLOCK_SIZE))],)
        sequences.append(sequence)
    rows: dict[str, list[torch.Tensor]] = {sequence.id: [] for sequence in sequences}
    computed = {sequence.id: 0 for sequence in sequences}
    while waiting := [s for s in sequences if computed[s.id] < s.num_tokens]:
        chosen = draw.sample(waiting, draw.randint(1, len(waiting)))
        spans = []
        for sequence in chosen:
            start = computed[sequence.id]
            left = sequence.num_tokens - start
            size = draw.choice([1, min(3, left), draw.randint(1, left)])
            spans.append(Span(sequence, start, size, start + size == sequence.num_tokens))
            computed[sequence.id] += size
        logits = runner.logits(spans).split([span.num_tokens for span in spans])
        for span, part in zip(spans, logits, strict=True):
            rows[span.sequence.id].append(part)
    for sequence in sequences:
        with torch.inference_mode():
            ids = torch.tensor([sequence.token_ids])
            expected = oracle(model_type)(input_ids=ids, use_cache=False).logits[0]
        found = torch.cat(rows[sequence.id])
        assert found.shape == expected.shape
        difference = (found - expected).abs().max() / expected.abs().max()
        assert float(difference) <= RELATIVE_LOGITS
