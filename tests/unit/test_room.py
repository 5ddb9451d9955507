"""How much more a worker asks for."""

from __future__ import annotations

import pytest

from penstock.gpu_worker.edge.claim_budget import NO_ROOM, Room
from penstock.shared.protocol import Lane

CRITICAL, NORMAL, BATCH = Lane


def room(owned: dict[str, int], waiting: dict[Lane, int] | None = None, arriving: int = 0) -> Room:
    return Room.beside(
        owned, waiting or {}, arriving, max_sequences=8, claim_batch=6, step_tokens=100
    )


@pytest.mark.parametrize(
    ("owned", "expected"),
    [
        ({}, Room(6, BATCH)),
        ({"critical": 3, "batch": 2}, Room(3, BATCH)),
        ({"critical": 3, "batch": 5}, Room(5, NORMAL)),
        ({"normal": 8}, Room(6, CRITICAL)),
        ({"critical": 8}, NO_ROOM),
    ],
)
def test_sequences_keep_out_what_is_not_more_urgent(owned: dict[str, int], expected: Room) -> None:
    assert room(owned) == expected


def test_waiting_work_keeps_out_what_is_not_more_urgent() -> None:
    assert room({"batch": 1}, {BATCH: 1}) == Room(6, NORMAL)
    assert room({"critical": 1}, {CRITICAL: 1}) == NO_ROOM


def test_new_prompts_that_fill_a_step_keep_everything_out() -> None:
    assert room({"normal": 1}, arriving=99) == Room(6, BATCH)
    assert room({"normal": 1}, arriving=100) == NO_ROOM
