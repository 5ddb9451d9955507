"""Options that change logits, through the whole engine: token for token as ``generate`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.oracle.generate_alone import generate_alone
from model.oracle.test_oracle import MODES, OUTPUT_TOKENS, PROMPTS, Expected, serve

from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.sampling_options import SamplingOptions

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "penalty": ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    "all": (
        {
            "repetition_penalty": 1.3,
            "logit_bias": {5: 0.3, 8: -2.0},
            "banned_token_ids": (9, 11),
            "min_tokens": OUTPUT_TOKENS,
        },
        {
            "repetition_penalty": 1.3,
            "sequence_bias": [[[5], 0.3], [[8], -2.0]],
            "bad_words_ids": [[9], [11]],
            "min_new_tokens": OUTPUT_TOKENS,
        },
    ),
}


@pytest.mark.parametrize("mode", ["chunks", "prefix-cache", "preempted", "resumed"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_generate(
    loaded: Callable[[str], LoadedModel], oracle: Callable[[str], Any], case: str, mode: str
) -> None:
    ours, theirs = CASES[case]
    expected, plain = generate(oracle("llama"), theirs), generate(oracle("llama"), {})
    assert expected != plain
    options = SamplingOptions(temperature=0.0, max_tokens=OUTPUT_TOKENS, **ours)
    found, stats = serve(loaded("llama"), MODES[mode], expected, options)
    assert found == expected
    if MODES[mode].starved:
        assert sum(stats.preemptions.values()) > 0


def generate(model: Any, options: dict[str, Any]) -> Expected:
    return {prompt: generate_alone(model, prompt, OUTPUT_TOKENS, **options) for prompt in PROMPTS}


@pytest.mark.parametrize("mode", ["chunks", "preempted", "resumed"])
def test_logprobs_are_those_of_the_models_own_logits(
    loaded: Callable[[str], LoadedModel], oracle: Callable[[str], Any], mode: str
) -> None:
    """Whatever was done to the logits before a token was chosen, and after preemptions."""
    expected = generate(oracle("llama"), CASES["all"][1])
    options = SamplingOptions(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, logprobs=3, **CASES["all"][0]
    )
    logprobs: dict[tuple[int, ...], list[TokenLogprobs]] = {}
    found, _ = serve(loaded("llama"), MODES[mode], expected, options, logprobs)
    assert found == expected
    for prompt in PROMPTS:
        output = expected[prompt][MODES[mode].resumed :]
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *expected[prompt]]])
            logits = oracle("llama")(input_ids=ids, use_cache=False).logits[0]
        rows = logits[-len(output) - 1 : -1].double().log_softmax(-1)
        assert len(logprobs[prompt]) == len(output)
        for token, row, reported in zip(output, rows, logprobs[prompt], strict=True):
            assert reported.logprob == pytest.approx(float(row[token]), abs=1e-4)
            values, likely = row.topk(3)
            assert [i for i, _ in reported.top] == likely.tolist()
            assert [v for _, v in reported.top] == pytest.approx(values.tolist(), abs=1e-4)
