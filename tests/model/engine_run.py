"""The engine over a real runner, driven to the end of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import (
    EngineRequest,
    Finish,
    Update,
)
from penstock.gpu_worker.engine_process.isolation import run_isolated
from penstock.gpu_worker.model.drafting.drafters import Drafter
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.structured.constraint_compiler import ConstraintCompiler
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane

__all__ = ["Answer", "Bench", "compiler_of"]


@dataclass
class Answer:
    """What came of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    updates: list[Update] = field(default_factory=list)


_COMPILERS: WeakKeyDictionary[LoadedModel, ConstraintCompiler] = WeakKeyDictionary()


def compiler_of(model: LoadedModel) -> ConstraintCompiler:
    """One for each model, since each has a process beside it."""
    if model not in _COMPILERS:
        _COMPILERS[model] = ConstraintCompiler(
            model.tokenizer, model.vocab_size, model.eos_token_ids
        )
    return _COMPILERS[model]


class Bench:
    """One model's runner and engines over it."""

    def __init__(
        self,
        model: LoadedModel,
        masks: Any = None,
        drafter: Drafter | None = None,
        rejection: bool = False,
        overlap: bool = False,
        **changes: Any,
    ) -> None:
        values: dict[str, Any] = {
            "block_size": 4,
            "num_blocks": 512,
            "max_batch_tokens": 128,
            "max_sequences": 64,
            "chunk_size": 64,
            "max_model_len": model.max_model_len,
            "eos_token_ids": model.eos_token_ids,
            "vocab_size": model.vocab_size,
        }
        self.model = model
        self.config = EngineConfig(**{**values, **changes})
        pool = KVPool(
            model.geometry, self.config.num_blocks, self.config.block_size, model.device,
            model.dtype,
        )  # fmt: skip
        self.runner = ModelRunner(model, pool, masks=masks, drafter=drafter, rejection=rejection)
        self.engine = Engine(
            self.config, lambda ids: IncrementalDetokenizer(self.model.tokenizer, ids)
        )
        self.compiler = compiler_of(model)
        self.deferrals = 0
        self.steps = 0
        self.overlap = overlap
        self.steps_ahead = 0
        self.steps_prepared = 0
        self._last: tuple[Plan, StepOutput] | None = None
        self.answers: dict[str, Answer] = {}

    def add(
        self,
        id: str,
        prompt: Iterable[int],
        *,
        seed: int = 0,
        lane: Lane = Lane.NORMAL,
        output_ids: Iterable[int] = (),
        wrap: Callable[[Any], object] = lambda follower: follower,
        **options: Any,
    ) -> None:
        """Let it wait. ``wrap`` may put a test double around what follows the output's form."""
        chosen = SamplingOptions(**options)
        compiled = self.compiler.compile(chosen)
        self.answers[id] = Answer()
        refused = self.engine.add(
            EngineRequest(
                id=id, lane=lane, tenant="t", prompt_ids=tuple(prompt), seed=seed, arrival=0.0,
                output_ids=tuple(output_ids), options=chosen,
                new_constraint=None if compiled is None else lambda: wrap(compiled()),
            )
        )  # fmt: skip
        if refused is not None:
            self._take([refused])

    def step(self) -> bool:
        ahead = None if self._last is None else self.engine.schedule_ahead(self._last[1])
        if ahead is not None:
            plan, output = ahead, self.runner.run(ahead, self._work_beside)
            self.steps_ahead += 1
        else:
            self._collect()
            planned = self.engine.schedule()
            if planned is None:
                return False
            plan, output = planned, run_isolated(self.runner, planned)
        self.steps += 1
        self.deferrals += len(output.deferred)
        self._last = plan, output
        if not self.overlap:
            self._collect()
        return True

    def _work_beside(self) -> None:
        """In every third step nothing is prepared, so that both ways follow on each other."""
        self._collect()
        if self.steps % 3 and (plan := self.engine.prepare_ahead()) is not None:
            self.runner.prepare(plan)
            self.steps_prepared += 1

    def _collect(self) -> None:
        if self._last is not None:
            (plan, output), self._last = self._last, None
            self._take(self.engine.collect(plan, output))
            self.engine.check_integrity()

    def run(self) -> dict[str, Answer]:
        while self.step():
            pass
        return self.answers

    def _take(self, updates: Iterable[Update]) -> None:
        for update in updates:
            answer = self.answers[update.id]
            assert answer.finish is None
            answer.token_ids += update.token_ids
            answer.text += update.text
            answer.finish = update.finish
            answer.updates.append(update)
