"""How much more a worker asks for."""

from __future__ import annotations

import pytest

from penstock.gpu_worker.edge.claim_budget import NO_CLAIMS, ClaimBudget
from penstock.shared.protocol.states import Lane

CRITICAL, NORMAL, BATCH = Lane


def budget(
    owned: dict[str, int], waiting: dict[Lane, int] | None = None, arriving: int = 0
) -> ClaimBudget:
    return ClaimBudget.beside(
        owned, waiting or {}, arriving, max_sequences=8, claim_batch=6, step_tokens=100
    )


@pytest.mark.parametrize(
    ("owned", "expected"),
    [
        ({}, ClaimBudget(6, BATCH)),
        ({"critical": 3, "batch": 2}, ClaimBudget(3, BATCH)),
        ({"critical": 3, "batch": 5}, ClaimBudget(5, NORMAL)),
        ({"normal": 8}, ClaimBudget(6, CRITICAL)),
        ({"critical": 8}, NO_CLAIMS),
    ],
)
def test_sequences_keep_out_what_is_not_more_urgent(
    owned: dict[str, int], expected: ClaimBudget
) -> None:
    assert budget(owned) == expected


def test_waiting_work_keeps_out_what_is_not_more_urgent() -> None:
    assert budget({"batch": 1}, {BATCH: 1}) == ClaimBudget(6, NORMAL)
    assert budget({"critical": 1}, {CRITICAL: 1}) == NO_CLAIMS


def test_new_prompts_that_fill_a_step_keep_everything_out() -> None:
    assert budget({"normal": 1}, arriving=99) == ClaimBudget(6, BATCH)
    assert budget({"normal": 1}, arriving=100) == NO_CLAIMS
