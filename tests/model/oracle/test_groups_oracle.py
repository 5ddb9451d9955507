"""Choices and beams on real models: what each would be alone, and what ``generate`` finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.families import VOCAB_SIZE

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.plan import Plan, Span
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

Loaded = Callable[[str], LoadedModel]
Oracle = Callable[[str], Any]
Choices = dict[str, list[tuple[int, ...]]]

BLOCK_SIZE = 4
OUTPUT_TOKENS = 12
FAMILIES = ("llama", "gemma2", "mistral", "gpt_oss", "deepseek_v3")
"""Plain; softcapped; with a window; with sinks and experts; with latent attention."""

DRAW = torch.Generator().manual_seed(3)
PROMPTS = [
    tuple(torch.randint(3, VOCAB_SIZE - 1, (size,), generator=DRAW).tolist()) for size in (1, 5, 23)
]


def serve(
    model: LoadedModel,
    requests: dict[str, tuple[tuple[int, ...], SamplingOptions]],
    *,
    num_blocks: int = 200,
    max_sequences: int = 16,
    prefix_cache: bool = True,
    chunk_size: int = 7,
) -> tuple[Choices, int]:
    """All requests at once; each one's choices, and how many preemptions it took."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_batch_tokens=64,
        max_sequences=max_sequences,
        chunk_size=chunk_size,
        max_model_len=model.max_model_len,
        eos_token_ids=model.eos_token_ids,
        vocab_size=model.vocab_size,
        prefix_cache=prefix_cache,
    )
    engine = Engine(config, lambda ids: IncrementalDetokenizer(model.tokenizer, ids))
    runner = ModelRunner(
        model, KVPool(model.geometry, num_blocks, BLOCK_SIZE, model.device, model.dtype)
    )
    ids: dict[str, dict[int, tuple[int, ...]]] = {id: {} for id in requests}
    reasons: dict[str, Reason] = {}
    for id, (prompt, options) in requests.items():
        refused = engine.add(
            EngineRequest(
                id=id,
                lane=Lane.NORMAL,
                tenant="t",
                prompt_ids=prompt,
                options=options,
                seed=options.seed or 0,
                arrival=0.0,
            )
        )
        assert refused is None, refused
    while (plan := engine.schedule()) is not None:
        for update in engine.collect(plan, runner.run(plan)):
            known = ids[update.id].setdefault(update.choice, ())
            assert update.start == len(known)
            ids[update.id][update.choice] = known + update.token_ids
            if update.finish is not None:
                reasons[update.id] = update.finish.reason
        engine.check_integrity()
    assert set(reasons.values()) <= {Reason.STOP, Reason.LENGTH}
    assert reasons.keys() == requests.keys()
    choices = {id: [found[c] for c in sorted(found)] for id, found in ids.items()}
    return choices, sum(engine.stats().preemptions.values())


def beams(**changes: Any) -> SamplingOptions:
    values = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "beam_width": 4, "n": 3}
    return SamplingOptions(**{**values, **changes})


def searched(
    model: Any, prompt: tuple[int, ...], options: SamplingOptions
) -> list[tuple[int, ...]]:
    """What transformers' beam search gives for the same options, padding taken off."""
    more: dict[str, Any] = {"eos_token_id": None} if options.ignore_eos else {}
    if options.stop_token_ids:
        more["eos_token_id"] = [VOCAB_SIZE - 1, *options.stop_token_ids]
    if options.repetition_penalty != 1:
        more["repetition_penalty"] = options.repetition_penalty
    if options.min_tokens:
        more["min_new_tokens"] = options.min_tokens
    if options.banned_token_ids:
        more["bad_words_ids"] = [[token_id] for token_id in options.banned_token_ids]
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=options.beam_width,
        num_return_sequences=options.n,
        length_penalty=options.length_penalty,
        early_stopping=options.early_stopping,
        max_new_tokens=options.max_tokens,
        pad_token_id=0,
        **more,
    )
    ends = {VOCAB_SIZE - 1, *options.stop_token_ids} if not options.ignore_eos else set()
    outputs = []
    for row in found[:, len(prompt) :].tolist():
        stop = next((i + 1 for i, token_id in enumerate(row) if token_id in ends), None)
        if stop is None:  # padded behind a full length: nothing ends with token 0 here
            stop = len(row)
        outputs.append(tuple(row[:stop]))
    return outputs


