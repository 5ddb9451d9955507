"""Drafts of outputs that have a form: the stream without them, and never a forbidden one."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from model.drafting.speculating import Oracle, draft_model
from model.engine_run import Bench, compiler_of
from model.families import VOCAB_SIZE

from penstock.gpu_worker.engine.plan import Span
from penstock.gpu_worker.engine.speculation.controller import SpeculationConfig
from penstock.gpu_worker.model.drafting.drafters import Proposal
from penstock.gpu_worker.model.loading.loader import LoadedModel
from penstock.gpu_worker.model.structured.mask_maker import MaskMaker
from penstock.shared.protocol.sampling_options import SamplingOptions
from penstock.shared.protocol.states import Lane

Loaded = Callable[[str], LoadedModel]

ROWS = {
    "type": "array",
    "minItems": 4,
    "maxItems": 6,
    "items": {
        "type": "object",
        "properties": {"k": {"enum": ["a", "b"]}},
        "required": ["k"],
        "additionalProperties": False,
    },
}
FORMS: list[dict[str, Any]] = [
    {"json_schema": ROWS},
    {"regex": "([ab]{2}-){3,9}(\u00e9|\U0001f600)?"},
    {"choice": ["yes yes yes yes yes", "no no no no no", "y"]},
    {"grammar": 'start: "(" start? ")" | "[" /[01]{1,12}/ "]"'},
    {},
]
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 2},
]
ASKED = {
    f"{number}.{way}": {**form, **options, "max_tokens": 60}
    for number, form in enumerate(FORMS)
    for way, options in enumerate(WAYS)
}


def speculating(model: LoadedModel, drafter: str, k: int | None, **changes: Any) -> Bench:
    rejection = changes.get("rejection", False)
    proposer: Any = draft_model(model, model, 512, independent=rejection)
    if drafter == "careless":
        proposer = Careless(VOCAB_SIZE)
    config = SpeculationConfig(ngram=drafter != "draft", draft=drafter != "ngram", length=k)
    return Bench(model, drafter=proposer, speculation=config, **changes)


class Careless(Oracle):
    """Proposes what it likes, whatever the form."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__({}, 0.0, vocab_size)

    def propose(self, spans: Seq[Span]) -> list[Proposal]:
        draw = self._random.randrange
        return [
            Proposal(tuple(draw(self._vocab_size) for _ in range(span.num_drafts)))
            for span in spans
        ]


def serve(bench: Bench, asked: dict[str, dict[str, Any]] = ASKED) -> dict[str, list[int]]:
    for seed, (id, options) in enumerate(asked.items()):
        bench.add(id, [5, 6, 7 + seed], seed=seed, **options)
    return {id: answer.token_ids for id, answer in bench.run().items()}


def counts(bench: Bench) -> tuple[int, int]:
    stats = bench.engine.stats().speculation
    assert stats is not None
    return sum(stats.drafted.values()), sum(stats.accepted.values())


@pytest.mark.parametrize(
    ("family", "drafter"),
    [
        ("llama", "ngram"),
        ("llama", "draft"),
        ("llama", "auto"),
        ("llama", "careless"),
        ("gemma2", "auto"),
        pytest.param("deepseek_v3", "draft", marks=pytest.mark.slow),
    ],
)
def test_every_form_gives_the_stream_it_gives_without_drafts(
    loaded: Loaded, family: str, drafter: str
) -> None:
    model = loaded(family)
    plain = serve(Bench(model))
    assert len({tuple(ids) for ids in plain.values()}) > len(FORMS)
    for k in (1, 5) if drafter == "auto" else (3,):
        bench = speculating(model, drafter, k)
        assert serve(bench) == plain
        drafted, accepted = counts(bench)
        assert accepted > 0
        if drafter == "draft":
            # Its own draft, under the same form, says what it says; but behind a drafted end there
            # is nothing to choose, and so that end comes without the draft that it was.
            assert drafted - len(ASKED) <= accepted <= drafted


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_rejection_sampling_keeps_to_the_form_and_greedy_tokens_are_the_same(
    loaded: Loaded, drafter: str
) -> None:
    model = loaded("llama")
    greedy = {id: options for id, options in ASKED.items() if options["temperature"] == 0}
    assert serve(speculating(model, drafter, 4, rejection=True), greedy) == serve(
        Bench(model), greedy
    )
    rows = {str(i): {"json_schema": ROWS, "max_tokens": 200} for i in range(12)}
    bench = speculating(model, drafter, 4, rejection=True)
    serve(bench, rows)
    assert counts(bench)[1] > 0
    for answer in bench.answers.values():
        assert 4 <= len(json.loads(answer.text)) <= 6


@pytest.mark.parametrize("drafter", ["draft", "careless"])
@pytest.mark.parametrize("rejection", [False, True])
def test_the_distribution_in_a_form_is_the_one_without_drafts(
    loaded: Loaded, drafter: str, rejection: bool
) -> None:
    """Of 480 outputs each, how often each letter stands at each place, within four deviations."""
    model = loaded("llama")
    asked: dict[str, dict[str, Any]] = {
        str(i): {"regex": "[abc]{4}", "temperature": 1.5, "max_tokens": 8} for i in range(480)
    }

    def texts(bench: Bench) -> list[str]:
        for i, (id, options) in enumerate(asked.items()):
            seed = i if bench.config.speculation is None else 10_000 + i
            bench.add(id, [5, 6, 7], seed=seed, **options)
        return [answer.text for answer in bench.run().values()]

    plain = texts(Bench(model))
    # Nothing is ever deferred: what comes is a function of the seeds.
    masks = MaskMaker(wait_s=30.0)
    drafted = texts(speculating(model, drafter, 3, rejection=rejection, masks=masks))
    masks.close()
    for place in range(4):
        for letter in "abc":
            one, other = (sum(t[place] == letter for t in of) for of in (plain, drafted))
            share = (one + other) / 960
            assert abs(one - other) <= 4 * math.sqrt(2 * 480 * share * (1 - share)) + 1


