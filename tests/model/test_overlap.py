"""Steps that are planned ahead give what steps in turn give."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from model.engine_run import Bench

from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.model.forward.step_packer import StepPacker
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.shared.protocol.states import Reason

Load = Callable[[str], LoadedModel]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """One of them computes while the other does something else, where the library computes."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def served(model: LoadedModel, stop: tuple[str, ...], *, overlap: bool) -> tuple[Any, Bench]:
    """What requests of all kinds get, some of which come while others run."""
    bench = Bench(model, overlap=overlap, block_size=4)
    words: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0, "max_tokens": 40},
        "sampled": {"temperature": 0.9, "top_p": 0.95, "max_tokens": 37},
        "penalised": {
            "temperature": 0.7, "presence_penalty": 0.8, "repetition_penalty": 1.2,
            "logprobs": 3, "max_tokens": 21,
        },
        "stopped": {"temperature": 0.8, "stop": stop, "max_tokens": 60},
        "late": {"temperature": 0.0, "max_tokens": 9, "min_tokens": 4},
        "chosen": {"temperature": 0.5, "choice": ("a", "bb"), "max_tokens": 12},
    }  # fmt: skip
    for number, (name, options) in enumerate(words.items()):
        bench.add(name, [3 + number, 5, 8, 2 + number], seed=number, **options)
        for _ in range(number):
            bench.step()
    answers = bench.run()
    return {name: (a.token_ids, a.text, a.finish) for name, a in answers.items()}, bench


def logprobs(bench: Bench) -> list[float]:
    return [row.logprob for update in bench.answers["penalised"].updates for row in update.logprobs]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("way", ["native", "torch"])
def test_requests_get_the_same(
    request: pytest.FixtureRequest, loaded: Load, loaded_by_torch: Load, family: str, way: str
) -> None:
    if way == "native":
        request.getfixturevalue("two_threads")
    model = (loaded if way == "native" else loaded_by_torch)(family)
    assert (model.native is not None) is (way == "native")
    assert model.overlaps is (way == "native")
    _, alone = served(model, (), overlap=False)
    text = alone.answers["stopped"].text
    stop = (text[len(text) // 2 :][:2],)
    in_turn, before = served(model, stop, overlap=False)
    assert before.steps_ahead == 0
    ahead, bench = served(model, stop, overlap=True)
    assert bench.steps_ahead > 20
    assert bench.steps_prepared > 10
    assert ahead == in_turn
    assert len(ahead["stopped"][0]) < 60
    # Torch's sums depend on the rows beside, the library's do not.
    tolerance = 0.0 if way == "native" else 1e-4
    assert logprobs(bench) == pytest.approx(logprobs(before), abs=tolerance, rel=0)


@pytest.mark.usefixtures("two_threads")
def test_a_full_engine_plans_ahead_while_others_wait(loaded: Load) -> None:
    """Each that ends makes room for the next; greedy and sampled ones follow each other."""

    def answers(*, overlap: bool) -> tuple[Any, Bench]:
        bench = Bench(loaded("llama"), overlap=overlap, max_sequences=2, block_size=4)
        for number in range(6):
            bench.add(
                f"r{number}", [3 + number, 5, 8], seed=number, max_tokens=8 + 5 * number,
                temperature=0.8 * (number % 2),
            )  # fmt: skip
        return {id: (a.token_ids, a.finish) for id, a in bench.run().items()}, bench

    in_turn, _ = answers(overlap=False)
    ahead, bench = answers(overlap=True)
    assert ahead == in_turn
    assert bench.steps_ahead > bench.steps / 2
    assert bench.steps_prepared > bench.steps / 4


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_no_numbers_in_a_prepared_step_end_one_request(
    loaded: Load, monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    model = loaded("llama")
    alone = Bench(model)
    alone.add("b", [4, 5, 8], temperature=0.0, max_tokens=20)
    bench, calls = Bench(model, overlap=True), itertools.count()
    for name, first in (("a", 3), ("b", 4)):
        bench.add(name, [first, 5, 8], temperature=0.0, max_tokens=20)
    assert model.native is not None
    lists = model.native.largest_as_lists

    def broken(logits: torch.Tensor) -> tuple[list[float], list[int]]:
        values, places = lists(logits)
        return ([number, *values[1:]] if next(calls) == 7 else values), places

    monkeypatch.setattr(model.native, "largest_as_lists", broken)
    answers = bench.run()
    assert bench.steps_prepared > 4
    finish = answers["a"].finish
    assert finish is not None
    assert finish.reason is Reason.ENGINE_ERROR
    assert len(answers["a"].token_ids) == 7
    assert answers["b"].token_ids == alone.run()["b"].token_ids


@pytest.mark.usefixtures("two_threads")
def test_what_was_prepared_is_for_its_own_plan(loaded: Load) -> None:
    bench = Bench(loaded("llama"))
    bench.add("r", [3, 5, 8], temperature=0.0, max_tokens=8)
    engine, packer = bench.engine, StepPacker(bench.runner.pool)
    first = engine.schedule()
    assert first is not None
    prepared = engine.prepare_ahead()
    assert prepared is not None
    packer.prepare(prepared, bench.model.prepare)
    with pytest.raises(ValueError, match="0 numbers in the place of 1"):
        packer.take(prepared)  # it has no tokens yet
    assert packer.take(prepared) is None  # only once
    packer.prepare(prepared, bench.model.prepare)
    assert packer.take(replace(first, token_ids=(7,))) is None
    packer.prepare(prepared, bench.model.prepare)
    taken = packer.take(Plan(prepared.spans, token_ids=(7,)))
    assert taken is not None
    assert taken.step.input_ids.tolist() == [[7]]


@pytest.mark.usefixtures("two_threads")
def test_what_is_done_meanwhile_may_raise(loaded: Load) -> None:
    """The step ends all the same: the next one finds threads and buffers free."""
    bench = Bench(loaded("llama"))
    bench.add("r", [3, 5, 8], temperature=0.0, max_tokens=8)
    plan = bench.engine.schedule()
    assert plan is not None

    def fail() -> None:
        raise KeyError("meanwhile")

    with pytest.raises(KeyError, match="meanwhile"):
        bench.runner.run(plan, fail)
    first = bench.runner.run(plan)
    assert bench.runner.run(plan, lambda: None).token_ids == first.token_ids