ENDS = tuple(range(20, 84))  # so that outputs end, and at different lengths
SEARCHES = {
    "plain": beams(),
    "long": beams(stop_token_ids=ENDS, length_penalty=3.0, early_stopping="never"),
    "short": beams(stop_token_ids=ENDS, length_penalty=-1.0),
    "early": beams(stop_token_ids=ENDS, early_stopping=True),
    "wide": beams(beam_width=7, n=7, stop_token_ids=ENDS[:3]),
}
ROOMY = {"num_blocks": 200}
STARVED = {"num_blocks": 64, "max_sequences": 8, "prefix_cache": False}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_beams_find_what_generate_finds(loaded: Loaded, oracle: Oracle, model_type: str) -> None:
    requests = {name: (PROMPTS[-1], options) for name, options in SEARCHES.items()}
    model = oracle(model_type)
    expected = {id: searched(model, *request) for id, request in requests.items()}
    found, _ = serve(loaded(model_type), requests, **ROOMY)
    assert found == expected
    found, preemptions = serve(loaded(model_type), requests, **STARVED)
    assert found == expected
    assert preemptions > 0
    lengths = {len(output) for outputs in expected.values() for output in outputs}
    assert len(lengths) > 1, "a search whose outputs all end at once proves little"


@pytest.mark.parametrize(
    "options",
    [
        beams(beam_width=2, n=1, ignore_eos=True),
        beams(repetition_penalty=1.7, stop_token_ids=ENDS[:10]),
        beams(min_tokens=6, stop_token_ids=ENDS, early_stopping=True),
        beams(banned_token_ids=tuple(range(100, 200)), max_tokens=1, n=4),
    ],
)
def test_beams_with_other_options(loaded: Loaded, oracle: Oracle, options: SamplingOptions) -> None:
    requests = {f"p{len(prompt)}": (prompt, options) for prompt in PROMPTS}
    found, _ = serve(loaded("llama"), requests)
    assert found == {id: searched(oracle("llama"), *request) for id, request in requests.items()}


def alone(
    model: LoadedModel, prompt: tuple[int, ...], options: SamplingOptions, choice: int
) -> list[int]:
    """A sequence of that choice, by itself and without an engine."""
    seq = Sequence(
        id="x", prompt_ids=prompt, options=options, seed=options.seed or 0, choice=choice
    )
    seq.block_tables = (list(range(-(-(len(prompt) + OUTPUT_TOKENS) // BLOCK_SIZE))),)
    pool = KVPool(model.geometry, len(seq.block_tables[0]), BLOCK_SIZE, model.device, model.dtype)
    runner = ModelRunner(model, pool)
    while seq.num_output_tokens < OUTPUT_TOKENS:
        start = seq.num_computed_tokens
        plan = Plan((Span(seq, start, seq.num_tokens - start, True),))
        ((token_id,),) = runner.run(plan).token_ids
        seq.num_computed_tokens = seq.num_tokens
        seq.token_ids.append(token_id)
    return seq.output_ids


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_choices_are_what_they_would_be_alone(loaded: Loaded, model_type: str) -> None:
    model = loaded(model_type)
    options = {
        "drawn": SamplingOptions(n=3, max_tokens=OUTPUT_TOKENS, seed=5, ignore_eos=True),
        "greedy": SamplingOptions(n=2, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True),
        "one": SamplingOptions(n=1, max_tokens=OUTPUT_TOKENS, seed=5, ignore_eos=True),
        "narrow": SamplingOptions(
            n=5, max_tokens=OUTPUT_TOKENS, seed=9, top_k=40, presence_penalty=1.0, ignore_eos=True
        ),
    }
    prompts = PROMPTS[::2]
    requests = {f"{name}-{len(p)}": (p, o) for p in prompts for name, o in options.items()}
    expected = {
        id: [tuple(alone(model, prompt, option, choice)) for choice in range(option.n)]
        for id, (prompt, option) in requests.items()
    }
    for mode in (ROOMY, {"max_sequences": 2}, {"num_blocks": 30, "prefix_cache": False}):
        found, preemptions = serve(model, requests, **mode)
        assert found == expected
        assert bool(preemptions) == ("prefix_cache" in mode)
    for prompt in prompts:
        assert len(set(expected[f"drawn-{len(prompt)}"])) == 3
        assert len(set(expected[f"greedy-{len(prompt)}"])) == 1
