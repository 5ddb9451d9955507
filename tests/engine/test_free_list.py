from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_worker.engine.kv.free_list import FreeList


def test_starts_with_all_blocks_in_order() -> None:
    assert list(FreeList(4)) == [0, 1, 2, 3]
    assert len(FreeList(4)) == 4


@settings(deadline=None)
@given(st.integers(1, 6), st.data())
def test_behaves_like_a_list(num_blocks: int, data: st.DataObject) -> None:
    free, model = FreeList(num_blocks), list(range(num_blocks))
    for _ in range(data.draw(st.integers(0, 30))):
        absent = sorted({*range(num_blocks)} - {*model})
        actions = ["pop", "remove"] * bool(model) + ["front", "back"] * bool(absent)
        action = data.draw(st.sampled_from(actions))
        if action == "pop":
            assert free.pop_front() == model.pop(0)
        elif action == "remove":
            block = data.draw(st.sampled_from(model))
            free.remove(block)
            model.remove(block)
        else:
            block = data.draw(st.sampled_from(absent))
            (free.push_front if action == "front" else free.push_back)(block)
            model.insert(0 if action == "front" else len(model), block)
        assert list(free) == model
        assert len(free) == len(model)
        assert [block in free for block in range(num_blocks)] == [
            block in model for block in range(num_blocks)
        ]


def test_refuses_what_would_break_the_ring() -> None:
    free = FreeList(1)
    with pytest.raises(ValueError, match="block 0 is in the free list already"):
        free.push_back(0)
    assert free.pop_front() == 0
    with pytest.raises(IndexError, match="empty"):
        free.pop_front()
    with pytest.raises(ValueError, match="block 0 is not in the free list"):
        free.remove(0)
