"""Every combination of modes gives what ``generate`` gives, token for token.

Chunking x prefix cache x what becomes of preempted KV x choices x company, over families that
differ in what attention keeps: one test per cell. One family runs all cells, some others a quarter
of them that holds every pair of modes; ``make oracle`` runs all. Preemption is forced by urgent
requests of one token that come with every third of the subject's, and by a pool of little more than
one sequence.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from model.families import VOCAB_SIZE, WINDOW
from model.oracle.generate_alone import generate_alone

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.kv.kv_cache_groups import KVCacheGroup
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest
from penstock.gpu_worker.engine.scheduling.preemption import PreemptionMode
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.engine.stats import EngineStats
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.layer_groups import windows_of_groups
from penstock.gpu_worker.model.kv.swap_pool import SwapPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.gpu_worker.model.text.detokenizer import IncrementalDetokenizer
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane, Reason

Loaded = Callable[[str], LoadedModel]
Oracle = Callable[[str], Any]

FAMILIES = {
    "llama": "the plain line",
    "mistral": "sliding window in all layers",
    "gemma2": "softcap, window in every other layer",
    "gpt_oss": "sinks, window in every other layer, MoE",
    "mixtral": "MoE",
    "deepseek_v3": "MLA",
}
BLOCK_SIZE = 4
OUTPUT_TOKENS = 20
PROMPT_TOKENS = WINDOW + 5
MAX_MODEL_LEN = PROMPT_TOKENS + OUTPUT_TOKENS + 2
MAX_SEQUENCES = 8
PLENTY = 200
URGENT_EVERY = 3
"""Tokens of the subject, in all its choices, from one urgent request to the next."""
SCARCE = -(-MAX_MODEL_LEN // BLOCK_SIZE) + 3
"""Blocks of a pool, for two sequences hardly."""
SCARCE_IN_WINDOW = SCARCE - 3
"""The same where a long sequence gives up what left the window."""


def _ids(seed: int, count: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, VOCAB_SIZE - 1) for _ in range(count))


SUBJECT = _ids(1, PROMPT_TOKENS)
COMPANY = {
    "same begin": (*SUBJECT[:WINDOW], *_ids(2, 3)),
    "one token": _ids(3, 1),
    "short": _ids(4, WINDOW),
    "other": _ids(5, PROMPT_TOKENS - 4),
}


@dataclass(frozen=True)
class Cell:
    """One combination of modes."""

    chunking: Chunking
    prefix_cache: bool
    preemption: str
    choices: int
    company: bool

    def __str__(self) -> str:
        cache = "cache" if self.prefix_cache else "no-cache"
        company = "mixed" if self.company else "alone"
        return f"{self.chunking.value}-{cache}-{self.preemption}-n{self.choices}-{company}"

    @property
    def in_quarter(self) -> bool:
        """A fraction of the cells with every pair of modes, by two parities."""
        swapped, several = self.preemption == "swap", self.choices > 1
        turned = self.chunking is Chunking.FIXED
        return not self.prefix_cache ^ swapped ^ several and self.company == (
            self.prefix_cache ^ turned
        )

    @property
    def crowded(self) -> bool:
        """Whether more than one sequence wants to run."""
        return self.company or self.choices > 1

    def config(self, model: LoadedModel) -> EngineConfig:
        whole = MAX_MODEL_LEN + MAX_SEQUENCES
        chunked = self.chunking is not Chunking.OFF
        windows = windows_of_groups(model.geometry, MAX_MODEL_LEN)
        host = PLENTY if self.preemption == "swap" else 0
        first, *more = (
            KVCacheGroup(SCARCE if window is None else SCARCE_IN_WINDOW, window, host)
            for window in windows
        )
        most = {Chunking.FIXED: 5, Chunking.ADAPTIVE: 20, Chunking.OFF: MAX_MODEL_LEN}
        return EngineConfig(
            block_size=BLOCK_SIZE,
            num_blocks=first.num_blocks,
            window=first.window,
            more_kv_cache_groups=tuple(more),
            max_batch_tokens=24 if chunked else whole,
            # So few that all places are taken, and whoever is urgent takes somebody's.
            max_sequences=2 if self.crowded else 1,
            chunk_size=most[self.chunking],
            chunking=self.chunking,
            target_itl_s=0.006,
            min_chunk_size=2 if chunked else 1,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=model.eos_token_ids,
            vocab_size=model.vocab_size,
            prefix_cache=self.prefix_cache,
            watermark=0.0,
            preemption="swap" if self.preemption == "swap" else "recompute",
            num_host_blocks=first.num_host_blocks,
        )


CELLS = [
    Cell(*modes)
    for modes in itertools.product(
        Chunking, (True, False), ("swap", "recompute"), (1, 3), (False, True)
    )
]


WHOLE = "gemma2"
"""The family of all cells: its KV lies in two pools."""
QUARTERS = ("llama", "mistral", "gpt_oss", "deepseek_v3")


def _matrix() -> list[Any]:
    return [
        pytest.param(
            family,
            cell,
            id=f"{family}-{cell}",
            marks=()
            if family == WHOLE or (family in QUARTERS and cell.in_quarter)
            else pytest.mark.slow,
        )
        for family, cell in itertools.product(FAMILIES, CELLS)
    ]


@pytest.fixture(scope="session")
def expected(oracle: Oracle) -> Callable[[str], tuple[int, ...]]:
    """Per family what ``generate`` puts out for the subject's prompt."""
    made: dict[str, tuple[int, ...]] = {}

    def get(family: str) -> tuple[int, ...]:
        if family not in made:
            made[family] = generate_alone(oracle(family), SUBJECT, OUTPUT_TOKENS)
        return made[family]

    return get


