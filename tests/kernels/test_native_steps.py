"""The threads that compute steps, and steps that ask for what there is not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_programs import AttentionProgram, Span, library, linear, run
from torch import Tensor

from penstock.kernels import RaggedBatch
from penstock.kernels.cpu import LOGITS, BoundStep, HeadShape, NativeProgram, ThreadPool

SHAPE = HeadShape(2, 1, 8, 8)


def attention(**options: int) -> AttentionProgram:
    table = torch.randn(40, SHAPE.columns, generator=torch.Generator().manual_seed(0))
    return AttentionProgram(table, SHAPE, torch.float32, scale=0.3, num_blocks=8, **options)


def test_a_forked_child_computes_with_threads_of_its_own() -> None:
    x, w = torch.randn(40, 64), torch.randn(96, 64)
    program, threads = NativeProgram(library(), torch.float32), ThreadPool(library(), 3)
    rows = program.buffer(64)
    multiplied = program.buffer(64, multiplied=True, outputs=True)
    program.embed(x, rows)
    program.copy(rows, multiplied)
    program.linear(program.matrix(w), multiplied, LOGITS)

    def compute() -> Tensor:
        return run(program, threads, [Span(range(40), 0, range(3))], (), 96)

    expected = compute()
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = torch.equal(compute(), expected)
        finally:
            os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(compute(), expected)


def test_callers_take_turns_at_a_pool() -> None:
    x, w = torch.randn(30, 50), torch.randn(70, 50)
    expected = linear(library().name, x, w)
    found: list[Tensor] = []

    def compute() -> None:
        found.extend(linear(library().name, x, w) for _ in range(20))

    callers = [threading.Thread(target=compute) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 60
    assert all(torch.equal(each, expected) for each in found)


@settings(max_examples=20, deadline=None)
@given(threads=st.integers(1, 9), spin_us=st.sampled_from([0, 50]))
def test_any_number_of_threads(threads: int, spin_us: int) -> None:
    subject = attention()
    pool = ThreadPool(library(), threads, spin_us=spin_us)
    spans = [Span(range(33), 0, [3, 0, 5])]
    expected = subject.step(spans).flatten(1)
    for _ in range(3):
        assert torch.equal(run(subject.program, pool, spans, subject.caches, 16), expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_caller_does_something_else_while_the_others_compute(threads: int) -> None:
    subject, pool = attention(), ThreadPool(library(), threads)
    spans = [Span(range(33), 0, [3, 0, 5])]
    expected = subject.step(spans).flatten(1)
    calls: list[str] = []

    def meanwhile() -> None:
        calls.append("called")
        with pytest.raises(ValueError, match="has not finished"):
            pool.largest(expected)

    def fails() -> None:
        raise KeyError("meanwhile")

    subject.program.take_times()
    found = run(subject.program, pool, spans, subject.caches, 16, meanwhile=meanwhile)
    assert torch.equal(found, expected)
    assert calls == ["called"]
    assert 0 < sum(subject.program.take_times().values()) < 10
    with pytest.raises(KeyError):
        run(subject.program, pool, spans, subject.caches, 16, meanwhile=fails)
    assert torch.equal(run(subject.program, pool, spans, subject.caches, 16), expected)


def threads_of_this_process() -> set[int]:
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads")
def test_pinned_threads_keep_to_one_core_each_and_compute_the_same() -> None:
    subject, spans = attention(), [Span(range(33), 0, [3, 0, 5])]
    expected = subject.step(spans).flatten(1)
    before = threads_of_this_process()
    pool = ThreadPool(library(), 4, pinned=True)
    assert torch.equal(run(subject.program, pool, spans, subject.caches, 16), expected)
    usable = sorted(os.sched_getaffinity(0))
    made = sorted(threads_of_this_process() - before)
    found = [os.sched_getaffinity(thread) for thread in made]
    assert found == [{usable[index % len(usable)]} for index in (1, 2, 3)]


def _tokens(t: dict[str, Tensor]) -> None:
    t["tokens"][2] = 40


def _rows(t: dict[str, Tensor]) -> None:
    t["rows"][0] = 5


def _slots(t: dict[str, Tensor]) -> None:
    t["slots"][1] = 8 * 16


def _tables(t: dict[str, Tensor]) -> None:
    t["tables"][0, 0] = 8


def _before(t: dict[str, Tensor]) -> None:
    t["tables"][0, 0] = -1


def _context(t: dict[str, Tensor]) -> None:
    t["context"][0] = 30


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_tokens, "outside the vocabulary"), (_rows, "not in the step"),
        (_slots, "slot is outside"), (_tables, "block is outside"), (_before, "has no id"),
        (_context, "do not end a context"),
    ],
)  # fmt: skip
def test_nothing_outside_a_buffer_is_touched(
    change: Callable[[dict[str, Tensor]], None], said: str
) -> None:
    subject = attention()
    batch = RaggedBatch.from_lists([5], [20], [[0, 1]], block_size=16)
    tokens, rows = torch.arange(5), torch.arange(5)
    before = [t.clone() for t in subject.caches[0]]
    change(
        {
            "tokens": tokens, "rows": rows, "slots": batch.slots,
            "tables": batch.host_block_tables, "context": batch.context_lens,
        }
    )  # fmt: skip
    with pytest.raises(ValueError, match=said):
        subject.program.run(
            ThreadPool(library(), 2),
            BoundStep.of(
                tokens,
                rows,
                [batch],
                subject.program.bind(subject.caches, [0]),
                torch.empty(5, 16),
            ),
        )
    assert all(
        torch.equal(
            one,
            other,
        )
        or bool(one.isnan().all() and other.isnan().all())
        for one, other in zip(before, subject.caches[0], strict=True)
    )


def test_blocks_before_a_window_need_no_id() -> None:
    subject, whole = attention(window=4), attention(window=4)
    expected = whole.step([Span(range(35), 0, [0, 1, 2])], window=4)
    subject.step([Span(range(30), 0, [0, 1])], window=4)
    found = subject.step([Span(range(30, 35), 30, [-1, 1, 2])], window=4)
    assert torch.equal(found, expected[30:])


def test_operations_that_do_not_fit_are_refused() -> None:
    program = NativeProgram(library(), torch.float32)
    rows, wanted = program.buffer(8), program.buffer(8, multiplied=True, outputs=True)
    matrix = program.matrix(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="columns or type do not fit"):
        program.linear(program.matrix(torch.zeros(4, 9)), wanted, LOGITS)
    with pytest.raises(ValueError, match="of the wanted rows alone"):
        program.linear(matrix, rows, LOGITS)
    with pytest.raises(ValueError, match="no such buffer"):
        program.copy(rows, 7)
    with pytest.raises(ValueError, match="no such matrix"):
        program.linear(matrix + 2, wanted, LOGITS)
    with pytest.raises(ValueError, match="divide the query heads"):
        program.attend(rows, rows, HeadShape(3, 2, 1, 1), 0, scale=1.0)


def test_a_step_may_want_no_logits() -> None:
    subject = attention()
    out = run(subject.program, ThreadPool(library(), 2), [Span(range(7), 0, [0])], subject.caches,
              16, rows=[])  # fmt: skip
    assert out.shape == (0, 16)
    assert not subject.caches[0][0][0, :, 0, :, :7].isnan().any()
