"""What is known of one sequence's drafts."""

from __future__ import annotations

from penstock.gpu_worker.engine.speculation.draft_state import Drafting, Source


def test_it_is_known_how_many_steps_a_draft_model_has_missed() -> None:
    drafting, missed = Drafting(), []
    for step in (1, 2, 4, 9):
        drafting.ask(step)
        missed.append(drafting.missed)
    assert missed[0] > 100  # it has read nothing yet
    assert missed[1:] == [0, 1, 4]


def test_acceptance_is_a_windows_and_begins_with_the_workers() -> None:
    drafting = Drafting()
    assert drafting.rate(Source.DRAFT, 0.6) == 0.6
    for _ in range(40):
        drafting.observe(Source.DRAFT, 4, 4)
    assert drafting.rate(Source.DRAFT, 0.6) > 0.95
    for _ in range(120):
        drafting.observe(Source.DRAFT, 4, 0)
    assert drafting.rate(Source.DRAFT, 0.6) < 0.25
