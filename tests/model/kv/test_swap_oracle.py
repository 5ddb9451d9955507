"""Swapped KV against ``generate``: chosen by cost, in steps that fail, of requests that move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from model.oracle.generate_alone import generate_alone
from model.oracle.test_oracle import (
    BLOCK_SIZE,
    GREEDY,
    OUTPUT_TOKENS,
    PROMPTS,
    Expected,
    Loaded,
    Oracle,
)

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionMode
from penstock.gpu_worker.engine_process.isolation import run_isolated
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.swap_pool import SwapPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.states import Lane, Reason

FAMILIES = ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"]
"""Plain, windows in all layers, windows in some, sinks, and MLA's sizes."""


NUM_BLOCKS = 14
"""For the longest of the requests and little else."""


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> Callable[[str], Expected]:
    """What ``generate`` puts out for each prompt alone."""
    made: dict[str, Expected] = {}

    def get(model_type: str) -> Expected:
        if model_type not in made:
            model = oracle(model_type)
            made[model_type] = {
                prompt: generate_alone(model, prompt, OUTPUT_TOKENS) for prompt in PROMPTS
            }
        return made[model_type]

    return get


class Serving:
    """One prompt after the other, each as urgent as the last or more, in a pool for a few."""

    def __init__(self, model: LoadedModel, *, preemption: str, num_host_blocks: int = 99) -> None:
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_batch_tokens=64,
            max_sequences=6,
            chunk_size=6,
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            prefix_cache=False,
            preemption=preemption,  # type: ignore[arg-type]
            num_host_blocks=num_host_blocks,
        )
        self.engine = Engine(config, lambda ids: IncrementalDetokenizer(model.tokenizer, ids))
        pool = KVPool(model.geometry, NUM_BLOCKS, BLOCK_SIZE, model.device, model.dtype)
        self.runner = ModelRunner(model, pool, swap_pool=SwapPool(pool, [num_host_blocks]))
        self.outputs: list[list[int]] = [[] for _ in PROMPTS]
        self.plans: list[Plan] = []
        self.ended: dict[str, Reason] = {}
        self.waiting = list(range(len(PROMPTS)))

    def add(self, index: int) -> None:
        request = EngineRequest(
            id=f"{index}",
            lane=(Lane.BATCH, Lane.NORMAL, Lane.CRITICAL)[index // 2],
            tenant="t",
            prompt_ids=PROMPTS[index],
            output_ids=tuple(self.outputs[index]),
            options=GREEDY,
            seed=0,
            arrival=0.0,
        )
        assert self.engine.add(request) is None

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.engine.has_work

    def step(self, run: Callable[[Plan], StepOutput]) -> Plan:
        if (self.waiting and len(self.plans) % 4 == 0) or not self.engine.has_work:
            self.add(self.waiting.pop(0))
        plan = self.engine.schedule()
        assert plan is not None
        for update in self.engine.collect(plan, run(plan)):
            self.outputs[int(update.id)] += update.token_ids
            if update.finish is not None:
                self.ended[update.id] = update.finish.reason
        self.engine.check_integrity()
        self.plans.append(plan)
        return plan

    def found(self) -> Expected:
        assert set(self.ended.values()) <= {Reason.STOP, Reason.LENGTH}, self.ended
        assert self.engine.stats().used_host_blocks == 0
        return {prompt: tuple(out) for prompt, out in zip(PROMPTS, self.outputs, strict=True)}

    def modes(self) -> set[PreemptionMode]:
        return {mode for _, _, mode in self.engine.stats().preemptions}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_auto_where_both_are_chosen(
    loaded: Loaded, expected: Callable[[str], Expected], model_type: str
) -> None:
    serving = Serving(loaded(model_type), preemption="auto")
    while serving.has_work:
        # Copies that seem to take a second each: the first shows it, then work is done again.
        plan = serving.step(lambda plan: replace(serving.runner.run(plan), swap_s=moved(plan)))
        serving.engine.observe(plan, 0.001 + 1e-4 * plan.num_tokens + moved(plan))
    assert serving.found() == expected(model_type)
    assert serving.modes() == set(PreemptionMode)


def moved(plan: Plan) -> float:
    return float(len(plan.swaps_out) + len(plan.swaps_in))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_host_memory_for_one_of_several(
    loaded: Loaded, expected: Callable[[str], Expected], model_type: str
) -> None:
    serving = Serving(loaded(model_type), preemption="swap", num_host_blocks=8)
    while serving.has_work:
        serving.step(serving.runner.run)
    assert serving.found() == expected(model_type)
    assert serving.engine.stats().swap_refusals > 0
    assert serving.modes() == set(PreemptionMode)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_step_that_swaps_fails_once_after_its_copies(
    loaded: Loaded, expected: Callable[[str], Expected], model_type: str
) -> None:
    serving = Serving(loaded(model_type), preemption="swap")

    class Failing:
        failures = 0

        def run(self, plan: Plan) -> StepOutput:
            output = serving.runner.run(plan)
            if (plan.swaps_out or plan.swaps_in) and len(plan.spans) > 1:
                self.failures += 1
                raise RuntimeError("injected")
            return output

        def recover(self) -> None:
            serving.runner.recover()

    failing = Failing()
    while serving.has_work:
        serving.step(lambda plan: run_isolated(failing, plan))
    assert serving.found() == expected(model_type)
    assert failing.failures > 0


def test_what_is_swapped_can_go_on_elsewhere(
    loaded: Loaded, expected: Callable[[str], Expected]
) -> None:
    """Aborted while on the host, and continued from its tokens, as after a drain or a crash."""
    serving, moves = Serving(loaded("llama"), preemption="swap"), 0
    while serving.has_work:
        before = {span.sequence for span in serving.plans[-1].spans} if serving.plans else set()
        plan = serving.step(serving.runner.run)
        gone = before - {span.sequence for span in plan.spans}
        for sequence in gone if plan.swaps_out else ():
            if sequence.host_blocks:
                assert serving.engine.abort(sequence.id)
                assert not sequence.host_blocks
                serving.add(int(sequence.id))
                moves += 1
    assert serving.found() == expected("llama")
    assert moves > 0
