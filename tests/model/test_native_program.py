"""Models as flat programs of the native library: which take this way, and that it is the same."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from model.engine_run import Bench
from model.families import SUPPORTED, VOCAB_SIZE, save_family
from torch import Tensor, nn

from penstock.gpu_worker.model.forward.batch import Rows, SequenceChunk, pack
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loader import LoadedModel, load_model
from penstock.gpu_worker.model.program import native_decoder
from penstock.gpu_worker.model.program.modules import (
    Unrecognised,
    read_activation,
    read_linear,
    read_norm,
    read_rotary,
)
from penstock.kernels.cpu import NativeUnavailable
from penstock.kernels.kv_layout import KVLayout
from penstock.shared.errors import ConfigurationError

Checkpoint = Callable[[str], Path]
Loaded = Callable[[str], LoadedModel]

BY_TORCH = {
    "gemma3n_text", "gemma4_text", "gpt2", "gpt_neox", "gptj", "opt",
    "deepseek_v3",
}  # fmt: skip
NATIVE = sorted(set(SUPPORTED) - BY_TORCH)

IDS = [(7 * i + 3) % (VOCAB_SIZE - 1) for i in range(45)]


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_which_families_are_computed_natively(loaded: Loaded, model_type: str) -> None:
    model = loaded(model_type)
    assert (model.native is None) == (model_type in BY_TORCH)
    assert model.geometry.layout is (KVLayout.TOKENS if model.native is None else KVLayout.GROUPS)


def rows_of(model: LoadedModel, chunks: list[int], *, others: bool = False) -> Tensor:
    """Logits of all of IDS, computed in these chunks, alone or between two other sequences."""
    pool = KVPool(model.geometry, 40, 16, model.device, model.dtype)
    done, found = 0, []
    for size in chunks:
        chunk = SequenceChunk(IDS[done : done + size], done, [[5, 2, 9]], Rows.ALL)
        before = SequenceChunk(IDS[4:11], 0, [[1]], Rows.ALL)
        after = SequenceChunk(IDS[:2], 0, [[3]])
        logits = model.forward(pack([before, chunk, after] if others else [chunk], pool), pool)
        found.append(logits[7:] if others else logits)
        done += size
    return torch.cat(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", NATIVE)
def test_bits_are_the_same_in_any_chunks_and_company(
    checkpoint: Checkpoint, model_type: str, dtype: str
) -> None:
    model = load_model(checkpoint(model_type), device="cpu", dtype=dtype, native="on")
    whole = rows_of(model, [45])
    for chunks in ([1] * 45, [30, 15], [13, 1, 31]):
        assert torch.equal(rows_of(model, chunks), whole)
    assert torch.equal(rows_of(model, [20, 25], others=True), whole)
    torch.set_num_threads(2)
    try:
        assert torch.equal(rows_of(model, [20, 25]), whole)
    finally:
        torch.set_num_threads(1)


def sampled(bench: Bench, numbers: list[int]) -> dict[str, Any]:
    for number in numbers:
        bench.add(
            str(number), IDS[number : number + 20], seed=number, temperature=1.0, max_tokens=25,
            logprobs=3, ignore_eos=True,
        )  # fmt: skip
    return bench.run()


def test_sampled_tokens_and_logprobs_are_the_same_under_preemption(
    checkpoint: Checkpoint,
) -> None:
    model = load_model(checkpoint("qwen3"), device="cpu", dtype="bfloat16", native="on")
    bench = Bench(model, num_blocks=30, chunk_size=6)
    together = sampled(bench, list(range(5)))
    assert bench.engine.stats().preemptions
    for number in range(5):
        alone = sampled(Bench(model), [number])[str(number)]
        found = together[str(number)]
        assert found.token_ids == alone.token_ids
        assert len(_reported(found)) == 25
        assert _reported(found) == _reported(alone)


def _reported(answer: Any) -> list[Any]:
    return [entry for update in answer.updates for entry in update.logprobs or ()]


def test_largest_logits_are_known_from_the_step_and_given_once(loaded: Loaded) -> None:
    model = loaded("llama")
    assert model.native is not None
    pool = KVPool(model.geometry, 40, 16, model.device, model.dtype)
    chunk = SequenceChunk(IDS, 0, [[5, 2, 9]], Rows.ALL)
    logits = model.forward(pack([chunk], pool), pool)
    expected = logits.max(dim=-1)
    values, places = model.native.largest(logits)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)
    places.fill_(-1)  # as a caller may do
    assert torch.equal(model.native.largest(logits)[1], expected.indices)
    model.forward(pack([chunk], pool), pool)
    assert torch.equal(model.native.largest(-logits)[1], (-logits).max(dim=-1).indices)


def test_a_pool_that_is_dropped_is_gone(loaded: Loaded) -> None:
    model = loaded("llama")
    pool = KVPool(model.geometry, 4, 16, model.device, model.dtype)
    model.forward(pack([SequenceChunk(IDS[:5], 0, [[0]], Rows.LAST)], pool), pool)
    gone = weakref.ref(pool.layers[0].key)
    del pool
    assert gone() is None


def test_weights_are_not_held_twice(checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint("llama"), device="cpu", native="on")
    linears = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
    assert all(linear.weight.numel() == 0 for linear in linears)


# ---- what is not computed natively


def test_a_library_that_cannot_be_had_leaves_torch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable() -> None:
        raise NativeUnavailable("no C++ compiler found")

    monkeypatch.setattr(native_decoder, "load_library", unavailable)
    with caplog.at_level(logging.INFO):
        model = load_model(checkpoint("llama"), device="cpu")
    assert model.native is None
    assert "by torch and not by the native library: no C++ compiler found" in caplog.text
    assert model.geometry.layout is KVLayout.TOKENS
    with pytest.raises(ConfigurationError, match=r"model\.native.*no C\+\+ compiler.*auto or off"):
        load_model(checkpoint("llama"), device="cpu", native="on")


def test_off_leaves_everything_to_torch(checkpoint: Checkpoint) -> None:
    assert load_model(checkpoint("llama"), device="cpu", native="off").native is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden_act": "mish"}, "activation MishActivation"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary positions of type dynamic",
        ),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    path = save_family("llama", tmp_path, **changes)
    assert load_model(path, device="cpu").native is None
    with pytest.raises(ConfigurationError, match=why):
        load_model(path, device="cpu", native="on")


def test_a_program_that_computes_something_else_is_not_taken(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = native_decoder.describe

    def slightly_wrong(*args: Any) -> Any:
        decoder = describe(*args)
        return replace(decoder, logit_softcap=30.0)

    monkeypatch.setattr(native_decoder, "describe", slightly_wrong)
    with pytest.raises(ConfigurationError, match="the program's logits differ by"):
        load_model(checkpoint("llama"), device="cpu", native="on")
    model = load_model(checkpoint("llama"), device="cpu")
    assert model.native is None
    rows_of(model, [45])  # with all its weights


def test_memory_for_a_second_copy_is_asked_for_first(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_decoder, "available_bytes", lambda device: 1000)
    with pytest.raises(ConfigurationError, match=r"packing its weights takes .* are free"):
        load_model(checkpoint("llama"), device="cpu", native="on")
    model = load_model(checkpoint("llama"), device="cpu")
    assert model.native is None
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("by torch and not by the native library: packing its" in text for text in warned)


# ---- modules, one at a time


class _Norm(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.eps, self._change = nn.Parameter(torch.randn(8)), 1e-5, change

    def forward(self, x: Tensor) -> Tensor:
        return self._change(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


def test_norms_are_told_by_what_they_give() -> None:
    plain = _Norm(lambda x: x)
    plain._change = lambda x: x * plain.weight
    found = read_norm(plain, 8)
    assert found.weight is not None
    assert torch.equal(found.weight, plain.weight)
    shifted = _Norm(lambda x: x)
    shifted._change = lambda x: x * (1 + shifted.weight)
    found = read_norm(shifted, 8)
    assert found.weight is not None
    assert torch.equal(found.weight, 1 + shifted.weight)
    assert read_norm(nn.LayerNorm(8), 8).centred
    with pytest.raises(Unrecognised, match="norm _Norm"):
        read_norm(_Norm(lambda x: x * 1.01), 8)
    with pytest.raises(Unrecognised, match="norm Identity"):
        read_norm(nn.Identity(), 8)


def test_activations_and_linears_are_told_apart() -> None:
    assert read_activation(nn.SiLU()).name == "SILU"
    assert read_activation(nn.GELU()).name == "GELU_ERF"
    assert read_activation(nn.GELU("tanh")).name == "GELU_TANH"
    with pytest.raises(Unrecognised, match="activation Tanh"):
        read_activation(nn.Tanh())

    class Adapted(nn.Linear):
        pass

    with pytest.raises(Unrecognised, match="Adapted in the place of a linear layer"):
        read_linear(Adapted(2, 2))


@pytest.mark.parametrize(("model_type", "neighbours"), [("llama", False), ("glm4", True)])
def test_rotary_pairs(oracle: Any, model_type: str, neighbours: bool) -> None:
    base = oracle(model_type).model
    rotary = read_rotary(base.rotary_emb, base.layers[0].self_attn, 30, None)
    assert rotary.interleaved is neighbours
    assert rotary.cosines.shape == rotary.sines.shape == (30, 8 if model_type == "llama" else 4)