def _requests(cell: Cell) -> Iterator[EngineRequest]:
    """The subject in the middle of its company, which samples and differs in lane and length."""
    lanes = itertools.cycle(Lane)
    company = list(COMPANY.items()) if cell.company else []
    greedy = SamplingOptions(temperature=0.0, max_tokens=OUTPUT_TOKENS, n=cell.choices)
    sampled = SamplingOptions(temperature=0.9, top_k=20, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    everyone = [*company[:2], ("subject", SUBJECT), *company[2:]]
    for index, (name, prompt) in enumerate(everyone):
        yield EngineRequest(
            id=name,
            lane=next(lanes) if cell.company else Lane.BATCH,
            tenant="t",
            prompt_ids=prompt,
            options=greedy if name == "subject" else sampled,
            seed=index,
            arrival=float(index),
        )


def _urgent(number: int) -> EngineRequest:
    """One that takes the place of whoever is least urgent, for a step."""
    return EngineRequest(
        id=f"urgent {number}",
        lane=Lane.CRITICAL,
        tenant="t",
        prompt_ids=_ids(100 + number, 1),
        options=SamplingOptions(temperature=0.0, max_tokens=1),
        seed=0,
        arrival=float(number),
    )


def serve(model: LoadedModel, cell: Cell) -> tuple[list[tuple[int, ...]], EngineStats]:
    """The subject's choices as the engine publishes them; one request arrives in each step."""
    config = cell.config(model)
    pool = KVPool(model.geometry, config.kv_cache_groups, BLOCK_SIZE, model.device, model.dtype)
    num_host_blocks = [group.num_host_blocks for group in config.kv_cache_groups]
    host = SwapPool(pool, num_host_blocks) if cell.preemption == "swap" else None
    runner = ModelRunner(model, pool, swap_pool=host)
    engine = Engine(config, lambda ids: IncrementalDetokenizer(model.tokenizer, ids))
    arrivals = _requests(cell)
    choices: list[list[int]] = [[] for _ in range(cell.choices)]
    num_urgent = 0
    while True:
        for request in itertools.islice(arrivals, 1):
            assert engine.add(request) is None
        if sum(map(len, choices)) > num_urgent * URGENT_EVERY:
            assert engine.add(_urgent(num_urgent)) is None
            num_urgent += 1
        plan = engine.schedule()
        if plan is None:
            break
        output = runner.run(plan)
        # A step of a machine on which a token takes half a millisecond.
        engine.observe(plan, 0.001 + 0.0005 * plan.num_tokens)
        for update in engine.collect(plan, output):
            if update.id == "subject":
                assert update.start == len(choices[update.choice])
                choices[update.choice] += update.token_ids
            if update.finish is not None:
                assert update.finish.reason in (Reason.STOP, Reason.LENGTH)
        engine.check_integrity()
    return [tuple(choice) for choice in choices], engine.stats()


@pytest.mark.parametrize(("family", "cell"), _matrix())
def test_tokens_are_those_of_generate(
    loaded: Loaded, expected: Callable[[str], tuple[int, ...]], family: str, cell: Cell
) -> None:
    found, stats = serve(loaded(family), cell)
    assert found == [expected(family)] * cell.choices
    # The modes did happen: a matrix whose cells are all the easy one proves nothing.
    preempted = {mode.value: 0 for mode in PreemptionMode}
    for (_, _, mode), count in stats.preemptions.items():
        preempted[mode.value] += count
    assert preempted.pop(cell.preemption) >= (2 if cell.company else 4)
    assert not any(preempted.values())
    if cell.company:
        assert bool(stats.prefix_hit_tokens) == cell.prefix_cache
