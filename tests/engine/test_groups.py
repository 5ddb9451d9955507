"""Requests with several outputs: shared prompts, one end, and each choice as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
from engine.fakes import FakeRunner, PieceStream, Result, config, decode, kv_manager, request, solo

from penstock.gpu_worker.engine.config import EngineConfig
from penstock.gpu_worker.engine.engine import Engine
from penstock.gpu_worker.engine.groups.beam_group import BeamGroup
from penstock.gpu_worker.engine.output.output_state import OutputState
from penstock.gpu_worker.engine.output.step_output import StepOutput
from penstock.gpu_worker.engine.requests.engine_request import EngineRequest, Update
from penstock.gpu_worker.engine.requests.request_validator import RequestValidator
from penstock.gpu_worker.engine.scheduling.policies.fcfs import FcfsPolicy
from penstock.gpu_worker.engine.scheduling.scheduler import Scheduler
from penstock.gpu_worker.engine.sequence import Sequence, SequenceStatus
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Reason

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 1, 2)  # with blocks of four: two whole ones and a half


class Served:
    """What an engine published of its requests."""

    def __init__(self, cfg: EngineConfig, *requests: EngineRequest) -> None:
        self.config = cfg
        self.engine = Engine(cfg, PieceStream)
        self.runner = FakeRunner(cfg.block_size)
        self.updates: list[Update] = []
        for req in requests:
            self.publish([update for update in [self.engine.add(req)] if update is not None])

    def publish(self, updates: list[Update]) -> None:
        ended = {update.id for update in self.updates if update.finish is not None}
        assert not ended & {update.id for update in updates}, "an update after the end"
        self.updates += updates

    def step(self) -> bool:
        plan = self.engine.schedule()
        self.engine.check_integrity()
        if plan is None:
            return False
        self.publish(self.engine.collect(plan, self.runner.run(plan)))
        self.engine.check_integrity()
        return True

    def run(self) -> Served:
        while self.step():
            assert len(self.updates) < 10_000
        assert not self.engine.has_work
        assert self.engine.stats().used_blocks == 0
        return self

    def choices(self, id: str = "r") -> dict[int, Result]:
        """Tokens, text and reason of each choice; index and order are checked on the way."""
        ids: dict[int, list[int]] = {}
        texts: dict[int, str] = {}
        reasons: dict[int, Reason] = {}
        for update in self.updates:
            if update.id == id and update.token_ids:
                known = ids.setdefault(update.choice, [])
                assert update.start == len(known)
                assert update.choice not in reasons
                known += update.token_ids
                texts[update.choice] = texts.get(update.choice, "") + update.text
                for part in update.parts:
                    assert part[:4] == (
                        update.choice,
                        update.start,
                        len(update.token_ids),
                        update.text,
                    )
                    reasons.update({} if part.reason is None else {part.choice: part.reason})
                if not update.parts and update.finish is not None:
                    reasons[update.choice] = update.finish.reason
        return {c: Result(tuple(ids[c]), texts[c], reasons.get(c, Reason.CLIENT)) for c in ids}

    def end(self, id: str = "r") -> Update:
        (last,) = [u for u in self.updates if u.id == id and u.finish is not None]
        return last


@pytest.mark.parametrize("max_sequences", [1, 2, 8])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_each_choice_is_what_it_would_be_alone(max_sequences: int, prefix_cache: bool) -> None:
    cfg = config(max_sequences=max_sequences, prefix_cache=prefix_cache)
    req = request("r", PROMPT, n=5, max_tokens=9, ignore_eos=False, stop=("ab",))
    served = Served(cfg, req).run()
    assert served.choices() == {c: solo(req, cfg, c) for c in range(5)}
    finish = served.end().finish
    assert finish is not None
    ended = {result.reason for result in served.choices().values()}
    assert finish.reason is (Reason.STOP if ended == {Reason.STOP} else Reason.LENGTH)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_share_the_prompts_blocks(prefix_cache: bool) -> None:
    cfg = config(prefix_cache=prefix_cache)
    served = Served(cfg, request("r", PROMPT, n=4, max_tokens=4))
    served.step()
    assert served.runner.num_computed == len(PROMPT)
    served.step()
    # Two whole blocks in common, and for each the half one with room for what comes.
    assert served.engine.stats().used_blocks == 2 + 4
    # The first decodes, the others compute the prompt's last token again.
    assert served.runner.num_computed == len(PROMPT) + 4
    served.run()


def test_a_choice_that_was_preempted_comes_back_to_its_siblings_blocks() -> None:
    cfg = config(num_blocks=12, prefix_cache=False, max_model_len=40)
    req = request("r", PROMPT, n=3, max_tokens=20)
    served = Served(cfg, req).run()
    assert served.choices() == {c: solo(req, cfg, c) for c in range(3)}
    assert sum(served.engine.stats().preemptions.values()) > 0
    # Of a preempted choice its own tokens are computed again, and at most the prompt's last block.
    lost = sum(served.engine.stats().preempted_tokens.values())
    assert served.runner.num_computed < len(PROMPT) + 3 * 20 + lost


def test_a_group_is_aborted_as_a_whole() -> None:
    served = Served(config(), request("r", PROMPT, n=3), request("other", (5,), max_tokens=3))
    served.step()
    served.step()
    assert served.engine.abort("r")
    assert not served.engine.abort("r")
    served.run()
    assert {update.id for update in served.updates} == {"r", "other"}
    assert (
        served.choices("other")[0].token_ids
        == solo(request("o", (5,), max_tokens=3), served.config).token_ids
    )


def test_a_failing_step_ends_a_group_once() -> None:
    served = Served(config(), request("r", PROMPT, n=3))
    served.step()
    plan = served.engine.schedule()
    assert plan is not None
    assert len(plan.spans) == 3
    (update,) = served.engine.fail(plan, Reason.ENGINE_ERROR, "injected")
    assert update.finish is not None
    assert (update.id, update.token_ids, update.finish.reason) == ("r", (), Reason.ENGINE_ERROR)
    served.engine.check_integrity()
    assert served.engine.stats().used_blocks == 0


def test_a_continued_group_goes_on_where_each_choice_was() -> None:
    cfg = config()
    whole = {c: solo(request("r", PROMPT, n=3, max_tokens=6), cfg, c) for c in range(3)}
    published = (whole[0].token_ids, whole[1].token_ids[:2], ())
    req = request("r", PROMPT, n=3, max_tokens=6, choice_ids=published)
    served = Served(cfg, req)
    served.run()
    rest = {
        c: ids for c, ids in ((c, whole[c].token_ids[len(published[c]) :]) for c in whole) if ids
    }
    got: dict[int, tuple[int, ...]] = {}
    for update in served.updates:
        assert update.start == len(published[update.choice]) + len(got.get(update.choice, ()))
        got[update.choice] = (*got.get(update.choice, ()), *update.token_ids)
    assert got == rest
    finish = served.end().finish
    assert finish is not None
    assert finish.reason is Reason.LENGTH


def test_a_group_whose_end_was_lost_ends_at_once() -> None:
    cfg = config()
    req = request("r", PROMPT, n=2, max_tokens=3)
    published = tuple(solo(req, cfg, c).token_ids for c in range(2))
    again = request("r", PROMPT, n=2, max_tokens=3, choice_ids=published)
    served = Served(cfg, again)
    (update,) = served.updates
    assert update.finish is not None
    assert (update.token_ids, update.finish.reason) == ((), Reason.LENGTH)
    assert not served.engine.has_work


def test_best_of_gives_the_likeliest_candidates() -> None:
    cfg = config()
    many = Served(cfg, request("r", PROMPT, n=6, max_tokens=7, logprobs=0)).run()
    figures: dict[int, list[float]] = {}
    for update in many.updates:
        figures.setdefault(update.choice, []).extend(of.logprob for of in update.logprobs)
    ranked = sorted(figures, key=lambda c: -sum(figures[c]) / len(figures[c]))
    best = Served(cfg, request("r", PROMPT, n=2, best_of=6, max_tokens=7)).run()
    assert [best.choices()[rank] for rank in range(2)] == [many.choices()[c] for c in ranked[:2]]
    assert all(not update.logprobs for update in best.updates)
    assert best.end().finish.discarded_tokens == 4 * 7
    assert decode(best.choices()[0].token_ids, final=True) == best.choices()[0].text


@pytest.mark.parametrize("kind", [{"best_of": 3}, {"beam_width": 3, "temperature": 0}])
def test_what_a_failed_request_has_generated_is_counted(kind: dict[str, Any]) -> None:
    served = Served(config(), request("r", PROMPT, **kind))
    for _ in range(3):
        served.step()
    plan = served.engine.schedule()
    assert plan is not None
    (update,) = served.engine.fail(plan, Reason.ENGINE_ERROR, "injected")
    assert update.finish is not None
    assert update.finish.discarded_tokens == 1 + 3 + 3  # the prompt's one, then of three sequences


def test_best_of_publishes_nothing_before_its_end() -> None:
    served = Served(config(), request("r", PROMPT, n=1, best_of=3, max_tokens=4))
    while not served.updates:
        assert served.step()
    (update,) = served.updates
    assert update.finish is not None
    assert (len(update.token_ids), update.start, update.choice) == (4, 0, 0)
    assert not served.engine.has_work


BEAMS = {"temperature": 0, "beam_width": 4, "n": 3, "max_tokens": 12, "ignore_eos": False}


@pytest.mark.parametrize("max_sequences", [4, 5, 8])
@pytest.mark.parametrize("num_blocks", [24, 64])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_searches_give_the_same_in_any_company(
    max_sequences: int, num_blocks: int, prefix_cache: bool
) -> None:
    """Beams that lose their blocks to others, and others' to them, find what they find alone."""
    prompts = {f"r{i}": PROMPT[i:] for i in range(4)}
    requests = [request(id, prompt, **BEAMS) for id, prompt in prompts.items()]
    alone = {
        id: Served(config(), request("r", p, **BEAMS)).run().choices() for id, p in prompts.items()
    }
    cfg = config(max_sequences=max_sequences, num_blocks=num_blocks, prefix_cache=prefix_cache)
    others = [request(f"o{i}", (i,), max_tokens=20, n=1 + i) for i in range(3)]
    served = Served(cfg, *requests[:2], *others, *requests[2:]).run()
    assert {id: served.choices(id) for id in prompts} == alone
    for req in others:
        assert served.choices(req.id)[0].token_ids == solo(req, cfg).token_ids
    if num_blocks == 24 and max_sequences == 8:
        assert sum(served.engine.stats().preemptions.values()) > 0


