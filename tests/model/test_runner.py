"""The runner: one forward for everything, sampling where it is due, copies before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from model.engine_run import Bench
from model.families import VOCAB_SIZE

from penstock.gpu_worker.engine.plan import BlockCopy, Plan, Span
from penstock.gpu_worker.engine.sequence import Sequence
from penstock.gpu_worker.model.forward.batch import PackedStep
from penstock.gpu_worker.model.kv.kv_pool import KVPool
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.runner import ModelRunner
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason

Loaded = Callable[[str], LoadedModel]
Oracle = Callable[[str], Any]

BLOCK_SIZE = 4
GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture
def runner(loaded: Loaded) -> ModelRunner:
    return make_runner(loaded("llama"))


def make_runner(model: LoadedModel, num_blocks: int = 64) -> ModelRunner:
    pool = KVPool(model.geometry, num_blocks, BLOCK_SIZE, model.device, model.dtype)
    return ModelRunner(model, pool)


def make_sequence(seed: int, length: int, blocks: list[int], **options: Any) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    chosen = SamplingOptions(**options) if options else GREEDY
    sequence = Sequence(id=f"s{seed}", prompt_ids=ids, options=chosen, seed=seed)
    sequence.block_tables = (blocks,)
    return sequence


def whole(sequence: Sequence) -> Span:
    return Span(sequence, 0, sequence.num_tokens, True)


@contextmanager
def forwards(model: LoadedModel) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of ``input_ids`` of each forward inside the ``with``."""
    shapes: list[tuple[int, ...]] = []
    forward = model.forward

    def watched(step: PackedStep, pool: KVPool, meanwhile: None = None) -> torch.Tensor:
        shapes.append(tuple(step.input_ids.shape))
        return forward(step, pool, meanwhile)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", watched)
        yield shapes


def own_logits(oracle: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def test_prefill_chunks_and_decodes_are_one_forward_without_padding(runner: ModelRunner) -> None:
    one = make_sequence(1, 9, [7, 3, 5])
    two = make_sequence(2, 14, [1, 9, 0, 2])
    with forwards(runner.loaded) as shapes:
        runner.run(Plan((Span(one, 0, 8, False), Span(two, 0, 3, False))))
        output = runner.run(Plan((Span(one, 8, 1, True), Span(two, 3, 10, False))))
    assert shapes == [(1, 11), (1, 11)]
    assert [len(ids) for ids in output.token_ids] == [1, 0]


def test_only_sampled_rows_reach_the_output_layer(loaded_by_torch: Loaded) -> None:
    runner = make_runner(loaded_by_torch("llama"))
    rows: list[int] = []
    handle = runner.loaded.model.lm_head.register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape[-2])
    )
    one, two = make_sequence(1, 9, [0, 1, 2]), make_sequence(2, 8, [3, 4])
    runner.run(Plan((whole(one), Span(two, 0, 7, False))))
    handle.remove()
    assert rows == [1]


def test_a_step_that_samples_nothing(runner: ModelRunner) -> None:
    sequence = make_sequence(1, 9, [0, 1, 2])
    output = runner.run(Plan((Span(sequence, 0, 5, False),)))
    assert output.token_ids == ((),)
    assert output.timing is not None
    assert output.timing.seconds > 0


def test_greedy_tokens_are_the_argmax_of_the_models_own_logits(
    runner: ModelRunner, oracle: Oracle
) -> None:
    sequences = [make_sequence(seed, 3 + seed, [seed, 20 + seed, 40 + seed]) for seed in range(6)]
    output = runner.run(Plan(tuple(map(whole, sequences))))
    for sequence, token_ids in zip(sequences, output.token_ids, strict=True):
        logits = own_logits(oracle("llama"), sequence.token_ids)
        assert token_ids == (int(logits[-1].argmax()),)


def test_sampled_tokens_do_not_depend_on_the_batch(runner: ModelRunner) -> None:
    drawn = {"temperature": 1.0, "top_p": 0.95}
    sequences = [make_sequence(seed, 7, [2 * seed, 2 * seed + 1], **drawn) for seed in range(8)]
    together = runner.run(Plan(tuple(map(whole, sequences)))).token_ids
    alone = [runner.run(Plan((whole(sequence),))).token_ids[0] for sequence in sequences]
    assert list(together) == alone
    assert len(set(together)) > 4  # drawn, and not one argmax


def test_logits_of_all_rows_and_of_the_last(runner: ModelRunner, oracle: Oracle) -> None:
    one, two = make_sequence(1, 9, [7, 3, 5]), make_sequence(2, 6, [1, 9])
    expected = [own_logits(oracle("llama"), sequence.token_ids) for sequence in (one, two)]
    found = runner.logits([whole(one), whole(two)])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-4)
    last = runner.logits([whole(one), whole(two)], last_only=True)
    torch.testing.assert_close(last, torch.stack([e[-1] for e in expected]), rtol=1e-4, atol=1e-4)


