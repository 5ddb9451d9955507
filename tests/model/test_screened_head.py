"""Greedy outputs are the same whether all logits are computed or the largest found by a screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model.engine_run import Bench
from model.families import save_family
from transformers import AutoModelForCausalLM

from penstock.gpu_worker.engine.speculation.speculation_config import SpeculationConfig
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model

WIDE = 5000
PROMPTS = [[(7 * i + n) % WIDE for i in range(9 + n)] for n in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("llama", tmp_path_factory.mktemp("wide"), vocab_size=WIDE)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, folder: Path) -> LoadedModel:
    loaded = load_model(folder, device="cpu", dtype=request.param, native="on")
    assert loaded.native is not None
    if not loaded.native.program.has_screen:
        pytest.skip("no screen on this CPU")
    return loaded


def served(model: LoadedModel, *extra: dict[str, Any], **options: Any) -> tuple[list[Any], bool]:
    """What greedy requests get beside these others, and whether a step was screened."""
    assert model.native is not None
    model.native.take_times()
    bench = Bench(model, overlap=True)
    greedy = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True, **options}
    for number, prompt in enumerate(PROMPTS):
        bench.add(str(number), prompt, **greedy)
    for number, other in enumerate(extra):
        bench.add(f"other {number}", PROMPTS[0], **{**greedy, "max_tokens": 50, **other})
    answers = bench.run()
    mine = [answers[str(number)] for number in range(len(PROMPTS))]
    assert all(len(answer.token_ids) == 30 for answer in mine)
    return [answer.token_ids for answer in mine], model.native.take_times()["screen"] > 0


OTHERS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0},
    "reported": {"logprobs": 2},
    "penalised": {"frequency_penalty": 0.5},
    "of a prompt": {"prompt_logprobs": 1, "max_tokens": 1},
}


def test_outputs_are_those_beside_requests_that_need_all_logits(model: LoadedModel) -> None:
    alone, screened = served(model)
    assert screened
    for name, other in OTHERS.items():
        found, screened = served(model, other)
        assert found == alone
        # It alone has more tokens than the others, or ends before them.
        assert screened is (name == "of a prompt")


def test_outputs_are_those_of_requests_that_need_all_logits(model: LoadedModel) -> None:
    found, screened = served(model, logprobs=1)
    assert not screened
    assert found == served(model)[0]


def test_drafts_are_verified_by_a_screen(model: LoadedModel) -> None:
    """A token that repeats itself is drafted and accepted."""
    config = SpeculationConfig(ngram=True, draft=False, length=4)
    found = []
    for bench in (Bench(model, speculation=config), Bench(model)):
        prompt = PROMPTS[0] * 4
        bench.add("one", prompt, temperature=0.0, max_tokens=60, ignore_eos=True)
        found.append(bench.run()["one"].token_ids)
    assert found[0] == found[1]


def test_outputs_are_those_of_transformers(folder: Path) -> None:
    model = load_model(folder, device="cpu", dtype="float32", native="on")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found, _ = served(model)
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30,
            min_new_tokens=30, pad_token_id=0,
        )  # fmt: skip
        assert expected[0, len(prompt) :].tolist() == tokens


def test_a_row_without_numbers_fails_alone(folder: Path) -> None:
    model = load_model(folder, device="cpu", dtype="float32", native="on")
    with torch.no_grad():  # the program keeps this very tensor
        model.model.get_input_embeddings().weight[4321] = torch.nan
    bench = Bench(model)
    for number, prompt in enumerate([[5, 4321, 7], *PROMPTS]):
        bench.add(str(number), prompt, temperature=0.0, max_tokens=5, ignore_eos=True)
    answers = bench.run()
    assert [len(answers[str(n)].token_ids) for n in range(5)] == [0, 5, 5, 5, 5]
    finish = answers["0"].finish
    assert finish is not None
    assert "no numbers" in (finish.message or "")