def test_what_a_form_forbids_is_cut_before_it_is_verified(loaded: Loaded) -> None:
    model = loaded("llama")
    compiler = compiler_of(model)
    bench = speculating(model, "ngram", 6)
    text = model.tokenizer.encode("ab-ab-ab-x ab-ab-ab-x ab-")
    bench.add("a", text, regex="(ab-){2,30}", max_tokens=60)
    (answer,) = bench.answers.values()
    compiled = compiler.compile(SamplingOptions(regex="(ab-){2,30}"))
    assert compiled is not None
    num_drafts = 0
    while True:
        plan = bench.engine.schedule()
        if plan is None:
            break
        for span in plan.spans:
            state = compiled().state
            state.fill(answer.token_ids)
            assert state.allowed_prefix(span.drafts) == len(span.drafts)
            num_drafts += span.num_drafts
        bench._take(bench.engine.collect(plan, bench.runner.run(plan)))
    assert num_drafts > 0


def test_json_that_repeats_itself_comes_in_half_the_steps(loaded: Loaded) -> None:
    model = loaded("llama")
    rows = {"json_schema": {**ROWS, "minItems": 12, "maxItems": 12}, "max_tokens": 300}
    plain, fast = Bench(model), speculating(model, "ngram", 6)
    for bench in (plain, fast):
        bench.add("a", [5, 6, 7], seed=3, temperature=0.0, **rows)
        bench.run()
    assert fast.answers["a"].text == plain.answers["a"].text
    assert len(json.loads(fast.answers["a"].text)) == 12
    assert fast.steps < plain.steps / 2


def test_another_worker_goes_on_in_mid_form_with_other_drafts(loaded: Loaded) -> None:
    model = loaded("llama")
    options = {"json_schema": ROWS, "temperature": 1.0, "max_tokens": 200}
    whole = serve(Bench(model), {"a": options})["a"]
    for drafter, rejected in (("auto", False), ("careless", False)):
        bench = speculating(model, drafter, 3, rejection=rejected)
        for cut in range(len(whole)):
            bench.add(str(cut), [5, 6, 7], output_ids=whole[:cut], **options)
        answers = bench.run()
        for cut in range(len(whole)):
            assert answers[str(cut)].token_ids == whole[cut:]


def test_preempted_in_mid_draft_it_goes_on_in_its_form(loaded: Loaded) -> None:
    model = loaded("llama")
    asked = {id: options for id, options in ASKED.items() if id[0] in "013"}
    plain = serve(Bench(model), asked)
    bench = speculating(model, "auto", 3, num_blocks=24, max_sequences=6, prefix_cache=False)
    for seed, (id, options) in enumerate(asked.items()):
        lane = (Lane.BATCH, Lane.NORMAL)[seed % 2]
        bench.add(id, [5, 6, 7 + seed], seed=seed, lane=lane, **options)
    answers = bench.run()
    assert sum(bench.engine.stats().preemptions.values()) > 0
    assert {id: answer.token_ids for id, answer in answers.items()} == plain
    assert counts(bench)[1] > 0


class Slow:
    """A constraint state whose every third filling takes longer than a step waits."""

    def __init__(self, state: Any) -> None:
        self.field, self.masks, self.ahead = state.field, state.masks, state.ahead
        self.allowed_prefix = state.allowed_prefix
        self._state, self._calls, self._never = state, 0, threading.Event()

    def fill(self, token_ids: Any, drafts: Any = ()) -> None:
        self._calls += 1
        if self._calls % 3 == 0:
            self._never.wait(0.02)
        self._state.fill(token_ids, drafts)


def test_a_late_mask_puts_drafts_off_and_changes_nothing(loaded: Loaded) -> None:
    model = loaded("llama")
    asked = {id: options for id, options in ASKED.items() if id[0] in "01"}
    plain = serve(Bench(model), asked)

    def wrap(follower: Any) -> Any:
        follower.state = Slow(follower.state)
        return follower

    masks = MaskMaker(wait_s=0.001)
    bench = speculating(model, "auto", 3, masks=masks)
    for seed, (id, options) in enumerate(asked.items()):
        bench.add(id, [5, 6, 7 + seed], seed=seed, wrap=wrap, **options)
    bench.add("other", [5, 6], max_tokens=60, ignore_eos=True)
    answers = bench.run()
    assert bench.deferrals > 0
    assert {id: answers[id].token_ids for id in asked} == plain
    assert counts(bench)[1] > 0
    masks.close()


def test_a_step_that_raised_is_run_again_with_its_drafts_or_without(loaded: Loaded) -> None:
    """It is run in halves while the masks of the first try may still be made."""
    model = loaded("llama")
    plain = serve(Bench(model))
    bench = speculating(model, "auto", 3)
    sample, calls = bench.runner._sample, 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 4 == 0:
            raise RuntimeError("injected")
        return sample(*args, **options)

    bench.runner._sample = failing  # type: ignore[method-assign]
    # Who stands alone when it raises fails; the others must not notice.
    answers = serve(bench)
    ended = [id for id in plain if answers[id] == plain[id]]
    assert len(ended) > len(plain) / 3
    for id, ids in answers.items():
        assert plain[id][: len(ids)] == ids
    assert counts(bench)[1] > 0