def test_logits_that_are_no_numbers_fail_their_span_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = [make_sequence(seed, 4, [seed]) for seed in range(3)]
    expected = runner.run(Plan(tuple(whole(sequence) for sequence in sequences)))
    real = runner.loaded.forward

    def poisoned(step: PackedStep, pool: KVPool, meanwhile: None = None) -> torch.Tensor:
        logits = real(replace(step, largest_only=False), pool, meanwhile).clone()
        logits[1] = torch.nan
        return logits

    monkeypatch.setattr(runner.loaded, "forward", poisoned)
    output = runner.run(Plan(tuple(whole(sequence) for sequence in sequences)))
    assert output.token_ids == (expected.token_ids[0], (), expected.token_ids[2])
    assert {i: finish.reason for i, finish in output.failures.items()} == {1: Reason.ENGINE_ERROR}


@pytest.mark.parametrize("model_type", ["llama", "gemma3n_text", "deepseek_v3"])
def test_block_copies_come_before_the_forward(loaded: Loaded, model_type: str) -> None:
    """A fork: the copy of a half-filled block goes on like the original."""
    runner = make_runner(loaded(model_type))
    original = make_sequence(1, 6, [0, 1])
    runner.run(Plan((Span(original, 0, 6, True),)))
    original.token_ids += [17, 23]
    fork = make_sequence(1, 6, [0, 2])
    fork.token_ids += [40, 50]
    forked = runner.run(Plan((Span(fork, 6, 2, True),), (BlockCopy(1, 2),)))
    went_on = runner.run(Plan((Span(original, 6, 2, True),)))
    solo = make_runner(loaded(model_type))
    for sequence, output in ((fork, forked), (original, went_on)):
        sequence.block_tables = ([5, 6],)
        assert solo.run(Plan((whole(sequence),))) == output


def test_one_copy_to_the_host_per_step(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one more would make the host wait for the device once more.

    On a CPU, where nothing is copied, the largest logits are looked at before the tokens.
    """
    sequences = [make_sequence(seed, 7, [2 * seed, 2 * seed + 1]) for seed in range(3)]
    sequences.append(make_sequence(3, 7, [6, 7], temperature=1.0))
    runner.run(Plan(tuple(map(whole, sequences))))
    calls: list[torch.dtype] = []
    for name in ("tolist", "item"):
        real = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, real: Any = real) -> Any:
            calls.append(tensor.dtype)
            return real(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for sequence in sequences:
        sequence.token_ids.append(5)
    runner.run(Plan(tuple(Span(sequence, 7, 1, True) for sequence in sequences)))
    assert calls == [torch.float32, torch.int64]


def test_warm_up_runs_the_largest_steps(runner: ModelRunner) -> None:
    with forwards(runner.loaded) as shapes:
        seconds = runner.warm_up(max_batch_tokens=100, max_sequences=5)
    assert seconds > 0
    assert shapes == [(1, 100), (1, 5), (1, 1)]


def test_warm_up_stays_within_a_small_pool(loaded: Loaded) -> None:
    runner = make_runner(loaded("llama"), num_blocks=2)
    with forwards(runner.loaded) as shapes:
        runner.warm_up(max_batch_tokens=512, max_sequences=16)
    assert shapes == [(1, 2 * BLOCK_SIZE), (1, 2), (1, 1)]


def test_two_models_take_turns_in_one_process(loaded: Loaded) -> None:
    runners = [make_runner(loaded(name)) for name in ("llama", "gemma2")]
    sequence = make_sequence(3, 10, [0, 1, 2])
    first = [runner.run(Plan((whole(sequence),))) for runner in runners]
    second = [runner.run(Plan((whole(sequence),))) for runner in reversed(runners)]
    assert first == second[::-1]


def test_recovery_gives_memory_back_and_asks_whether_the_device_is_lost(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda of: calls.append(f"synchronize {of}"))
    runner.recover()
    assert not calls
    cuda = replace(runner.loaded, device=torch.device("cuda", 0))
    monkeypatch.setattr(runner, "loaded", cuda)
    runner.recover()
    assert calls == ["synchronize cuda:0", "empty_cache"]


PROMPT = tuple(range(5, 75))
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "reported": {"temperature": 0.0, "prompt_logprobs": 2},
    "formed": {"regex": "[ab]{9}"},
}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("asked", ASKED)
def test_shorter_chunks_for_want_of_memory_give_the_same(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, model_type: str, asked: str
) -> None:
    """With layers that see all, with a window, and with both."""
    answers, lengths = [], []
    for most in (1000, 20):
        bench = Bench(loaded(model_type))
        forward = bench.runner.loaded.forward

        def bounded(
            step: PackedStep,
            pool: KVPool,
            meanwhile: None = None,
            most: int = most,
            forward: Any = forward,
        ) -> torch.Tensor:
            tokens = step.input_ids.shape[1]
            if tokens > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            lengths.append(tokens)
            return forward(step, pool, meanwhile)

        with monkeypatch.context() as patch:
            patch.setattr(bench.runner.loaded, "forward", bounded)
            bench.add("r", PROMPT, seed=1, max_tokens=12, **ASKED[asked])
            answers.append(bench.run()["r"])
    assert answers[0].finish == answers[1].finish
    assert answers[0].token_ids == answers[1].token_ids
    assert max(lengths) == 64
    assert 16 in lengths
    known = [answer.updates[0].prompt_logprobs for answer in answers]
    assert len(known[0]) == len(known[1])
    for one, other in zip(*known, strict=True):
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
