"""What is known of one sequence's drafts."""

from __future__ import annotations

from penstock.gpu_worker.engine.plan import DraftSource
from penstock.gpu_worker.engine.speculation.draft_state import DraftState


def test_acceptance_is_a_windows_and_begins_with_the_workers() -> None:
    state = DraftState()
    assert state.rate(DraftSource.DRAFT, 0.6) == 0.6
    for _ in range(40):
        state.rate(DraftSource.DRAFT, 0.6)
        state.observe(DraftSource.DRAFT, 4, 4)
    assert state.rate(DraftSource.DRAFT, 0.6) > 0.95
    for _ in range(160):
        state.rate(DraftSource.DRAFT, 0.6)
        state.observe(DraftSource.DRAFT, 4, 0)
    assert state.rate(DraftSource.DRAFT, 0.6) < 0.25


def test_refused_drafts_are_forgotten_in_time() -> None:
    """Else a sequence whose text changes would never draft again."""
    state = DraftState()
    for _ in range(20):
        state.observe(DraftSource.NGRAM_SHORT, 3, 0)
    assert state.rate(DraftSource.NGRAM_SHORT, 0.6) < 0.15
    for _ in range(200):
        state.rate(DraftSource.NGRAM_SHORT, 0.6)
    assert state.rate(DraftSource.NGRAM_SHORT, 0.6) > 0.5


def test_sources_are_counted_apart() -> None:
    state = DraftState()
    state.observe(DraftSource.DRAFT, 4, 0)
    assert state.rate(DraftSource.DRAFT, 0.5) < 0.5
    assert state.rate(DraftSource.NGRAM_LONG, 0.5) == 0.5
