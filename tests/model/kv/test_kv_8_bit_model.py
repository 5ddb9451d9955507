"""Models that keep keys and values in 8 bits: near the full ones, the same in all modes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model.engine_run import Bench
from model.oracle.test_groups_oracle import PROMPTS, ROOMY, SEARCHES, STARVED
from model.oracle.test_groups_oracle import serve as serve_groups
from model.oracle.test_mode_matrix import CELLS, FAMILIES, OUTPUT_TOKENS, SUBJECT, Cell, serve

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.scheduling.scheduler_config import Chunking
from penstock.gpu_worker.model.forward.batch import Rows, SequenceChunk, pack
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.kv.layer_groups import groups_in_budget
from penstock.gpu_worker.model.loading.loaded_model import LoadedModel
from penstock.gpu_worker.model.loading.loader import check_kv_cache_dtype, load_model
from penstock.gpu_worker.model.loading.model_opening import open_model
from penstock.kernels.kv_layout import KVLayout
from penstock.shared.errors import ConfigurationError

Loaded = Callable[[str], LoadedModel]
LoadedInFormat = Callable[[str, str], LoadedModel]
SUBJECTS = {
    ("gemma2", "int8"): "windows in every other layer, computed natively",
    ("deepseek_v3", "int8"): "heads of unequal sizes, by torch",
    ("deepseek_v3", "fp8"): "the same",
    ("mistral", "fp8"): "windows, by torch's fused attention",
}


@pytest.fixture(scope="module")
def in_8_bits(checkpoint: Callable[[str], Path]) -> Iterator[LoadedInFormat]:
    models: dict[tuple[str, str], LoadedModel] = {}

    def get(family: str, number_format: str) -> LoadedModel:
        key = family, number_format
        if key not in models:
            models[key] = load_model(checkpoint(family), device="cpu", kv_cache_dtype=number_format)
        return models[key]

    yield get
    for model in models.values():
        model.close()


@torch.inference_mode()
def logits(model: LoadedModel) -> torch.Tensor:
    """Of all but the first chunk of a sequence, which sees keys and values of the cache alone."""
    pool = KVPool(model.geometry, 40, 4, model.device, model.dtype)
    ids, table = list(SUBJECT), list(range(20))
    found = []
    for start, end in ((0, 5), (5, 11), (11, len(ids))):
        chunk = SequenceChunk(ids[start:end], start, [table] * len(pool.groups), Rows.ALL)
        found.append(model.forward(pack([chunk], pool), pool))
    return torch.cat(found)


@pytest.mark.parametrize(("family", "number_format"), SUBJECTS)
def test_logits_are_near_the_full_ones(
    loaded: Loaded, in_8_bits: LoadedInFormat, family: str, number_format: str
) -> None:
    model = in_8_bits(family, number_format)
    assert model.geometry.layout.number_format == number_format
    full, found = logits(loaded(family)), logits(model)
    difference = (found - full).norm(dim=-1) / full.norm(dim=-1)
    # e4m3 has three bits of mantissa, the whole numbers of 8 bits have up to seven.
    assert 0 < float(difference.max()) < {"int8": 0.1, "fp8": 0.3}[number_format]


def is_quick(family: str, number_format: str, cell: Cell) -> bool:
    """Whether a cell runs always: with MLA by torch one takes seconds."""
    if (family, number_format) not in SUBJECTS or not cell.in_quarter or not cell.company:
        return False
    return family != "deepseek_v3" or (cell.chunking is Chunking.ADAPTIVE and cell.choices == 1)


def matrix() -> list[Any]:
    return [
        pytest.param(
            family,
            number_format,
            cell,
            id=f"{family}-{number_format}-{cell}",
            marks=() if is_quick(family, number_format, cell) else pytest.mark.slow,
        )
        for family, number_format, cell in itertools.product(FAMILIES, ("int8", "fp8"), CELLS)
    ]


@pytest.mark.parametrize(("family", "number_format", "cell"), matrix())
def test_tokens_are_the_same_in_all_modes(
    in_8_bits: LoadedInFormat, family: str, number_format: str, cell: Cell
) -> None:
    model = in_8_bits(family, number_format)
    alone = Bench(model)
    alone.add("a", SUBJECT, temperature=0.0, max_tokens=OUTPUT_TOKENS)
    expected = tuple(alone.run()["a"].token_ids)
    found, stats = serve(model, cell)
    assert found == [expected] * cell.choices
    assert sum(stats.preemptions.values())


def test_beams_in_fp8_are_the_same_with_few_blocks(in_8_bits: LoadedInFormat) -> None:
    """Forks share blocks; each copies a shared block before it writes there."""
    model = in_8_bits("mistral", "fp8")
    requests = {name: (PROMPTS[-1], options) for name, options in SEARCHES.items()}
    expected, _ = serve_groups(model, requests, **ROOMY)
    found, preemptions = serve_groups(model, requests, **STARVED)
    assert found == expected
    assert preemptions > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("layout", "number_format", "scale_bytes"),
    [(KVLayout.TOKENS, "int8", 2), (KVLayout.GROUPS, "int8", 2), (KVLayout.TOKENS, "fp8", 1)],
)
def test_as_many_more_blocks_fit(
    loaded: Loaded, dtype: torch.dtype, layout: KVLayout, number_format: str, scale_bytes: int
) -> None:
    geometry = replace(loaded("llama").geometry, layout=layout)
    config = EngineConfig(
        block_size=16, num_blocks=1, max_batch_tokens=32, max_sequences=4, chunk_size=32,
        max_model_len=512, eos_token_ids=frozenset({1}), vocab_size=8,
    )  # fmt: skip
    full, small = (
        groups_in_budget(g, dtype, 1 << 20, config, use_all=True)[0].num_blocks
        for g in (geometry, replace(geometry, layout=layout.in_format(number_format)))
    )
    dim = geometry.layers[0].key_dim
    assert small / full == pytest.approx(dtype.itemsize * dim / (dim + scale_bytes), rel=0.01)


def most_without_preemption(model: LoadedModel, budget: int) -> int:
    """Sequences of 8 + 24 tokens that run together in ``budget`` bytes of KV and none is evicted.

    One more than those has one preempted.
    """
    config = EngineConfig(
        block_size=4, num_blocks=1, max_batch_tokens=512, max_sequences=64, chunk_size=8,
        max_model_len=64, eos_token_ids=frozenset(), vocab_size=8, prefix_cache=False,
    )  # fmt: skip
    blocks = groups_in_budget(model.geometry, model.dtype, budget, config, use_all=True)
    preempted: list[bool] = []
    while not any(preempted):
        bench = Bench(
            model, num_blocks=blocks[0].num_blocks, prefix_cache=False, max_batch_tokens=512
        )
        for number in range(len(preempted) + 1):
            prompt = [number + 1, *range(60, 67)]
            bench.add(f"{number}", prompt, temperature=0.0, max_tokens=24, ignore_eos=True)
        answers = bench.run()
        assert all(len(answer.token_ids) == 24 for answer in answers.values())
        preempted.append(sum(bench.engine.stats().preemptions.values()) > 0)
    return len(preempted) - 1


def test_more_sequences_run_before_one_is_preempted(checkpoint: Callable[[str], Path]) -> None:
    counts = {}
    for kind in ("auto", "int8"):
        model = load_model(checkpoint("llama"), device="cpu", dtype="bfloat16", kv_cache_dtype=kind)
        # In bfloat16 five sequences of 8 blocks, and half a sixth.
        counts[kind] = most_without_preemption(model, 44 * 6144)
        model.close()
    # 16 numbers take 32 bytes or, with their scale, 18: 78 blocks of 3,456 bytes.
    assert counts == {"auto": 5, "int8": 9}


def test_the_record_of_a_start_holds_for_8_bits(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    def start(kv_cache_dtype: str) -> tuple[bool, torch.Tensor, KVLayout]:
        opened = open_model(
            checkpoint("llama"), device="cpu", cache=tmp_path, kv_cache_dtype=kv_cache_dtype
        )
        opened.remember()
        return opened.is_known, logits(opened.loaded), opened.loaded.geometry.layout

    first, full, second = start("int8"), start("auto"), start("int8")
    if first[2] is KVLayout.TOKENS_INT8:
        pytest.skip("no native library here")
    assert (first[0], full[0], second[0]) == (False, False, True)
    assert second[2] is KVLayout.GROUPS_INT8
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], full[1])


def test_a_start_in_fp8_is_not_taken_for_a_recorded_one(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for _ in range(2):
        opened = open_model(checkpoint("llama"), device="cpu", cache=tmp_path, kv_cache_dtype="fp8")
        opened.remember()
        assert not opened.is_known
        assert opened.loaded.native is None
        assert opened.loaded.geometry.layout is KVLayout.HEADS_FP8
        opened.loaded.close()


def test_other_formats_are_refused(checkpoint: Callable[[str], Path]) -> None:
    def load(**options: str) -> LoadedModel:
        return load_model(checkpoint("llama"), device="cpu", **options)

    with pytest.raises(ConfigurationError, match="got e5m2 on cpu; allowed: auto, int8, fp8"):
        load(kv_cache_dtype="e5m2")
    with pytest.raises(ConfigurationError, match="got int8 on cuda; allowed: auto, fp8"):
        check_kv_cache_dtype("int8", torch.device("cuda"))
    with pytest.raises(ConfigurationError, match=r"got fp8 with model\.native on, .* int8"):
        load(kv_cache_dtype="fp8", native="on")
