"""Chunks by measured cost: bounds, the fit, and what it does for streams in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
from engine.fakes import FakeRunner, PieceStream, config, request
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepTiming
from penstock.gpu_worker.engine.plan import Plan, Span
from penstock.gpu_worker.engine.scheduling.adaptive_chunks import AdaptiveChunks
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.engine.stats import EngineStats
from penstock.shared.errors import ConfigurationError
from penstock.shared.protocol.sampling_options import SamplingOptions

LEAST, MOST = 16, 2048


@dataclass
class Device:
    """A machine whose steps cost what the model says, with noise and now and then a pause.

    The costs of ``base``, of a token and of a sequence are in seconds; ``per_pair`` makes a token
    dearer with its position, as attention does.
    """

    base: float = 0.004
    per_token: float = 2e-4
    per_sequence: float = 5e-4
    per_pair: float = 2e-8
    noise: float = 0.1
    pauses: float = 0.002
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def seconds(self, tokens: int, sequences: int, position: int = 0) -> float:
        busy = self.base + self.per_token * tokens + self.per_sequence * sequences
        busy += self.per_pair * tokens * position
        busy *= max(0.1, self.rng.gauss(1, self.noise))
        return 5 * busy if self.rng.random() < self.pauses else busy

    def run(self, plan: Plan) -> float:
        tokens = plan.num_tokens - len(plan.spans)
        return self.seconds(tokens, len(plan.spans), max(span.start for span in plan.spans))


def test_the_fit_finds_what_steps_cost() -> None:
    device = Device(per_pair=0.0, noise=0.05)
    chunks = AdaptiveChunks(0.03, LEAST, MOST)
    for _ in range(600):
        tokens, sequences = device.rng.choice([0, 0, 30, 60, 120]), device.rng.randint(1, 32)
        chunks.learn(tokens, sequences, device.seconds(tokens, sequences))
    for tokens, sequences in ((0, 16), (0, 1), (100, 16), (60, 30)):
        wanted = 0.004 + 2e-4 * tokens + 5e-4 * sequences
        assert chunks.predict(tokens, sequences) == pytest.approx(wanted, abs=0.05 * 0.03)


def test_drafts_are_taken_neither_for_prompt_tokens_nor_for_sequences() -> None:
    """Half of the steps verify drafts, which cost three times what a prompt token does."""
    device, per_draft = Device(per_pair=0.0, noise=0.05), 6e-4
    chunks = AdaptiveChunks(0.03, LEAST, MOST)
    for _ in range(600):
        tokens, sequences = device.rng.choice([0, 0, 30, 60, 120]), device.rng.randint(1, 32)
        drafts = device.rng.choice([0, 1, 2, 4]) * sequences
        seconds = device.seconds(tokens, sequences) + per_draft * drafts
        spans = [_decoding(drafts // sequences) for _ in range(sequences)]
        if tokens:
            spans[0] = Span(spans[0].sequence, 0, tokens + 1, False)
            drafts -= drafts // sequences
            seconds = device.seconds(tokens, sequences) + per_draft * drafts
        chunks.observe(Plan(tuple(spans)), seconds)
    assert chunks.token_seconds == pytest.approx(2e-4, rel=0.15)
    for tokens, sequences, drafts in ((0, 16, 0), (100, 16, 0), (0, 16, 64), (60, 30, 30)):
        wanted = 0.004 + 2e-4 * tokens + 5e-4 * sequences + per_draft * drafts
        assert chunks.predict(tokens, sequences, drafts) == pytest.approx(wanted, rel=0.08)


def _decoding(num_drafts: int) -> Span:
    sequence = Sequence(id="s", prompt_ids=(1, 2, 3), options=SamplingOptions())
    return Span(sequence, 2, 1, True, (4,) * num_drafts, num_drafts)


def test_the_draft_models_time_is_no_prompts() -> None:
    """A step in which drafts were proposed for a second: the next chunk is as large as without."""
    limits = []
    for draft_seconds in (0.0, 1.0):
        cfg = config(chunking=Chunking.ADAPTIVE, target_itl_s=0.03, min_chunk_size=4)
        engine = Engine(cfg, PieceStream)
        engine.add(request("a", (1, 2, 3), max_tokens=30))
        engine.add(request("long", (1,) * 40, max_tokens=2))
        runner, sizes = FakeRunner(cfg.block_size), []
        while plan := engine.schedule():
            timing = StepTiming(0.02 + draft_seconds, draft_seconds)
            engine.collect(plan, replace(runner.run(plan), timing=timing))
            engine.observe(plan, 0.02 + draft_seconds)
            sizes.append(plan.num_tokens)
        limits.append(sizes)
    assert limits[0] == limits[1]


def test_hours_of_decoding_do_not_wipe_out_what_a_prompt_token_costs() -> None:
    device = Device(per_pair=0.0, noise=0.05)
    chunks = AdaptiveChunks(0.03, LEAST, MOST)
    for _ in range(200):
        tokens = device.rng.choice([0, 50, 100])
        chunks.learn(tokens, 16, device.seconds(tokens, 16))
    before = chunks.predict(100, 16)
    for _ in range(50_000):
        chunks.learn(0, 16, device.seconds(0, 16))
    assert chunks.predict(100, 16) == pytest.approx(before, rel=0.25)


def test_one_pause_is_no_news_and_a_change_that_stays_is() -> None:
    chunks = AdaptiveChunks(0.03, LEAST, MOST)
    device = Device(per_pair=0.0, noise=0.02, pauses=0.0)
    for _ in range(100):
        chunks.learn(50, 16, device.seconds(50, 16))
    before = chunks.predict(50, 16)
    chunks.learn(50, 16, 3.0)
    assert chunks.predict(50, 16) < 1.15 * before
    for _ in range(30):
        chunks.learn(50, 16, 2 * before)
    assert chunks.predict(50, 16) == pytest.approx(2 * before, rel=0.1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_limits_hold_whatever_is_measured(data: st.DataObject) -> None:
    least = data.draw(st.integers(1, 64))
    most = data.draw(st.integers(least, 4096))
    chunks = AdaptiveChunks(data.draw(st.floats(1e-4, 10)), least, most)
    measured = st.tuples(
        st.integers(0, 4096), st.integers(1, 1024), st.floats(1e-9, 1e4, allow_subnormal=False)
    )
    for tokens, sequences, seconds in data.draw(st.lists(measured, max_size=60)):
        chunks.learn(tokens, sequences, seconds)
        assert all(cost >= 0 and math.isfinite(cost) for cost in chunks._fit.costs)
        limits = []
        for decoding in (1, 8, 64, 512):
            chunks._decoding = decoding
            limits.append(chunks.limit(1024))
        assert least <= limits[-1]
        assert limits[0] <= most
        assert limits == sorted(limits, reverse=True), "more decodes leave more for prompts"
        assert chunks.limit(0) == most, "nobody waits for a token"


def test_no_chunk_is_more_than_twice_what_was_measured() -> None:
    chunks = AdaptiveChunks(1.0, LEAST, MOST)
    chunks._decoding = 4
    seen = []
    for _ in range(10):
        seen.append(chunks.limit(4))
        chunks.learn(seen[-1], 5, 0.001)
    assert seen[:4] == [2 * LEAST, 4 * LEAST, 8 * LEAST, 16 * LEAST]
    assert seen[-1] == MOST


# -- streams in virtual time ---------------------------------------------------------------------

STREAMS = 16
TARGET_S = 0.03


def streaming(chunking: Chunking, device: Device, prompts: int = 1) -> list[float]:
    """Gaps between tokens of 16 streams from the arrival of prompts of 4,000 tokens on."""
    cfg = config(
        block_size=16, num_blocks=2048, max_batch_tokens=9000, max_sequences=64,
        chunk_size=MOST if chunking is Chunking.ADAPTIVE else 9000,
        max_model_len=8192, prefix_cache=False, chunking=chunking, target_itl_s=TARGET_S,
    )  # fmt: skip
    engine, runner = Engine(cfg, PieceStream), _Silent()
    for index in range(STREAMS):
        engine.add(request(f"s{index}", [1] * 20, max_tokens=5000))
    for _ in range(100):
        _step(engine, runner, device)
    for index in range(prompts):
        engine.add(request(f"long{index}", [2] * 4000, max_tokens=1))
    gaps: list[float] = []
    while _num_live(engine.stats()) > STREAMS:
        gaps += [_step(engine, runner, device)] * STREAMS
    for _ in range(64):
        gaps += [_step(engine, runner, device)] * STREAMS
    return gaps


def _num_live(stats: EngineStats) -> int:
    return sum(stats.running.values()) + sum(stats.waiting.values())


class _Silent(FakeRunner):
    """Samples without a memory: these sequences are long."""

    def __init__(self) -> None:
        super().__init__(16)

    def run(self, plan: Plan):  # type: ignore[no-untyped-def]
        from penstock.gpu_worker.engine.output.step_output import StepOutput

        return StepOutput(tuple((1,) if span.samples else () for span in plan.spans))


def _step(engine: Engine, runner: _Silent, device: Device) -> float:
    plan = engine.schedule()
    assert plan is not None
    seconds = device.run(plan)
    engine.collect(plan, runner.run(plan))
    engine.observe(plan, seconds)
    return seconds


def p99(gaps: list[float]) -> float:
    return sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1]


@pytest.mark.parametrize(
    "device",
    [
        Device(),
        Device(seed=1, noise=0.2),
        Device(base=0.012, per_token=4e-5, per_sequence=1e-5, per_pair=1e-9),
    ],
    ids=["cpu", "noisy", "gpu"],
)
def test_a_long_prompt_does_not_hold_up_streams(device: Device) -> None:
    assert p99(streaming(Chunking.ADAPTIVE, device)) <= 2 * TARGET_S
    assert p99(streaming(Chunking.OFF, device)) > 2 * TARGET_S


def test_several_prompts_share_the_chunk() -> None:
    gaps = streaming(Chunking.ADAPTIVE, Device(), prompts=4)
    assert p99(gaps) <= 2 * TARGET_S


def test_the_time_there_is_is_used() -> None:
    """A chunk far below what the target allows would delay first tokens for nothing."""
    gaps = sorted(streaming(Chunking.ADAPTIVE, Device(pauses=0.0))[: -64 * STREAMS])
    assert gaps[len(gaps) // 2] > 0.8 * TARGET_S


# -- without chunks ------------------------------------------------------------------------------


def test_without_chunks_a_prompt_is_read_in_one_step() -> None:
    cfg = config(
        chunking=Chunking.OFF,
        max_batch_tokens=72,
        max_sequences=8,
        chunk_size=72,
        prefix_cache=False,
    )
    engine = Engine(cfg, PieceStream)
    for index in range(3):
        engine.add(request(f"r{index}", range(1, 31), max_tokens=4))
    runner, planned = _Silent(), []
    while (plan := engine.schedule()) is not None:
        planned.append({span.sequence.id: span.num_tokens for span in plan.spans})
        engine.collect(plan, runner.run(plan))
    # Two of 30 fit into 72; the third waits for the next step.
    assert planned[0] == {"r0": 30, "r1": 30}
    assert planned[1] == {"r0": 1, "r1": 1, "r2": 30}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"chunking": Chunking.OFF, "max_batch_tokens": 71, "chunk_size": 71}, "max_batch_tokens"),
        (
            {"chunking": Chunking.OFF, "max_batch_tokens": 63, "chunk_size": 63},
            "and max_batch_tokens is",
        ),
        ({"chunking": Chunking.OFF, "max_batch_tokens": 72, "chunk_size": 63}, "chunk_size"),
        ({"chunking": Chunking.ADAPTIVE, "target_itl_s": 0.0}, "target_itl_s"),
        ({"chunking": Chunking.ADAPTIVE, "min_chunk_size": 17}, "min_chunk_size"),
        ({"chunking": Chunking.ADAPTIVE, "min_chunk_size": 0}, "min_chunk_size"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError, match=field):
        config(**changes)


def test_the_fixed_default_does_not_look_at_its_other_settings() -> None:
    assert isinstance(config(target_itl_s=0.0, min_chunk_size=1000), EngineConfig)