def test_a_search_that_cannot_fit_is_refused() -> None:
    served = Served(config(num_blocks=21), request("r", PROMPT, **BEAMS))
    finish = served.end().finish
    assert finish is not None
    assert finish.reason is Reason.OUT_OF_MEMORY
    assert "24 KV blocks" in finish.message
    assert "has 21" in finish.message
    served = Served(config(max_sequences=3), request("r", PROMPT, **BEAMS))
    finish = served.end().finish
    assert finish is not None
    assert finish.reason is Reason.INVALID
    assert "beam_width is 4" in finish.message


def test_a_copy_never_reads_what_another_copy_of_the_step_makes() -> None:
    """A beam without a place at first joins one whose block is copied in that very step.

    The fake KV checks that copies give the same in order and all at once.
    """
    options = {**BEAMS, "beam_width": 3}
    alone = Served(config(), request("r", PROMPT, **options)).run().choices()
    cfg = config(max_sequences=3)
    served = Served(cfg, request("r", PROMPT, **options), request("o", (5,), max_tokens=1))
    served.step()  # the prompt becomes three beams, of which two find a place; the other ends
    plan = served.engine.schedule()
    assert plan is not None
    assert [span.sequence.id for span in plan.spans] == ["r"] * 3
    assert len(plan.copies) == 1
    starts = [span.start for span in plan.spans]
    assert starts == [len(PROMPT), len(PROMPT), 8], "the last one begins with whole blocks only"
    served.publish(served.engine.collect(plan, served.runner.run(plan)))
    assert served.run().choices() == alone


