"""Log-probabilities of the prompt: those of a whole forward, however the prompt is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.engine_run import Answer, Bench
from model.families import VOCAB_SIZE, WINDOW

from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.shared.protocol.events import TokenLogprobs
from penstock.shared.protocol.states import Lane, Reason

Loaded = Callable[[str], LoadedModel]
Oracle = Callable[[str], Any]


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def reported(answer: Answer) -> tuple[TokenLogprobs | None, ...]:
    """Of the one update that has them, which is the first with a token."""
    first, *rest = [update for update in answer.updates if update.token_ids]
    assert not any(update.prompt_logprobs for update in rest)
    return first.prompt_logprobs


def check(oracle: Any, ids: list[int], report: tuple[TokenLogprobs | None, ...], k: int) -> None:
    """The figures are transformers' log_softmax of one forward of all the prompt."""
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    exact = logits.double().log_softmax(-1)
    assert len(report) == len(ids)
    assert report[0] is None
    for position, entry in enumerate(report[1:]):
        assert entry is not None
        row = exact[position]
        assert entry.logprob == pytest.approx(float(row[ids[position + 1]]), abs=2e-4)
        assert len(entry.top) == k
        for (token_id, value), likely in zip(entry.top, row.topk(k)[0], strict=True):
            assert value == pytest.approx(float(row[token_id]), abs=2e-4)
            assert value == pytest.approx(float(likely), abs=2e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mistral"])
@pytest.mark.parametrize("chunk_size", [3, 64])
def test_figures_are_those_of_a_whole_forward(
    family: str, chunk_size: int, loaded: Loaded, oracle: Oracle
) -> None:
    bench = Bench(loaded(family), chunk_size=chunk_size)
    lengths = {"a": 1, "b": 2, "c": 4, "d": 2 * WINDOW + 3}
    for k, (id, length) in enumerate(lengths.items()):
        bench.add(id, prompt(length, k), max_tokens=3, prompt_logprobs=k, seed=k, ignore_eos=True)
    bench.add("plain", prompt(9, 9), max_tokens=3, ignore_eos=True)
    answers = bench.run()
    for k, (id, length) in enumerate(lengths.items()):
        check(oracle(family), prompt(length, k), reported(answers[id]), k)
    assert reported(answers["plain"]) == ()


def test_output_is_that_of_a_request_without_a_report(loaded: Loaded) -> None:
    bench = Bench(loaded("llama"), chunk_size=5)
    for id, options in (("with", {"prompt_logprobs": 2}), ("without", {})):
        bench.add(id, prompt(23), seed=4, max_tokens=12, logprobs=1, **options)
    answers = bench.run()
    assert answers["with"].token_ids == answers["without"].token_ids
    assert [u.logprobs for u in answers["with"].updates] == [
        u.logprobs for u in answers["without"].updates
    ]


def test_what_is_cached_is_computed_for_its_logits(loaded: Loaded, oracle: Oracle) -> None:
    bench, ids = Bench(loaded("llama")), prompt(30)
    bench.add("first", ids, max_tokens=2, ignore_eos=True)
    bench.run()
    bench.add("hit", ids, max_tokens=2, ignore_eos=True)
    bench.add("report", ids, max_tokens=2, ignore_eos=True, prompt_logprobs=3)
    answers = bench.run()
    assert answers["hit"].updates[0].cached_tokens >= 24
    assert answers["report"].updates[0].cached_tokens == 0
    check(oracle("llama"), ids, reported(answers["report"]), 3)


def test_preempted_in_the_prompt_it_goes_on_where_it_was(loaded: Loaded, oracle: Oracle) -> None:
    for prefix_cache in (True, False):
        bench = Bench(
            loaded("llama"), num_blocks=14, chunk_size=4, max_sequences=4,
            prefix_cache=prefix_cache,
        )  # fmt: skip
        ids = prompt(40)
        bench.add("report", ids, lane=Lane.BATCH, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
        for _ in range(5):
            bench.step()
        bench.add("urgent", prompt(20, 1), lane=Lane.CRITICAL, max_tokens=5, ignore_eos=True)
        answers = bench.run()
        assert sum(bench.engine.stats().preemptions.values()) > 0
        check(oracle("llama"), ids, reported(answers["report"]), 2)


def test_who_continues_after_the_first_chunk_does_not_repeat_it(loaded: Loaded) -> None:
    bench, ids = Bench(loaded("llama")), prompt(12)
    bench.add("whole", ids, max_tokens=4, prompt_logprobs=1, ignore_eos=True)
    tokens = bench.run()["whole"].token_ids
    bench.add("rest", ids, max_tokens=4, prompt_logprobs=1, ignore_eos=True, output_ids=tokens[:1])
    rest = bench.run()["rest"]
    assert rest.token_ids == tokens[1:]
    assert reported(rest) == ()
    assert rest.updates[0].cached_tokens > 0


def test_of_several_choices_the_first_chunk_tells_it(loaded: Loaded, oracle: Oracle) -> None:
    bench, ids = Bench(loaded("llama"), chunk_size=5), prompt(18)
    bench.add("a", ids, n=3, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    check(oracle("llama"), ids, reported(bench.run()["a"]), 2)


def test_beside_a_form_whose_mask_is_late(loaded: Loaded, oracle: Oracle) -> None:
    bench, ids = Bench(loaded("llama")), prompt(10)
    bench.add("a", ids, max_tokens=4, prompt_logprobs=2, choice=["abc"])
    fill, calls = bench.runner._masks.join, []

    def late(asked: Any, *, others: bool) -> Any:
        masks = fill(asked, others=others)
        calls.append(masks)
        if len(calls) == 1:
            return type(masks)(masks.tensors, frozenset(of.row for of in asked))
        return masks

    bench.runner._masks.join = late  # type: ignore[method-assign]
    answer = bench.run()["a"]
    assert bench.deferrals == 1
    assert answer.text == "abc"
    check(oracle("llama"), ids, reported(answer), 2)


def test_a_report_that_would_be_too_large_is_refused(loaded: Loaded) -> None:
    bench = Bench(loaded("llama"), max_model_len=8000)
    bench.add("a", [5] * 4000, prompt_logprobs=20)
    finish = bench.answers["a"].finish
    assert finish is not None
    assert finish.reason is Reason.INVALID
    assert finish.message.startswith("prompt_logprobs: got 20; allowed: less, or a shorter prompt")


def test_beside_work_that_is_drafted(loaded: Loaded, oracle: Oracle) -> None:
    """Rows of drafts and of prompts in one step are each given to whom they belong."""
    repeating, ids = [7, 8, 9, 10] * 6, prompt(40)
    options: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    plain = Bench(loaded("llama"))
    plain.add("repeating", repeating, **options)
    expected = plain.run()["repeating"].token_ids
    bench = Bench(
        loaded("llama"), chunk_size=4, speculation=SpeculationConfig(ngram=True, length=3)
    )
    bench.add("repeating", repeating, **options)
    while len(bench.answers["repeating"].token_ids) < 20:
        bench.step()
    bench.add("report", ids, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    answers = bench.run()
    assert answers["repeating"].token_ids == expected
    assert any(len(update.token_ids) > 1 for update in answers["repeating"].updates)
    check(oracle("llama"), ids, reported(answers["report"]), 2)
