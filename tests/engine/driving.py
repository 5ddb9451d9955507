"""Driving an engine by hand, a step or a token at a time."""

from __future__ import annotations

from collections.abc import Iterable

from engine.fakes import (
    FakeRunner,
    PieceStream,
    Result,
    config,
)

from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.requests.engine_request import Update
from penstock.shared.protocol.states import Reason


def engine(**changes: object) -> Engine:
    return Engine(config(**changes), PieceStream)


def give(eng: Engine, tokens: dict[str, int]) -> list[Update]:
    """One step in which the named requests get these tokens, if their spans sample."""
    plan = eng.schedule()
    assert plan is not None
    sampled = (((tokens[s.sequence.id],) if s.samples else ()) for s in plan.spans)
    updates = eng.collect(plan, StepOutput(tuple(sampled)))
    eng.check_integrity()
    return updates


def play(eng: Engine, id: str, token_ids: Iterable[int]) -> tuple[list[str], Update]:
    """The model says ``token_ids``; the texts of the updates, and the last update."""
    texts = []
    for token_id in token_ids:
        (update,) = give(eng, {id: token_id})
        assert update.token_ids == (token_id,)
        texts.append(update.text)
    return texts, update


def ended(update: Update | None) -> Reason:
    assert update is not None
    assert update.finish is not None
    return update.finish.reason


def run_all(eng: Engine, runner: FakeRunner) -> dict[str, Result]:
    ids, texts, results = {}, {}, {}
    while plan := eng.schedule():
        for update in eng.collect(plan, runner.run(plan)):
            ids[update.id] = (*ids.get(update.id, ()), *update.token_ids)
            texts[update.id] = texts.get(update.id, "") + update.text
            if update.finish is not None:
                result = Result(ids[update.id], texts[update.id], update.finish.reason)
                results[update.id] = result
        eng.check_integrity()
    return results
