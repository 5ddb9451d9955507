"""An engine, and a model side that meets a request it cannot compute."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.plan import Plan
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine_process.synthetic_model import SyntheticRunner, build_synthetic
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane
from penstock.shared.settings import Settings

POISON = 666


class PoisonedRunner(SyntheticRunner):
    """Raises whenever a step contains the poisoned prompt, like a kernel that meets bad data."""

    def __init__(self, error: Exception) -> None:
        super().__init__(0.0)
        self.error = error
        self.steps = 0

    def run(self, plan: Plan, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        self.steps += 1
        if any(POISON in span.sequence.token_ids for span in plan.spans):
            raise self.error
        return super().run(plan, meanwhile)


CONFIG = EngineConfig(
    block_size=16,
    num_blocks=64,
    max_batch_tokens=64,
    max_sequences=8,
    chunk_size=64,
    max_model_len=256,
    eos_token_ids=frozenset(),
)


def make_engine() -> Engine:
    return Engine(CONFIG, build_synthetic(Settings()).new_text_stream)


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 5) -> EngineRequest:
    return EngineRequest(
        id=name,
        lane=Lane.NORMAL,
        tenant="t",
        prompt_ids=prompt,
        options=SamplingOptions(max_tokens=max_tokens),
        seed=1,
        arrival=0.0,
    )