def test_a_beam_is_not_forked_before_it_is_whole() -> None:
    cfg = config(chunk_size=4)
    scheduler = Scheduler(cfg, kv_manager(cfg), FcfsPolicy())
    parent = Sequence(id="r", prompt_ids=PROMPT, options=SamplingOptions(beam_width=2))
    parent.siblings = {parent: None}
    scheduler.add(parent)
    assert scheduler.schedule() is not None
    parent.num_computed_tokens = 4
    child = parent.clone(1, (*PROMPT, 3))
    scheduler.fork(parent, child)
    assert (child.status, child.block_tables) == (SequenceStatus.WAITING, ())
    scheduler.check_integrity({parent, child})


class Nobody:
    """In the scheduler's place: takes every order."""

    def add(self, sequence: Sequence) -> None: ...
    def finish(self, sequence: Sequence) -> None: ...
    def fork(self, parent: Sequence, child: Sequence) -> None: ...


def test_a_report_from_before_the_last_step_of_a_search_counts_for_nothing() -> None:
    """A beam lost its blocks after its report, and reports again when all have moved on."""
    cfg = config()
    first = Sequence(
        id="r", prompt_ids=PROMPT, options=SamplingOptions(beam_width=2, temperature=0)
    )
    validator = RequestValidator(cfg, kv_manager(cfg))
    beams = BeamGroup(Nobody(), validator, first, lambda s: OutputState(s, PieceStream(()), cfg))  # type: ignore[arg-type]

    def report(beam: Sequence, likely: tuple[int, int]) -> None:
        found = {beam: ((likely[0], -1.0), (likely[1], -2.0))}
        assert beams.collect(beam, (likely[0],), StepOutput(((),), candidates=found)) == []

    first.num_computed_tokens = first.num_tokens
    report(first, (1, 2))
    one, two = beams.members
    assert (one.output_ids, two.output_ids) == ([1], [2])
    report(one, (3, 4))  # again, from the prompt's end: it has not computed its token
    for beam, likely in ((two, (7, 8)), (one, (5, 6))):
        beam.num_computed_tokens = beam.num_tokens
        report(beam, likely)
    assert [beam.output_ids for beam in beams.members] == [[1, 5], [1, 6]]
